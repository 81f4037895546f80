"""Runner of cells, several at a time; a failed one stops no other."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fcil_protocol.errors import FcilError
from fcil_server.lab import cell as cells_of
from fcil_server.lab.cell import CellInputs, Stopped
from fcil_server.lab.plan import Cell
from fcil_server.lab.progress import HowFar, Show, TimeBudget
from fcil_server.lab.results import Known, Results

TICK_S = 1.0
CellRun = Callable[[Cell, CellInputs, threading.Event, Callable[[HowFar], None]], dict[str, Any]]


@dataclass(frozen=True)
class Pending:
    """A cell to run, with its key."""

    cell: Cell
    key: str
    work: CellInputs


def pending_cells(
    cells: Sequence[Cell], known: Known, results: Results, work: Callable[[Cell, str], CellInputs]
) -> list[Pending]:
    """Return the cells that are still to be run; cells that share a key are run once."""
    pending: dict[str, Pending] = {}
    for cell in cells:
        key = known.key(cell)
        assert key is not None, "the partitions of all cells were made"
        if key not in pending and results.load(key) is None:
            pending[key] = Pending(cell, key, work(cell, key))
    return list(pending.values())


def run(
    pending: Sequence[Pending],
    known: Known,
    results: Results,
    budget: TimeBudget,
    show: Show,
    failed: dict[str, str],
    *,
    after: Callable[[], object],
    run_cell: CellRun = cells_of.run,
) -> None:
    """Run all pending cells.

    Args:
        pending: in the order of their start.
        known: the inputs of their keys.
        results: their store.
        budget: receives their times.
        show: shows progress to the user.
        failed: receives the failed cells' names, each with its reason.
        after: called after each finished cell; if it fails, that is shown.
        run_cell: runs one cell.

    Raises:
        KeyboardInterrupt: the user interrupted it; running cells have ended, and start from scratch
            next time.
    """
    stop = threading.Event()
    began: dict[str, float] = {}
    far: defaultdict[str, HowFar] = defaultdict(HowFar)

    def one(item: Pending) -> dict[str, Any]:
        began[item.key] = time.monotonic()
        show.began(item.cell)

        def hear(now: HowFar) -> None:
            far[item.key] = far[item.key].then(now, time.monotonic() - began[item.key])

        return run_cell(item.cell, item.work, stop, hear)

    pool = ThreadPoolExecutor(budget.jobs, thread_name_prefix="cell")
    with _interruptions_kept() as raise_if_interrupted:
        waiting: dict[Future[dict[str, Any]], Pending] = {}
        try:
            for item in pending:  # the first start while the others are still submitted
                waiting[pool.submit(one, item)] = item
            while waiting:
                done, _ = wait(waiting, TICK_S, FIRST_COMPLETED)
                for future in done:
                    _ended(future, waiting[future], known, results, budget, show, failed)
                    del waiting[future]  # not earlier: an interruption must find it
                    try:
                        after()
                    except Exception as error:  # a full disk: the other cells go on
                        show.say(f"after {len(pending) - len(waiting)} cells: {_words(error)}")
                raise_if_interrupted()
                running = {t.key: t.cell for t in waiting.values() if t.key in began}
                now = time.monotonic()
                left = budget.left(
                    [t.cell for t in waiting.values() if t.key not in began],
                    [(c, now - began[k], far[k]) for k, c in running.items()],
                )
                words = {c.name: far[k].text for k, c in running.items()}
                show.progress(len(pending) - len(waiting), len(pending), left, words)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            for future, item in waiting.items():  # finished at the very moment of the interruption
                if future.done() and not future.cancelled():
                    _ended(future, item, known, results, budget, show, failed)


def _ended(
    future: Future[dict[str, Any]],
    item: Pending,
    known: Known,
    results: Results,
    budget: TimeBudget,
    show: Show,
    failed: dict[str, str],
) -> None:
    """Save a result, or the reason why there is none."""
    try:
        numbers: Mapping[str, Any] = future.result()
        results.save(item.key, item.cell, known, numbers)
    except Stopped:
        return
    except Exception as error:  # even our own defect must not stop the other cells
        failed[item.cell.name] = f"{_words(error)} Its logs are in {item.work.room / 'logs'}."
        show.failed(item.cell, failed[item.cell.name])
        return
    shutil.rmtree(item.work.room, ignore_errors=True)
    budget.measured(item.cell, numbers["seconds"]["wall_s"])
    show.ended(item.cell, numbers)


def _words(error: Exception) -> str:
    return error.message if isinstance(error, FcilError) else f"{type(error).__name__}: {error}"


@contextmanager
def _interruptions_kept() -> Iterator[Callable[[], None]]:
    """Keep Ctrl-C, a plain kill or a closed terminal until the yielded function is called.

    An exception at any other moment would cut the saving of a result, or a process that is just
    being started for it, in half. A second one acts at once. One that comes after the last call is
    raised at the end.
    """
    kept: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        if kept:
            raise KeyboardInterrupt
        kept.append(number)

    def raise_if_interrupted() -> None:
        if kept:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # no other gets signals
        yield raise_if_interrupted
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, keep) for number in numbers]
    try:
        yield raise_if_interrupted
        raise_if_interrupted()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
