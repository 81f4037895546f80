"""What Linux tells of processes: memory, CPU, open files, children, environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self


def status_mb(pid: int, field: str = "VmRSS") -> float | None:
    """A memory figure in MB: VmRSS now, VmHWM at most; None if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith(field)]
    return sizes[0] * 1024 / 1e6 if sizes else None  # a zombie has none


def peak_mb(*pids: int) -> float:
    """What these processes had at most, one after the other or together, MB."""
    return sum(status_mb(pid, "VmHWM") or 0.0 for pid in pids)


class PeakMemory:
    """The most that a process and its children have together; memory that they share counts once.

    Use it as a context, and read ``mb`` afterwards.

    Args:
        every_s: between two looks; each holds up the memory management of the processes.
    """

    def __init__(self, pid: int, every_s: float = 0.02) -> None:
        self.mb = 0.0
        self._pid, self._every_s = pid, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            together = sum(_pss_mb(pid) for pid in (self._pid, *children(self._pid)))
            self.mb = max(self.mb, together)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()


def _pss_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


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


def is_intake(pid: int) -> bool:
    """Return True if a process is an intake process of a server."""
    try:
        return b"intake_pool" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def tree(pid: int) -> list[int]:
    """A process and all that it, and those that it started, have started and that still run."""
    return [pid, *(p for child in children(pid) for p in tree(child))]


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


def loopback_bytes() -> int:
    """What the loopback device of this network namespace has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def with_method(folder: Path) -> None:
    """Let the processes that are started from here find the method in this folder."""
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(folder), known) if p)


def again_inside(*namespaces: str) -> int:
    """Run this script once more, with ``--inside``, as root of new namespaces; its exit code."""
    command = [sys.executable, *sys.argv, "--inside"]
    return subprocess.run(["unshare", *namespaces, *command], check=False).returncode
