"""How long it will take: expected before the start, refined by every cell that was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fcil_server.lab.plan import Cell
from fcil_server.report_page import duration

_OVERDUE = 0.1  # a cell that takes longer than expected: so much of its time again


@dataclass
class Budget:
    """Seconds of cells, as expected and as measured.

    Attributes:
        jobs: cells at the same time.
    """

    jobs: int = 1
    _measured: dict[str, list[float]] = field(default_factory=dict)  # row -> seconds
    _expected: float = 0.0  # of all cells that were measured
    _taken: float = 0.0

    def measured(self, cell: Cell, seconds: float) -> None:
        """Take in what a cell took."""
        self._measured.setdefault(cell.row, []).append(seconds)
        self._expected += cell.expected_s
        self._taken += seconds

    def of(self, cell: Cell) -> float:
        """Return what a cell will take: what its row took, or as expected, corrected by others."""
        if own := self._measured.get(cell.row):
            return sum(own) / len(own)
        return cell.expected_s * (self._taken / self._expected if self._expected else 1.0)

    def left(self, waiting: Iterable[Cell], running: Iterable[tuple[Cell, float]] = ()) -> float:
        """Return the seconds until all are done.

        Args:
            waiting: cells that have not begun.
            running: cells, and for how many seconds already.
        """
        rest = [max(self.of(c) - for_s, _OVERDUE * for_s) for c, for_s in running]
        total = sum(rest) + sum(self.of(c) for c in waiting)
        return max(total / self.jobs, *rest, 0.0)


def plan_words(todo: int, all_cells: int, seconds: float, jobs: int) -> str:
    """Say before the start what is going to happen."""
    done = all_cells - todo
    had = f" ({done} of {all_cells} are there already)" if done else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    return f"{todo} cells to run{had}, about {duration(seconds)}{at_once}"
