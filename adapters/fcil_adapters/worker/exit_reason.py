"""Reason of a worker's end, from the system and its log (torch-free)."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from fcil_protocol.errors import OutOfMemory, WorkerDied, WorkerError, WorkerStalled
from fcil_protocol.formats import show_size

# Last messages of native code that ends the process when it is refused memory.
_NO_MEMORY = (
    "cannot allocate memory", "bad_alloc", "out of memory", "memoryerror",
    "thread creation failed",
)  # fmt: skip


@dataclass(frozen=True)
class End:
    """The end of a worker.

    Attributes:
        name: its name in messages.
        code: exit code, or minus the signal; None: unknown.
        ours: the daemon ended it.
        stalled: why it was ended, if it was silent for too long.
        oom_killed: the kernel meanwhile ended a process for lack of memory.
        bound: its memory limit in bytes; 0: none.
        said_from: position in the log from which words can be about the end.
    """

    name: str
    code: int | None
    ours: bool = False
    stalled: str = ""
    oom_killed: bool = False
    bound: int = 0
    said_from: int = 0


def exit_error(end: End, log: Path | None) -> WorkerError:
    """Return the error that explains why a worker ended.

    Args:
        end: facts of its end.
        log: file with its last output; None: nowhere.
    """
    who, code = f"the {end.name} worker", end.code
    if end.stalled:
        return WorkerStalled(
            f"{who} {end.stalled}, and was ended.",
            action="See its log; if the machine is merely slow, raise the work timeout.",
        )
    if end.ours:
        return WorkerDied(f"{who} was stopped in the middle of its work.")
    if code == -signal.SIGKILL and end.oom_killed:
        return OutOfMemory(
            f"the kernel killed {who}: the machine ran out of memory.",
            action="Use a smaller micro-batch or fewer threads, or free memory.",
        )
    if code == -signal.SIGKILL:
        return WorkerDied(
            f"{who} was killed (signal 9), perhaps for lack of memory.",
            action="Use a smaller micro-batch or fewer threads.",
        )
    words = _last_words(log, end.said_from)
    if end.bound and _lacked_memory(code, words):
        return OutOfMemory(
            f"{who} was refused memory beyond --max-memory {show_size(end.bound)}, and ended.",
            action="Raise --max-memory, or use a smaller micro-batch or fewer threads.",
        )
    said = f": {words[:200].rstrip('.')}; see {log}" if words else ""
    if code is not None and code < 0:
        return WorkerDied(f"{who} ended by signal {-code} ({_signal_name(-code)}){said}.")
    return WorkerDied(f"{who} ended with exit code {code}{said}.")


def _lacked_memory(code: int | None, words: str) -> bool:
    return code == -signal.SIGABRT or any(text in words.lower() for text in _NO_MEMORY)


def _last_words(log: Path | None, start: int) -> str:
    """Return the last line of the log after a position; for a failed start it names the cause."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
