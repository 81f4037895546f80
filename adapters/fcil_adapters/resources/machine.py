"""Cores and memory of this machine, or of the container around this process (torch-free).

A container sees the cores and the memory of its host; its own limits are in the files of its
cgroups, the older kind or the newer.
"""

from __future__ import annotations

import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_NO_LIMIT = 1 << 60  # the older cgroups write a number near 2**63 where there is none


@dataclass(frozen=True)
class CgroupShare:
    """The share that the cgroups above a process leave to it; the tightest counts.

    Attributes:
        quota: cores' worth of time; None: no limit.
        memory_bytes, used_bytes: limit of memory, and the part in use; None: no limit.
    """

    quota: float | None = None
    memory_bytes: int | None = None
    used_bytes: int = 0


def cores(root: Path = ROOT) -> int:
    """Return how many cores this process may keep busy, rounded up: at least 1."""
    here, quota = allowed_cores(), share(root).quota
    return max(1, min(here, math.ceil(quota) if quota else here))


def allowed_cores() -> int:
    """Return how many cores this process may run on, regardless of its time there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor(root: Path = ROOT) -> str:
    """Return the name of the processor's model; empty if the system does not tell."""
    names = re.findall(r"^model name[^:]*:(.*)$", small_text(root / "proc/cpuinfo"), re.MULTILINE)
    return names[0].strip() if names else platform.processor()


def memory(root: Path = ROOT) -> tuple[int, bool]:
    """Return the bytes of memory, and True if a cgroup sets them."""
    import psutil  # slow; not at every start of a command

    total = int(psutil.virtual_memory().total)
    limit = share(root).memory_bytes
    return (limit, True) if limit is not None and limit < total else (total, False)


def share(root: Path = ROOT) -> CgroupShare:
    """Return the tightest limits of this process's cgroups.

    Args:
        root: folder of the system's own files.
    """
    quota: float | None = None
    limit: int | None = None
    used = 0
    for place in _folders(small_text(root / "proc/self/cgroup")):
        folder = root / "sys/fs/cgroup" / place
        time = _quota(small_text(folder / "cpu.max")) or _older_quota(folder)
        if time is not None and (quota is None or time < quota):
            quota = time
        for most, now in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            found = _bytes(small_text(folder / most))
            if found is not None and (limit is None or found < limit):
                in_use = _bytes(small_text(folder / now)) or 0
                limit, used = found, max(0, in_use - _cached(small_text(folder / "memory.stat")))
    return CgroupShare(quota, limit, used)


def _folders(own: str) -> list[str]:
    """Return the folders with this process's limits, the nearest first, from /proc/self/cgroup."""
    places: list[str] = []
    for row in own.splitlines():
        number, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            top: list[str] = []
        elif {"memory", "cpu"} & set(controllers.split(",")):
            top = [controllers]
        else:
            continue
        steps = [s for s in path.split("/") if s]
        places += ["/".join([*top, *steps[:end]]) for end in range(len(steps), -1, -1)]
    return places


def _quota(text: str) -> float | None:
    """Return cores' worth of time from ``cpu.max`` ("200000 100000"); None: no limit."""
    match = re.fullmatch(r"(\d+) (\d+)", text.strip())
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def _older_quota(folder: Path) -> float | None:
    quota, period = (
        small_text(folder / "cpu.cfs_quota_us"),
        small_text(folder / "cpu.cfs_period_us"),
    )
    return _quota(f"{quota.strip()} {period.strip()}")  # -1 is no limit


def _bytes(text: str) -> int | None:
    """Return bytes from ``memory.max`` or ``memory.limit_in_bytes``; None: no limit."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if int(text) < _NO_LIMIT else None


def _cached(text: str) -> int:
    """Return from ``memory.stat`` the bytes of cached files, which are freed when needed."""
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def small_text(path: Path) -> str:
    """Return a small file's text; empty where the system has no such file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
