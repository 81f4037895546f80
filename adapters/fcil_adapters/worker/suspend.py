"""A worker that is suspended for a while and resumes where it was (torch-free)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable


class Suspension:
    """Suspends a worker's process, between its calls or in the middle of one.

    On Linux the process is stopped (SIGSTOP) at any point of its work, with all of its memory.
    Elsewhere a stopped process would outlive its daemon; there a current call continues, and the
    next one waits.

    Attributes:
        allowed: set while the worker may work; a new call waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a worker that may work; ``clock`` counts seconds."""
        self.allowed = asyncio.Event()
        self.allowed.set()
        self._clock = clock
        self._rested_s = 0.0
        self._since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def rested_s(self) -> float:
        """Total seconds for which the worker was suspended; they are no silence of its own."""
        return self._rested_s + (0.0 if self._since is None else self._clock() - self._since)

    def suspend(self) -> None:
        """Suspend the worker."""
        if self.allowed.is_set():
            self.allowed.clear()
            self._since = self._clock()
            self._apply()

    def resume(self) -> None:
        """Resume the worker."""
        if not self.allowed.is_set():
            self._rested_s, self._since = self.rested_s, None
            self.allowed.set()
            self._apply()

    def mark_started(self, process: subprocess.Popen[bytes]) -> None:
        """Note a process's first message: from now on it may be stopped at any moment.

        Before, it has not yet arranged to end with its daemon.
        """
        if self._process is not process:
            self._process, self._stopped = process, False
            self._apply()

    def release(self) -> None:
        """Forget the process, which is about to end or has ended; a stopped one could not end."""
        if self._stopped:
            self._send(signal.SIGCONT)
        self._process, self._stopped = None, False

    def _apply(self) -> None:
        still = not self.allowed.is_set()
        if sys.platform != "linux" or self._process is None or still == self._stopped:
            return
        self._send(signal.SIGSTOP if still else signal.SIGCONT)
        self._stopped = still

    def _send(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # it leads a session of its own
