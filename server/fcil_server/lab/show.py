"""What the laboratory tells while it works: a line for each cell, and one always current."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.status import Status

from fcil_server.lab.plan import Cell
from fcil_server.report_page import NOTHING, duration

QUIET_S = 60.0  # between lines of progress where nobody sits at a terminal


class Show:
    """Words on standard error; cells end in threads, so it holds a lock."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Write a line."""
        with self._lock:
            clock = time.strftime("%H:%M:%S")
            self._console.print(f"{clock} {text}", markup=False)

    def began(self, cell: Cell) -> None:
        """Say that a cell runs."""
        self.say(f"begins: {cell.name}")

    def ended(self, cell: Cell, numbers: Mapping[str, Any]) -> None:
        """Say what a cell came to."""
        seconds = duration(numbers["seconds"]["wall_s"])
        faa, aia = (
            NOTHING if numbers[m] is None else f"{numbers[m]:.1f} %" for m in ("faa", "aia")
        )
        self.say(f"done:   {cell.name}: FAA {faa}, AIA {aia}, {seconds}")

    def failed(self, cell: Cell, why: str) -> None:
        """Say why a cell has no result."""
        self.say(f"FAILED: {cell.name}: {why}")

    def progress(self, done: int, of: int, left_s: float, running: Mapping[str, str]) -> None:
        """Keep the one line current; without a terminal, write it once a minute."""
        now = "; ".join(f"{name} ({far})" if far else name for name, far in running.items())
        text = f"{done} of {of} cells done, about {duration(left_s)} left; now: {now or 'none'}"
        if self._console.is_terminal:
            self._live(text)
        elif time.monotonic() - self._said > QUIET_S:
            self._said = time.monotonic()
            self.say(text)

    def _live(self, text: str) -> None:
        from rich.text import Text

        if self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        self._status.update(Text(text))

    def close(self) -> None:
        """Take the current line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None
