"""What Linux tells of a daemon: memory, open files, children, environment."""

from __future__ import annotations

from pathlib import Path


def resident_mb(pid: int) -> float | None:
    """Resident memory, MB; None if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("VmRSS")]
    return sizes[0] * 1024 / 1e6 if sizes else None  # a zombie has none


def descriptors(pid: int) -> int | None:
    """Open files; None if the process is gone."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """Processes that this one started and that still run."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def with_environment(name: str, value: str) -> list[int]:
    """Processes that have this variable in their environment."""
    wanted = f"{name}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if wanted in variables:
            found.append(int(path.parent.name))
    return found
