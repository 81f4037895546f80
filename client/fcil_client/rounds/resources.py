"""A client's share of its machine: threads, memory and CPU priority."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fcil_adapters.resources import machine
from fcil_protocol.errors import UsageError
from fcil_protocol.formats import read_size, show_size

NICE = 10  # other programs get about ten times as much of a busy processor
IMAGES_BYTES = 2_000_000_000  # of decoded images, if the memory allows it
IMAGES_PART = 4  # and at most 1 / this of the memory
LEAST_BYTES = 250_000_000  # of a daemon and a worker that has loaded nothing


@dataclass(frozen=True)
class Resources:
    """A client's share of its machine.

    Attributes:
        threads: of the worker's computation, and as many again for decoding images.
        nice: CPU priority of the worker.
        bound: bytes that daemon and worker may use together; 0: the owner has set none.
        memory: bytes that the machine has, or its cgroup allows.
        by_cgroup: the limit is the cgroup's.
        image_bytes: largest size of the decoded images.
    """

    threads: int
    nice: int
    bound: int
    memory: int
    by_cgroup: bool
    image_bytes: int

    @property
    def told(self) -> dict[str, Any]:
        """The resources as ``status`` reports them."""
        return {**vars(self), "words": self.description}

    @property
    def description(self) -> str:
        """The resources in one line, for people."""
        whose = "its cgroup allows" if self.by_cgroup else "the machine has"
        memory = f"all the memory that {whose} ({show_size(self.memory)})"
        if self.bound:
            memory = f"at most {show_size(self.bound)} of memory"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        images = f"decoded images at most {show_size(self.image_bytes)}"
        return f"{threads}, nice {self.nice}; {memory}, {images}"


def resources(
    *, threads: int = 0, nice: int = NICE, bound: int = 0, image_bytes: int = 0
) -> Resources:
    """Return the resources that these options select; 0 leaves a choice to the machine."""
    memory, by_cgroup = machine.memory()
    share = min(bound or memory, memory) // IMAGES_PART
    return Resources(
        threads=threads or machine.cores(),
        nice=nice,
        bound=bound,
        memory=memory,
        by_cgroup=by_cgroup,
        image_bytes=image_bytes or min(IMAGES_BYTES, share),
    )


def read_bound(text: str | None) -> int:
    """Read ``--max-memory``: bytes; 0 without it.

    Raises:
        UsageError: it is no size, or less than a client needs.
    """
    if text is None:
        return 0
    size = read_size(
        text,
        "--max-memory",
        "'1.5 GB' or '800 MB'",
        "Give what this client's two processes may take together, or leave it out.",
    )
    if size < LEAST_BYTES:
        raise UsageError(
            f"--max-memory is {show_size(size)}, and a client needs at least "
            f"{show_size(LEAST_BYTES)} before it has loaded anything.",
            action="Give more; with torch and the embedded backbone it takes about 600 MB.",
        )
    return size
