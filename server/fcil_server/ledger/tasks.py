"""Classes and tasks of the runs, and how well each task was learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fcil_protocol.errors import InternalError
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.rows import AliasRow, ClassRow, Evaluation, TaskRow


class ClassTable:
    """Class names and their aliases; `rounds.classes` holds the rules.

    Tables ``classes`` and ``class_aliases``.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        run: RunId,
        key: str,
        name: str,
        *,
        class_id: int | None = None,
        planned_task: int | None = None,
        first_seen_by: ClientId | None = None,
        admitted: bool = True,
    ) -> None:
        """Add a name, with an id (listed) or waiting for one (discovered)."""
        self._db.insert(
            "classes",
            {
                "run": run,
                "key": key,
                "name": name,
                "class_id": class_id,
                "planned_task": planned_task,
                "first_seen_by": first_seen_by,
                "seen_at": self._db.now,
                "admitted": int(admitted),
            },
        )

    def all(self, run: RunId) -> list[ClassRow]:
        """Return the run's names: those with ids in order of ids, then the waiting ones."""
        sql = "SELECT * FROM classes WHERE run = ? ORDER BY class_id IS NULL, class_id, key"
        read = partial(self._db.all, ClassRow, sql, (run,))
        return list(self._db.remember(("classes", run), ["classes"], read))

    def place(self, run: RunId, key: str, *, class_id: int, task: int) -> None:
        """Put a name into a task under its id, for ever."""
        self._db.write(
            "UPDATE classes SET class_id = ?, task = ? WHERE run = ? AND key = ?",
            (class_id, task, run, key),
        )

    def rename(self, run: RunId, key: str, new_key: str, name: str) -> None:
        """Change how a class is called and matched; its id stays, aliases follow."""
        self._db.write(
            "UPDATE classes SET key = ?, name = ? WHERE run = ? AND key = ?",
            (new_key, name, run, key),
        )

    def hide(self, run: RunId, key: str, *, hidden: bool) -> None:
        """Hide a name from clients and from coming tasks, or show it again."""
        self._db.write(
            "UPDATE classes SET hidden = ? WHERE run = ? AND key = ?", (int(hidden), run, key)
        )

    def admit(self, run: RunId, key: str) -> None:
        """Let a task take a name that waited for an operator's word."""
        self._db.write("UPDATE classes SET admitted = 1 WHERE run = ? AND key = ?", (run, key))

    def remove(self, run: RunId, key: str) -> None:
        """Remove a name that never got an id (it became an alias of another)."""
        self._db.write(
            "DELETE FROM classes WHERE run = ? AND key = ? AND class_id IS NULL", (run, key)
        )

    def add_alias(self, run: RunId, key: str, name: str, target: str) -> None:
        """Let a further name stand for the class with key ``target``."""
        self._db.insert("class_aliases", {"run": run, "key": key, "name": name, "target": target})

    def remove_alias(self, run: RunId, key: str) -> None:
        """Let a further name stand for nothing any more."""
        self._db.write("DELETE FROM class_aliases WHERE run = ? AND key = ?", (run, key))

    def move_aliases(self, run: RunId, target: str, new_target: str) -> None:
        """Let all aliases of one class stand for another."""
        self._db.write(
            "UPDATE class_aliases SET target = ? WHERE run = ? AND target = ?",
            (new_target, run, target),
        )

    def aliases(self, run: RunId) -> dict[str, str]:
        """Return alias key -> class key."""
        sql = "SELECT key, target FROM class_aliases WHERE run = ?"

        def read() -> dict[str, str]:
            return {row["key"]: row["target"] for row in self._db.rows(sql, (run,))}

        # A class that is renamed takes its aliases along.
        return dict(self._db.remember(("aliases", run), ["class_aliases", "classes"], read))

    def alias_rows(self, run: RunId) -> list[AliasRow]:
        """Return the further names of classes, in order of their keys."""
        sql = "SELECT * FROM class_aliases WHERE run = ? ORDER BY key"
        return self._db.all(AliasRow, sql, (run,))


class TaskTable:
    """The class increments of the runs. Table ``tasks``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def count(self, run: RunId) -> int:
        """Return the number of tasks that were opened."""
        return int(self._db.number("SELECT count(*) FROM tasks WHERE run = ?", (run,)))

    def open(self, run: RunId, task: int, class_ids: Sequence[int]) -> TaskRow:
        """Open a task; tasks are numbered without gaps."""
        expected = self.count(run)
        if task != expected:
            raise InternalError(f"expected task {expected} to open next, got {task}.")
        self._db.insert(
            "tasks",
            {
                "run": run,
                "task": task,
                "class_ids": json.dumps(list(class_ids)),
                "opened_at": self._db.now,
            },
        )
        return self.all(run)[-1]

    def close(self, run: RunId, task: int) -> None:
        """Mark a task as learned."""
        self._db.write(
            "UPDATE tasks SET closed_at = ? WHERE run = ? AND task = ?", (self._db.now, run, task)
        )

    def all(self, run: RunId) -> list[TaskRow]:
        """Return the run's tasks in order."""
        sql = "SELECT * FROM tasks WHERE run = ? ORDER BY task"
        read = partial(self._db.all, TaskRow, sql, (run,))
        return list(self._db.remember(("tasks", run), ["tasks"], read))


@dataclass(frozen=True)
class StateResult:
    """Test of a state on images of all classes seen.

    Attributes:
        central: True on the server's own folder, False on the clients' images.
    """

    state: int
    task: int
    correct: int
    total: int
    central: bool

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.correct / self.total

    def to_json(self) -> dict[str, Any]:
        """Return it as summaries have it."""
        tested_by = "server" if self.central else "clients"
        return {**asdict(self), "accuracy": self.accuracy, "tested_by": tested_by}


class EvaluationTable:
    """Test results by task, evaluator and class. Table ``evaluations``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self, run: RunId, task: int, client: str, counts: Mapping[int, tuple[int, int]]
    ) -> None:
        """Record one evaluator's test after a task; a repeated evaluation replaces the first.

        ``client`` is a ClientId or `enums.CENTRAL`; ``counts`` maps class ids to
        (correct, total).
        """
        with self._db.transaction():
            self._db.execute(
                "DELETE FROM evaluations WHERE run = ? AND task = ? AND client = ?",
                (run, task, client),
            )
            self._db.execute_each(
                "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
                [(run, task, client, c, correct, total) for c, (correct, total) in counts.items()],
            )

    def totals(self, run: RunId, task: int, *, central: bool = False) -> tuple[int, int]:
        """Return how many test images were classified rightly after a task, and all.

        They are those of the clients, or with ``central`` the server's own.
        """
        sql = (
            "SELECT coalesce(sum(correct), 0) AS correct, coalesce(sum(total), 0) AS total FROM "
            "evaluations WHERE run = ? AND task = ? AND (client = ?) = ?"
        )
        (row,) = self._db.rows(sql, (run, task, CENTRAL, central))
        return int(row["correct"]), int(row["total"])

    def all(self, run: RunId) -> list[Evaluation]:
        """Return all evaluation counts of a run."""
        sql = "SELECT * FROM evaluations WHERE run = ? ORDER BY task, client, class_id"
        return self._db.all(Evaluation, sql, (run,))

    def tasks(self, run: RunId, since: int, *, central: bool) -> list[int]:
        """Return the tasks over from ``since`` on that were evaluated: centrally, or by clients."""
        sql = (
            "SELECT task FROM tasks WHERE run = ? AND task >= ? AND closed_at IS NOT NULL "
            "AND EXISTS (SELECT 1 FROM evaluations e "
            "WHERE e.run = tasks.run AND e.task = tasks.task AND "
        )
        sql += f"e.client {'=' if central else '<>'} ?) ORDER BY task"
        return [int(row["task"]) for row in self._db.rows(sql, (run, since, CENTRAL))]

    def of_states(self, run: RunId, task: int) -> list[StateResult]:
        """Return the test results of a task's states, in order.

        They are those on the server's folder, after rounds and at the task's end; without any, that
        of the clients' evaluation. What was measured before a client was forgotten is of another
        state, and left out.
        """
        sql = (
            "SELECT new_state AS state, json_extract(metrics, '$.test_correct') AS correct, "
            "json_extract(metrics, '$.test_total') AS total FROM rounds WHERE run = ? AND task = ? "
            "AND new_state IS NOT NULL AND json_extract(metrics, '$.test_total') > 0"
        )
        found = {
            int(r["state"]): (r["correct"], r["total"])
            for r in self._db.rows(sql, (run, task))
            if not self._is_outdated(run, r["state"], None)
        }
        over = self._db.number(
            "SELECT closed_at FROM tasks WHERE run = ? AND task = ?", (run, task)
        )
        last = self._db.number(  # late images may come after the test
            "SELECT max(state) FROM states WHERE run = ? AND task = ? "
            "AND created_at <= ifnull(?, created_at)",
            (run, task, over),
        )
        central = self.totals(run, task, central=True)
        if last is not None and central[1] and not self._is_outdated(run, last, over):
            found[int(last)] = central
        if found:
            return [StateResult(s, task, *found[s], central=True) for s in sorted(found)]
        evaluated = self._db.number(
            "SELECT base_state FROM rounds WHERE run = ? AND task = ? AND kind = ? "
            "AND closed_at IS NOT NULL ORDER BY seq DESC LIMIT 1",
            (run, task, EVALUATE),
        )
        right, total = self.totals(run, task)
        if evaluated is None or not total or self._is_outdated(run, evaluated, over):
            return []
        return [StateResult(int(evaluated), task, right, total, central=False)]

    def _is_outdated(self, run: RunId, state: int, at: float | None) -> bool:
        """Return True if a state was computed again without a client after it was tested.

        It then differs from the same state of the run from which a fork copied the result.

        Args:
            run: the run that has the result.
            state: the tested state.
            at: end of the test; None: as the state was made.
        """
        sql = (
            "SELECT r.parent_run, r.created_at, mine.digest <> old.digest AS differs "
            "FROM runs AS r "
            "JOIN states AS mine ON mine.run = r.run_id AND mine.state = :state "
            "JOIN states AS old ON old.run = r.parent_run AND old.state = :state "
            "WHERE r.run_id = :run AND r.parent_state >= :state"
        )
        while rows := list(self._db.rows(sql, {"run": run, "state": state})):
            (row,) = rows
            if at is not None and at > row["created_at"]:
                return False
            if row["differs"]:
                return True
            run = row["parent_run"]
        return False

    def best(self, run: RunId) -> StateResult | None:
        """Return the best tested state of those that know the most classes; None: none is tested.

        They are the tested states of the last task that has any: accuracies on fewer classes cannot
        be compared with theirs. Of equal ones it is the newest.
        """
        sql = (
            "SELECT task FROM tasks AS t WHERE run = ? AND (EXISTS (SELECT 1 FROM evaluations AS e "
            "WHERE e.run = t.run AND e.task = t.task AND e.total > 0) OR EXISTS (SELECT 1 FROM "
            "rounds AS r WHERE r.run = t.run AND r.task = t.task "
            "AND json_extract(r.metrics, '$.test_total') > 0)) ORDER BY task DESC"
        )
        for row in self._db.rows(sql, (run,)):
            results = self.of_states(run, int(row["task"]))
            if results:
                return max(results, key=lambda r: (r.correct / r.total, r.state))
        return None
