"""Every fuzzing target on its seeds, on damaged seeds, and on what was once found.

`scripts/fuzz` searches on from here; what it finds becomes a file in ``findings/<target>/``.
"""

import os
import random
import time
from pathlib import Path

import pytest

from fcil_protocol.errors import InternalError, WireError
from fuzz.harness import DEEP, Finding, Target, check
from fuzz.mutate import each_replaced, mutate
from fuzz.targets import TARGETS

FINDINGS = Path(__file__).parent / "findings"
# Changed copies of each seed; more where fuzzing is asked for, and `scripts/fuzz` tries millions.
DAMAGED = 40 if "FCIL_FUZZ_EXAMPLES" in os.environ else 15


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(params=TARGETS)
def one(request):
    return TARGETS[request.param]


def damaged(seed, dice):
    """Return a copy with some bytes changed, cut out, doubled or put in."""
    data = bytearray(seed)
    for _ in range(dice.randint(1, 4)):
        at, size = dice.randrange(len(data) + 1), dice.randint(0, 8)
        piece = dice.choice((dice.randbytes(size), data[at : at + size] * 2, b"", b"\xff" * size))
        data[at : at + dice.randint(0, size)] = piece
    return bytes(data)


def test_its_seeds_are_good_enough_to_search_from(one):
    seeds = list(one.seeds())
    accepted = [check(one, seed) for seed in seeds]  # all of them are tried
    assert any(accepted)
    assert all(len(seed) <= one.max_bytes for seed in seeds)


def test_damaged_seeds_break_no_promise(one):
    dice = random.Random(one.name)
    for seed in one.seeds():
        for _ in range(DAMAGED):
            check(one, damaged(seed, dice))


def test_seeds_with_other_values_break_no_promise(one):
    if not one.form:
        return
    dice = random.Random(one.name)
    made = 0
    for seed in one.seeds():
        data = seed
        for _ in range(DAMAGED):
            changed = mutate(one.form, data, dice)
            if changed is None:  # it is of the form no longer
                data = seed
                continue
            made += 1
            check(one, changed)
            data = changed if len(changed) < one.max_bytes and dice.random() < 0.5 else seed
    assert made > DAMAGED / 2


@pytest.mark.full
def test_no_odd_value_in_any_place_breaks_a_promise(one):
    if not one.form:
        return
    made = 0
    for seed in one.seeds():
        for data in each_replaced(one.form, seed):
            check(one, data)
            made += 1
    assert made > 100


def test_no_bytes_and_any_bytes_break_no_promise(one):
    dice = random.Random(one.name)
    for size in (0, 1, 2, 7, 64, 500):
        check(one, dice.randbytes(size))
    for data in DEEP:
        check(one, data)


@pytest.mark.parametrize(
    "path", sorted(FINDINGS.glob("*/*")), ids=lambda p: f"{p.parent.name}-{p.name}"
)
def test_what_was_found_once_is_mended(path):
    check(TARGETS[path.parent.name], path.read_bytes())


# --- the harness itself ---------------------------------------------------------------------


def of(run, **options):
    return Target("t", run, tuple, **options)


def fail(error):
    def run(_data):
        raise error

    return run


def spin(_data):
    began = time.process_time()
    while time.process_time() < began + 0.1:
        pass


def test_an_error_that_nobody_documented_comes_out():
    with pytest.raises(KeyError):
        check(of(fail(KeyError("x"))), b"")
    assert check(of(fail(EOFError()), expected=(EOFError,)), b"") is False


def test_named_errors_are_refusals_unless_they_say_too_much_or_blame_us():
    assert check(of(fail(WireError("no."))), b"") is False
    for error in (WireError("x" * 10_000), WireError(""), InternalError("a defect.")):
        with pytest.raises(Finding):
            check(of(fail(error)), b"")


def test_an_input_that_takes_too_much_time_or_memory_is_found():
    with pytest.raises(Finding, match="took .* MB"):
        check(of(lambda data: bytes(1000 * len(data))), bytes(20_000))
    with pytest.raises(Finding, match="took .* s"):
        check(of(spin), b"", base_s=0.05)
    assert check(of(lambda data: bytes(100 * len(data))), bytes(20_000))


def test_memory_that_is_taken_once_is_no_finding():
    kept = []

    def run(_data):
        if not kept:
            kept.append(bytes(20_000_000))
        return True

    assert check(of(run), b"")
    assert kept
