"""Begin a run with a copy of another one's history up to one of its states.

A state never takes back what clients have seen: who wants to go back opens a new run that
begins where the old one stood. Clients meet a run that they do not know, forget what they held
for the old one, and fetch the state that the new one begins with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fcil_protocol.errors import InternalError
from fcil_protocol.ids import RunId
from fcil_server.ledger.database import LedgerFile, Value
from fcil_server.ledger.enums import RunStatus

# The closed rounds that lead to a state, and those after it that changed nothing.
_LEADS_TO = "closed_at IS NOT NULL AND base_state <= :state AND ifnull(new_state, 0) <= :state"

_IN_TASKS = "task IN (SELECT value FROM json_each(:tasks))"
_IN_COPIED = "(task, kind, round) IN (SELECT task, kind, round FROM rounds WHERE run = :run)"


class ForkTables(LedgerFile):
    """Copies of a run's rows under a new run id."""

    def fork_run(self, source: RunId, state: int, run: RunId) -> None:
        """Begin ``run`` as a fork of ``source`` at a committed state.

        Tasks, classes, closed rounds with their updates and costs, evaluations and states up
        to there are copied; the open round and everything later are not. Names of later tasks
        wait again. The old run stays as it is, but is stopped if it was going on. Parts are
        sealed anew, since they name their run. To be called in a transaction.
        """
        assert self._in_durable, "a fork is one durable transaction"
        at = self._number(
            "SELECT count(*) FROM states WHERE run = ? AND state = ?", (source, state)
        )
        if not at:
            raise InternalError(f"run {source} has no committed state {state}.")
        going, stopped = RunStatus.RUNNING.value, RunStatus.STOPPED.value
        changed: dict[str, Value] = {
            "run_id": run,
            "created_at": self.now,
            "status": going,
            "parent_run": source,
            "parent_state": state,
            "inherited": self._rounds_up_to(source, state),
        }
        self._copy_rows("runs", changed, "run_id = :source", {"source": source})
        self._execute(
            "UPDATE runs SET status = ? WHERE run_id = ? AND status IN (?, 'failed')",
            (stopped, source, going),
        )
        self._copy_history(source, state, run)

    def _rounds_up_to(self, source: RunId, state: int) -> int:
        """Return how many rounds are copied; they are the first ones, without a gap."""
        sql = f"SELECT ifnull(max(seq) + 1, 0) FROM rounds WHERE run = :source AND {_LEADS_TO}"  # noqa: S608
        return int(self._number(sql, {"source": source, "state": state}))

    def _copy_history(self, source: RunId, state: int, run: RunId) -> None:
        tasks = self._tasks_up_to(source, state)
        names: dict[str, Value] = {"source": source, "state": state, "run": run}
        names["tasks"] = json.dumps(tasks)
        own: dict[str, Value] = {"run": run}
        mine = "run = :source"
        self._copy_rows("classes", own, mine, names)
        self._copy_rows("class_aliases", own, mine, names)
        self._execute(
            "UPDATE classes SET task = NULL, "
            "class_id = CASE WHEN planned_task IS NULL THEN NULL ELSE class_id END "
            "WHERE run = :run AND task NOT IN (SELECT value FROM json_each(:tasks))",
            names,
        )
        self._copy_rows("tasks", own, f"{mine} AND {_IN_TASKS}", names)
        self._copy_rows("rounds", own, f"{mine} AND {_LEADS_TO}", names, order="seq")
        for table in ("updates", "answers", "bytes"):
            self._copy_rows(table, own, f"{mine} AND {_IN_COPIED}", names)
        self._copy_rows("states", own, f"{mine} AND state <= :state", names)
        names["tasks"] = json.dumps(self._tasks_over(source, tasks, run))
        self._copy_rows("evaluations", own, f"{mine} AND {_IN_TASKS}", names)
        self._execute(
            "UPDATE tasks SET closed_at = NULL "
            "WHERE run = :run AND task NOT IN (SELECT value FROM json_each(:tasks))",
            names,
        )

    def _tasks_up_to(self, source: RunId, state: int) -> list[int]:
        """Return the tasks that had opened by a state."""
        sql = "SELECT DISTINCT task FROM states WHERE run = ? AND state <= ? ORDER BY task"
        return [int(row["task"]) for row in self._rows(sql, (source, state))]

    def _tasks_over(self, source: RunId, tasks: Sequence[int], run: RunId) -> Sequence[int]:
        """Return the tasks of which nothing was left behind; of the last one something may be."""
        count = "SELECT count(*) FROM rounds WHERE run = ? AND task = ?"
        last = tasks[-1:]
        whole = all(self._number(count, (source, t)) == self._number(count, (run, t)) for t in last)
        return tasks if whole else tasks[:-1]

    def _copy_rows(
        self,
        table: str,
        changed: Mapping[str, Value],
        where: str,
        names: Mapping[str, Value],
        *,
        order: str = "rowid",
    ) -> None:
        """Copy rows of a table, with some columns replaced; columns added later come along."""
        columns = [str(c["name"]) for c in self._rows(f"PRAGMA table_info({table})")]
        values = ", ".join(f":new_{c}" if c in changed else c for c in columns)
        sql = (
            f"INSERT INTO {table} ({', '.join(columns)}) "  # noqa: S608 - names are ours
            f"SELECT {values} FROM {table} WHERE {where} ORDER BY {order}"
        )
        given = {**names, **{f"new_{c}": v for c, v in changed.items()}}
        self._execute(sql, given)
