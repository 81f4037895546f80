"""Progress messages of the laboratory, and the expected remaining time.

The time is estimated before the start and refined by every measured cell, and by how far a running
one is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status

from fcil_protocol.formats import NOTHING, duration
from fcil_server.lab.plan import Cell

_OVERDUE = 0.1  # an overdue cell: share of its time so far that it may still take
_OWN_PACE = 0.1  # of a cell: from here on its own time so far tells more than a first guess


class HowFar(NamedTuple):
    """Progress of a running cell.

    Attributes:
        text: for the user.
        share: of its tasks that is over, 0 to 1; within one, of its training rounds.
        at_s: when that share was reached, seconds after the cell's start.
    """

    text: str = ""
    share: float = 0.0
    at_s: float = 0.0

    def then(self, later: HowFar, at_s: float) -> HowFar:
        """Return the progress after a later report; a share never falls, nor does its time move."""
        if later.share > self.share:
            return later._replace(at_s=at_s)
        return self._replace(text=later.text)


@dataclass
class TimeBudget:
    """Seconds of cells, as expected and as measured.

    Attributes:
        jobs: cells at the same time.
    """

    jobs: int = 1
    _measured: dict[str, list[float]] = field(default_factory=dict)  # row -> seconds
    _expected: float = 0.0  # of all measured cells
    _taken: float = 0.0

    def measured(self, cell: Cell, seconds: float) -> None:
        """Add a cell's measured time."""
        self._measured.setdefault(cell.row, []).append(seconds)
        self._expected += cell.expected_s
        self._taken += seconds

    def of(self, cell: Cell) -> float:
        """Return a cell's expected time: its row's mean, or the estimate corrected by others."""
        if own := self._measured.get(cell.row):
            return sum(own) / len(own)
        return cell.expected_s * (self._taken / self._expected if self._expected else 1.0)

    def left(
        self, waiting: Iterable[Cell], running: Iterable[tuple[Cell, float, HowFar]] = ()
    ) -> float:
        """Return the seconds until all are done.

        Args:
            waiting: cells that have not begun.
            running: cells, each with its seconds so far and its progress.
        """
        rest = [self._rest(*one) for one in running]
        total = sum(rest) + sum(self.of(c) for c in waiting)
        return max(total / self.jobs, *rest, 0.0)

    def _rest(self, cell: Cell, for_s: float, far: HowFar) -> float:
        whole = self.of(cell)
        if far.share >= _OWN_PACE and (cell.row not in self._measured or for_s > whole):
            whole = far.at_s / far.share
        return max(whole - for_s, _OVERDUE * (for_s - far.at_s))


def describe_plan(todo: int, all_cells: int, seconds: float, jobs: int) -> str:
    """Return the line about the plan, before the start."""
    done = all_cells - todo
    had = f" ({done} of {all_cells} are there already)" if done else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    return f"{todo} cells to run{had}, about {duration(seconds)}{at_once}"


QUIET_S = 60.0  # between lines of progress without a terminal


class Show:
    """Messages on standard error; cells end in threads, so it holds a lock."""

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
        """Report the start of a cell."""
        self.say(f"begins: {cell.name}")

    def ended(self, cell: Cell, numbers: Mapping[str, Any]) -> None:
        """Report the result of a cell."""
        seconds = duration(numbers["seconds"]["wall_s"])
        faa, aia = (
            NOTHING if numbers[m] is None else f"{numbers[m]:.1f} %" for m in ("faa", "aia")
        )
        cached = numbers.get("features", {"read": 0, "computed": 0, "faults": ()})
        read, computed = cached["read"], cached["computed"]
        used = f", features {read:,} read and {computed:,} computed" if read or computed else ""
        self.say(f"done:   {cell.name}: FAA {faa}, AIA {aia}, {seconds}{used}")
        for fault in cached["faults"]:
            self.say(f"{cell.name}: {fault}")

    def failed(self, cell: Cell, why: str) -> None:
        """Report a failed cell with its reason."""
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
        """Remove the current line."""
        if self._status is not None:
            self._status.stop()
            self._status = None
