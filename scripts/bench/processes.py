"""What the system knows of processes: memory, CPU, children."""

import os
from pathlib import Path


def status_mb(pid: int, field: str = "VmRSS") -> float:
    """Return a memory figure of a process in MB: VmRSS now, VmHWM at most; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) * 1024 / 1e6 for x in lines if x.startswith(field)), 0.0)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return all living descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(p) for p in task.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def loopback_bytes() -> int:
    """Return what the loopback device of this network namespace has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0
