"""The choice of one of a run's kept states, by a word, its number, or its task."""

from __future__ import annotations

from pathlib import Path

from fcil_protocol.errors import UsageError
from fcil_server.aggregation.store import StateStore, check_state, states_folder
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow, StateRow

BEST, LAST = "best", "last"
_MOST_DIGITS = 10


def find_state(
    ledger: Ledger, directory: Path, row: RunRow, *, task: int | None, state: str | None
) -> StateRow:
    """Return the state that the operator chose.

    Args:
        ledger: the federation's.
        directory: the federation's.
        row: the run.
        task: the last state of this task.
        state: ``best`` (`EvaluationTable.best`), ``last`` or a number. Without a task and a state:
            the newest.

    Raises:
        UsageError: there is none, or it is not kept; the message lists the kept ones.
        CorruptFile: its file is damaged.
    """
    if task is not None and state is not None:
        raise UsageError("expected --task or --state, not both.")
    number = _number(ledger, row, state)
    folder = states_folder(directory, row.run_id)
    store = StateStore(folder)
    held = set(store.numbers())
    rows = [r for r in ledger.states.all(row.run_id) if r.state in held and r.task >= 0]
    fitting = [r for r in rows if task in (None, r.task) and number in (None, r.state)]
    if not fitting:
        listed = ", ".join(f"{r.state} (task {r.task})" for r in rows) or "none"
        what = "a state" if task is number else f"state {number}"
        what = what if task is None else f"task {task}"
        raise UsageError(
            f"run {row.run_id} has no file of {what}; kept are the states {listed}.",
            action="Kept are the newest states, the last one of each task and the best tested one: "
            "docs/storage.md.",
        )
    check_state(store, fitting[-1].state, {r.state: r.digest for r in rows})
    return fitting[-1]


def _number(ledger: Ledger, row: RunRow, state: str | None) -> int | None:
    """Return the number of a state by its name; None: the newest."""
    if state is None or state == LAST:
        return None
    if state == BEST:
        best = ledger.evaluations.best(row.run_id)
        if best is None:
            raise UsageError(
                f"no state of run {row.run_id} is tested, so there is no best one.",
                action="Set run.evaluate or run.central_test, or name last, or a number.",
            )
        return best.state
    if not (state.isascii() and state.isdigit() and len(state) < _MOST_DIGITS):
        raise UsageError(f"unknown state {state[:40]!r}; expected best, last or a number.")
    return int(state)
