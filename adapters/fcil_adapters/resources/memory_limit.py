"""A bound on this worker's memory, so that an excess hits it and not other processes.

Torch-free. The kernel refuses private memory beyond the bound (RLIMIT_DATA), which Python, numpy
and torch report as a lack of memory; then the images in one pass are halved (`worker.retry`). A
library aborts on a refusal while it is being loaded. So the bound is set when the libraries are
loaded and the weights are not, and covers what the libraries already take.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fcil_protocol.errors import ConfigError
from fcil_protocol.formats import show_size

LEAST_ROOM = 32_000_000  # below it not even a small backbone's weights fit
TORCH_ROOM = 110_000_000  # below it, with torch, a first step of training does not fit
_STATUS = Path("/proc/self/status")

DAEMON_BYTES = 120_000_000  # the size of a working daemon


@dataclass
class _Bound:
    """The memory limit of this process; there is one per process."""

    bound: int = 0
    others: int = 0
    enforced: bool = False


_mine = _Bound()


def configure(bound: int, others: int) -> None:
    """Set the memory bound of the client, and the part that other processes take.

    Args:
        bound: bytes; 0: no bound.
        others: bytes that the daemon has.
    """
    _mine.bound, _mine.others, _mine.enforced = bound, others, False


def enforce(device: str = "cpu", least: int = LEAST_ROOM) -> None:
    """Hold this process to its bound from here on; called when its libraries are loaded.

    On a GPU the bound is torch's share of the GPU's memory: the driver maps more of main memory
    than it uses, so no limit there can work.

    Args:
        device: as torch calls it.
        least: bytes that must be left for the work itself.

    Raises:
        ConfigError: the libraries alone leave too little.
    """
    if not _mine.bound or _mine.enforced:
        return
    if device.startswith("cuda"):
        torch = sys.modules["torch"]  # by name: this module is torch-free, and torch is loaded
        index = torch.device(device).index
        if index is None:  # the bound is of one GPU: torch takes no "cuda" here
            index = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, _mine.bound / total), index)
        _mine.enforced = True
        return
    taken = _taken()
    if taken is None:
        return
    data, files = taken
    room = _mine.bound - _mine.others - files
    if room < data + least:
        raise ConfigError(
            f"--max-memory is {show_size(_mine.bound)}, and the loaded data need at least "
            f"{show_size(required_bound(data + files + least))}.",
            action="Raise --max-memory, or take a smaller --max-threads.",
        )
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or room < hard:  # a tighter one of the system stays
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    _mine.enforced = True


def own_memory() -> int:
    """Return the bytes that this process, a daemon, counts for in addition to its worker."""
    import psutil

    return max(DAEMON_BYTES, int(psutil.Process().memory_info().rss))


def memory_hint(words: str) -> str:
    """Return a sentence to add to a lack of memory under a bound; empty without one.

    Args:
        words: of the error, which may name the requested bytes.
    """
    taken = _taken()
    if not _mine.enforced or taken is None:
        return ""
    least = required_bound(sum(taken) + max(requested_bytes(words), 1))
    return f" It needs --max-memory {show_size(least)} at least, and has {show_size(_mine.bound)}."


def required_bound(own: int) -> int:
    """Return the bound under which this process could have ``own`` bytes, rounded up to 10 MB."""
    return -(-max(own + _mine.others, _mine.bound + 1) // 10_000_000) * 10_000_000


def requested_bytes(words: str) -> int:
    """Return the requested bytes that an error names; 0 if it names none."""
    found = re.search(r"allocate (\d+(?:\.\d*)?) (bytes|KiB|MiB|GiB)", words)
    if found is None:
        return 0
    return int(float(found[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found[2]])


def _taken() -> tuple[int, int] | None:
    """Return mapped private memory, and files in memory, in bytes; None if unknown."""
    try:
        lines = _STATUS.read_text()
        rows = dict(re.findall(r"^(VmData|RssFile|RssShmem):\s+(\d+) kB$", lines, re.MULTILINE))
        return int(rows["VmData"]) << 10, (int(rows["RssFile"]) + int(rows["RssShmem"])) << 10
    except (OSError, KeyError):  # not Linux
        return None
