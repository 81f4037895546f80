"""What every parser must keep for every input: named errors only, an end, and little memory.

Nothing here needs atheris: the same targets run on their seeds in the ordinary tests.
"""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fcil_protocol.errors import FcilError, InternalError

CUT = b"|cut|"  # between the pieces of an input that has several

# What goes down and does not come up again, in every form that is parsed here.
DEEP = (
    b"[" * 4000, b'{"a":' * 800, b"\x91" * 4000, b"\x81\xa1a" * 1300, b"a=" + b"[" * 4000,
    b"\xdd\x00\x01\x86\xa0" * 800, b"\x81\xa1t" + b"\xdc\xff\xff" * 1000,  # and promises much
)  # fmt: skip

# Processor time, which other programs on the machine do not change.
# Far more than any input here needs, far less than one that grows with the square of its length.
BASE_S = 20.0
SEARCH_S = 2.0  # while inputs are searched for: what takes so long is looked at by hand
S_PER_BYTE = 1e-4
# An input may carry its own text into a refusal, but not at any length.
MAX_WORDS = 4_000


class Finding(Exception):
    """A promise that a parser did not keep; not one of the product's errors."""


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        run: parses an input and checks what must hold of the result; True if it was accepted.
        seeds: makes valid inputs, so that a search begins deep inside.
        expected: errors that it documents besides those of fcil.
        base_mb, per_byte: memory that an input may take, in Python's own allocations.
        max_bytes: longest input worth trying.
        form: ``msgpack``, ``json`` or ``safetensors`` if the first piece of an input is that:
            then the search also changes values instead of bytes (`mutate`).
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: Callable[[], Sequence[bytes]]
    expected: tuple[type[Exception], ...] = ()
    base_mb: float = 4.0
    per_byte: int = 300
    max_bytes: int = 4096
    max_words: int = MAX_WORDS
    form: str = ""


TARGETS: dict[str, Target] = {}


def target(name, seeds, **options):
    """Register a function as a target."""

    def register(run):
        TARGETS[name] = Target(name, run, seeds, **options)
        return run

    return register


def check(one: Target, data: bytes, base_s: float = BASE_S) -> bool:
    """Run one input; return whether it was accepted.

    An input that takes too much is run a second time, and only what it takes again is a finding:
    what is imported at first use, and what other threads of the process do, counts too.

    Raises:
        Finding: too long, too much memory, or an error that must not leave a parser.
        Exception: one that nobody documented.
    """
    accepted, excess = _measured(one, data, base_s)
    if excess:
        accepted, excess = _measured(one, data, base_s)
    if excess:
        raise Finding(excess)
    return accepted


def _measured(one: Target, data: bytes, base_s: float) -> tuple[bool, str]:
    """Run one input; return whether it was accepted, and in words what it took too much of."""
    tracemalloc.start()
    before_s = time.process_time()
    try:
        accepted = bool(one.run(data))
    except one.expected:
        accepted = False
    except FcilError as error:
        _check_error(one, error)
        accepted = False
    finally:
        took_s = time.process_time() - before_s
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if took_s > base_s + S_PER_BYTE * len(data):
        return accepted, f"{len(data)} bytes took {took_s:.1f} s."
    if peak > one.base_mb * 1e6 + one.per_byte * len(data):
        return accepted, f"{len(data)} bytes took {peak / 1e6:.1f} MB."
    return accepted, ""


def _check_error(one: Target, error: FcilError) -> None:
    if isinstance(error, InternalError):
        raise Finding("an input was answered as a defect of our own.") from error
    if not error.message:
        raise Finding("an error without a sentence.") from error
    if len(str(error)) > one.max_words:
        raise Finding(f"an error of {len(str(error))} characters.") from error


def pieces(data: bytes, count: int) -> list[bytes]:
    """Split an input at its first cuts; missing pieces are empty."""
    found = data.split(CUT, count - 1)
    return found + [b""] * (count - len(found))


def must(truth: object, promise: str) -> None:
    """Raise a finding unless a promise was kept."""
    if not truth:
        raise Finding(promise)


@dataclass
class Once:
    """A value that is made when it is first needed: imports stay quick."""

    make: Callable[[], object]
    _value: list[object] = field(default_factory=list)

    def __call__(self):
        if not self._value:
            self._value.append(self.make())
        return self._value[0]
