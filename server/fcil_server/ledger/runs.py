"""Runs, their states and the sealed parts of their broadcasts, and forks of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fcil_protocol.errors import InternalError, UsageError
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId
from fcil_protocol.payloads.builtin import LATE
from fcil_server.ledger.databases.database import Database, Value
from fcil_server.ledger.enums import OPENING, RunStatus
from fcil_server.ledger.rounds import FORGOTTEN
from fcil_server.ledger.rows import PartRow, RunRow, StateRow

# The closed rounds that lead to a state, and those after it that changed nothing.
ENDED = -1  # in the column `promoted`: a state was, and none is any more
_LEADS_TO = "closed_at IS NOT NULL AND base_state <= :state AND ifnull(new_state, 0) <= :state"

_TASKS = "(SELECT CAST(value AS INTEGER) FROM json_each(:tasks))"
_IN_COPIED = "(task, kind, round) IN (SELECT task, kind, round FROM rounds WHERE run = :run)"


class RunTable:
    """The learning histories of the federation. Table ``runs``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        run_id: RunId,
        *,
        method: str,
        method_version: str,
        config: str,
        hparams: Mapping[str, Any],
        backbone: Mapping[str, Any],
        schema_digest: str,
        seed: int,
        environment: Mapping[str, Any] | None = None,
    ) -> RunRow:
        """Start a run.

        ``config`` is the TOML text that it runs with; ``hparams``, ``backbone`` and
        ``environment`` are JSON objects.
        """
        self._db.insert(
            "runs",
            {
                "run_id": run_id,
                "created_at": self._db.now,
                "method": method,
                "method_version": method_version,
                "config": config,
                "hparams": json.dumps(dict(hparams), allow_nan=False),
                "backbone": json.dumps(dict(backbone), allow_nan=False),
                "schema_digest": schema_digest,
                "seed": seed,
                "status": RunStatus.RUNNING,
                "environment": json.dumps(dict(environment or {}), allow_nan=False),
            },
        )
        row = self.get(run_id)
        assert row is not None, "the run was just written"
        return row

    def get(self, run_id: RunId) -> RunRow | None:
        """Return one run."""
        return self._db.one(RunRow, "SELECT * FROM runs WHERE run_id = ?", (run_id,))

    def all(self) -> list[RunRow]:
        """Return all runs, oldest first."""
        return self._db.all(RunRow, "SELECT * FROM runs ORDER BY rowid")

    def newest(self) -> RunRow | None:
        """Return the run that was started last, independent of the clock."""
        return self._db.one(RunRow, "SELECT * FROM runs ORDER BY rowid DESC LIMIT 1")

    def named(self, run: str | None) -> RunRow:
        """Return the run that a command means: the newest, or the one with this id or prefix.

        Raises:
            UsageError: there is none, or the prefix fits several.
        """
        rows = self.all()
        if run is not None:
            rows = [r for r in rows if r.run_id.startswith(run)]
        if not rows or (run is not None and len(rows) > 1):
            known = [r.run_id for r in self.all()]
            if not known:
                raise UsageError(
                    "the federation has no run yet.", action="Begin one with: fcil-server serve"
                )
            listed = ", ".join([r.run_id for r in rows] or known[-5:])
            begins = f"{len(rows)} runs begin" if rows else "no run's id begins"
            raise UsageError(
                f"{begins} with {run!r}; {'they' if rows else 'the newest'} are {listed}.",
                action="Give more of the id; list all with: fcil-server run ls",
            )
        return rows[-1]

    def set_status(self, run_id: RunId, status: RunStatus) -> None:
        """Say where a run stands."""
        self._db.write("UPDATE runs SET status = ? WHERE run_id = ?", (status.value, run_id))

    def promote(self, run: RunId, state: int | None) -> int | None:
        """Record the state whose model clients use; None: the newest again, from now on.

        Returns what `undo_promote` needs.
        """
        before = self._promoted(run)
        self.undo_promote(run, ENDED if state is None else state)
        return before

    def undo_promote(self, run: RunId, before: int | None) -> None:
        """Let all be as before a promotion."""
        self._db.write("UPDATE runs SET promoted = ? WHERE run_id = ?", (before, run))

    def had_promotion(self, run: RunId) -> bool:
        """Return True if a state was promoted, and none is any more."""
        return self._promoted(run) == ENDED

    def _promoted(self, run: RunId) -> int | None:
        value: int | None = self._db.number("SELECT promoted FROM runs WHERE run_id = ?", (run,))
        return value

    def empty(self, run: RunId) -> None:
        """Record that a run's states, updates and parts must go: a client in them is forgotten.

        Its rows stay. The files are the caller's to remove, after this is committed.
        """
        with self._db.transaction():
            self._db.execute("UPDATE runs SET emptied_at = ? WHERE run_id = ?", (self._db.now, run))
            self._db.execute("DELETE FROM parts WHERE run = ?", (run,))

    def emptied(self) -> list[RunRow]:
        """Return the runs that `empty` was called for."""
        return self._db.all(
            RunRow, "SELECT * FROM runs WHERE emptied_at IS NOT NULL ORDER BY rowid"
        )


class StateTable:
    """The committed states; `aggregation.store` holds their files. Table ``states``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, key: RoundKey, state: int, digest: Digest, parent: Digest | None) -> None:
        """Record a state that `StateStore.save` has put on disk; ``key`` is what made it."""
        self._db.insert(
            "states",
            {
                **key._asdict(),
                "state": state,
                "digest": digest,
                "parent": parent,
                "created_at": self._db.now,
            },
        )

    def all(self, run: RunId) -> list[StateRow]:
        """Return the run's committed states in order, pruned files too."""
        return self._db.all(StateRow, "SELECT * FROM states WHERE run = ? ORDER BY state", (run,))

    def newest(self, run: RunId) -> StateRow | None:
        """Return the state that was committed last."""
        sql = "SELECT * FROM states WHERE run = ? ORDER BY state DESC LIMIT 1"
        return self._db.one(StateRow, sql, (run,))

    def newest_combined(self, run: RunId) -> StateRow | None:
        """Return the state that was last made of a round's updates."""
        sql = "SELECT * FROM states WHERE run = ? AND kind <> ? ORDER BY state DESC LIMIT 1"
        return self._db.one(StateRow, sql, (run, OPENING))


class PartTable:
    """The sealed parts that clients fetch; the caller holds their files. Table ``parts``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        run: RunId,
        name: str,
        *,
        plain_digest: Digest,
        digest: Digest,
        file: str,
        plain_bytes: int,
        sealed_bytes: int,
        wrapped: bytes,
    ) -> None:
        """Record a sealed part whose file was written.

        It may be lost in a power cut, like the file: the part is then sealed again.
        """
        self._db.insert(
            "parts",
            {
                "run": run,
                "name": name,
                "plain_digest": plain_digest,
                "digest": digest,
                "file": file,
                "plain_bytes": plain_bytes,
                "sealed_bytes": sealed_bytes,
                "wrapped": wrapped,
                "created_at": self._db.now,
            },
            durable=False,
        )

    def get(self, run: RunId, digest: Digest) -> PartRow | None:
        """Return a part by the digest that clients ask for."""
        return self._db.one(
            PartRow, "SELECT * FROM parts WHERE run = ? AND digest = ?", (run, digest)
        )

    def by_plain(self, run: RunId, name: str, plain_digest: Digest) -> PartRow | None:
        """Return the part that already holds this content, so that it is sealed once."""
        sql = "SELECT * FROM parts WHERE run = ? AND name = ? AND plain_digest = ?"
        return self._db.one(PartRow, sql, (run, name, plain_digest))

    def all(self, run: RunId) -> list[PartRow]:
        """Return the run's parts in the order in which they were sealed."""
        sql = "SELECT * FROM parts WHERE run = ? ORDER BY rowid"
        return self._db.all(PartRow, sql, (run,))

    def digests(self, run: RunId) -> list[Digest]:
        """Return the digests of the run's parts in the order in which they were sealed."""
        rows = self._db.rows("SELECT digest FROM parts WHERE run = ? ORDER BY rowid", (run,))
        return [Digest(row["digest"]) for row in rows]

    def remove(self, run: RunId, *digests: Digest) -> None:
        """Forget parts that no client needs any more; their files are the caller's to remove."""
        if digests:
            with self._db.transaction(durable=False):
                sql = "DELETE FROM parts WHERE run = ? AND digest = ?"
                self._db.execute_each(sql, [(run, digest) for digest in digests])


class Forks:
    """Runs that begin with a copy of another one's history up to one of its states.

    A state never takes back what clients have seen: who wants to go back opens a new run that
    begins where the old one stood. Clients meet a run that they do not know, forget what they
    held for the old one, and fetch the state that the new one begins with.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def begin(self, source: RunId, state: int, run: RunId) -> None:
        """Begin ``run`` as a fork of ``source`` at a committed state.

        Tasks, classes, closed rounds with their updates and costs, evaluations and states up
        to there are copied; the open round and everything later are not. Names of later tasks
        wait again. The old run stays as it is, but stops if it was active. Parts are
        sealed again, since they name their run. Call it in a transaction.
        """
        assert self._db.in_durable, "a fork is one durable transaction"
        at = self._db.number(
            "SELECT count(*) FROM states WHERE run = ? AND state = ?", (source, state)
        )
        if not at:
            raise InternalError(f"run {source} has no committed state {state}.")
        going, stopped = RunStatus.RUNNING.value, RunStatus.STOPPED.value
        changed: dict[str, Value] = {
            "run_id": run,
            "created_at": self._db.now,
            "status": going,
            "parent_run": source,
            "parent_state": state,
            "inherited": self._rounds_up_to(source, state),
            "promoted": None,
        }
        self._copy_rows("runs", changed, "run_id = :source", {"source": source})
        self._db.execute(
            "UPDATE runs SET status = ? WHERE run_id = ? AND status IN (?, 'failed')",
            (stopped, source, going),
        )
        self._copy_history(source, state, run)

    def leave_out(
        self, run: RunId, client: ClientId, states: Sequence[tuple[int, Digest, Digest | None]]
    ) -> None:
        """Make a fork one without a client: its states are these, its updates are not counted.

        To be called in the transaction that forks. ``states``: number, digest, parent's digest.
        """
        assert self._db.in_durable, "a fork is one durable transaction"
        for state, digest, parent in states:
            self._db.execute(
                "UPDATE states SET digest = ?, parent = ? WHERE run = ? AND state = ?",
                (digest, parent, run, state),
            )
        self._db.execute(
            "UPDATE updates SET status = 'excluded', reason = ? "
            "WHERE run = ? AND client = ? AND status = 'counted'",
            (FORGOTTEN, run, client),
        )
        self._db.execute("DELETE FROM evaluations WHERE run = ? AND client = ?", (run, client))

    def lineage(self, run: RunId) -> list[RunId]:
        """Return a run and those that it was forked from, newest first."""
        found: list[RunId] = []
        at: RunId | None = run
        while at is not None and at not in found:
            found.append(at)
            at = self._db.number("SELECT parent_run FROM runs WHERE run_id = ?", (at,))
        return found

    def _rounds_up_to(self, source: RunId, state: int) -> int:
        """Return how many rounds are copied; they are the first ones, without a gap."""
        sql = f"SELECT ifnull(max(seq) + 1, 0) FROM rounds WHERE run = :source AND {_LEADS_TO}"  # noqa: S608
        return int(self._db.number(sql, {"source": source, "state": state}))

    def _copy_history(self, source: RunId, state: int, run: RunId) -> None:
        tasks = self._tasks_up_to(source, state)
        names: dict[str, Value] = {"source": source, "state": state, "run": run}
        names["tasks"] = json.dumps(tasks)
        own: dict[str, Value] = {"run": run}
        mine = "run = :source"
        self._copy_rows("classes", own, mine, names)
        self._copy_rows("class_aliases", own, mine, names)
        self._db.execute(
            "UPDATE classes SET task = NULL, "  # noqa: S608 - ours
            "class_id = CASE WHEN planned_task IS NULL THEN NULL ELSE class_id END "
            f"WHERE run = :run AND task NOT IN {_TASKS}",
            names,
        )
        self._copy_rows("tasks", own, f"{mine} AND task IN {_TASKS}", names)
        self._copy_rows("rounds", own, f"{mine} AND {_LEADS_TO}", names, order="seq")
        for table in ("updates", "answers", "bytes"):
            self._copy_rows(table, own, f"{mine} AND {_IN_COPIED}", names)
        self._copy_rows("states", own, f"{mine} AND state <= :state", names)
        names["tasks"] = json.dumps(self._tasks_over(source, tasks, run))
        self._copy_rows("evaluations", own, f"{mine} AND task IN {_TASKS}", names)
        self._db.execute(
            f"UPDATE tasks SET closed_at = NULL WHERE run = :run AND task NOT IN {_TASKS}",  # noqa: S608
            names,
        )

    def _tasks_up_to(self, source: RunId, state: int) -> list[int]:
        """Return the tasks that had opened by a state."""
        sql = "SELECT DISTINCT task FROM states WHERE run = ? AND state <= ? ORDER BY task"
        return [int(row["task"]) for row in self._db.rows(sql, (source, state))]

    def _tasks_over(self, source: RunId, tasks: Sequence[int], run: RunId) -> Sequence[int]:
        """Return the tasks of which nothing was left behind; of the last one something may be."""
        # Late images that came after a task's end are no part of it.
        count = (
            "SELECT count(*) FROM rounds AS r JOIN tasks AS t ON (t.run, t.task) = (r.run, r.task) "
            "WHERE r.run = ? AND r.task = ? "
            "AND NOT (r.kind = ? AND r.opened_at > ifnull(t.closed_at, r.opened_at))"
        )
        last = tasks[-1:]
        whole = all(
            self._db.number(count, (source, t, LATE)) == self._db.number(count, (run, t, LATE))
            for t in last
        )
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
        columns = self._db.columns(table)
        values = ", ".join(f":new_{c}" if c in changed else c for c in columns)
        sql = (
            f"INSERT INTO {table} ({', '.join(columns)}) "  # noqa: S608 - names are ours
            f"SELECT {values} FROM {table} WHERE {where} ORDER BY {order}"
        )
        given = {**names, **{f"new_{c}": v for c, v in changed.items()}}
        self._db.execute(sql, given)
