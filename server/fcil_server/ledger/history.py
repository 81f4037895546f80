"""The ledger's history: classes, tasks, rounds, updates and answers of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fcil_protocol.errors import AlreadyHave, InternalError
from fcil_protocol.ids import ClientId, RoundKey, RunId, UpdateId
from fcil_server.ledger.database import LedgerFile
from fcil_server.ledger.enums import Answer, Outcome, UpdateStatus
from fcil_server.ledger.rows import AliasRow, AnswerRow, ClassRow, Round, Task, UpdateRow

IN_ROUND = "run = ? AND task = ? AND kind = ? AND round = ?"


class HistoryTables(LedgerFile):
    """What was learned, in which order, from whom."""

    # Classes. `classes.ClassRegistry` holds the rules; here are the rows.

    def add_class(
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
        self._insert(
            "classes",
            {
                "run": run,
                "key": key,
                "name": name,
                "class_id": class_id,
                "planned_task": planned_task,
                "first_seen_by": first_seen_by,
                "seen_at": self.now,
                "admitted": int(admitted),
            },
        )

    def classes(self, run: RunId) -> list[ClassRow]:
        """Return the run's names: those with ids in order of ids, then the waiting ones."""
        sql = "SELECT * FROM classes WHERE run = ? ORDER BY class_id IS NULL, class_id, key"
        return self._all(ClassRow, sql, (run,))

    def place_class(self, run: RunId, key: str, *, class_id: int, task: int) -> None:
        """Put a name into a task under its id, for ever."""
        self._write(
            "UPDATE classes SET class_id = ?, task = ? WHERE run = ? AND key = ?",
            (class_id, task, run, key),
        )

    def rename_class(self, run: RunId, key: str, new_key: str, name: str) -> None:
        """Change how a class is called and matched; its id stays, aliases follow."""
        self._write(
            "UPDATE classes SET key = ?, name = ? WHERE run = ? AND key = ?",
            (new_key, name, run, key),
        )

    def hide_class(self, run: RunId, key: str, *, hidden: bool) -> None:
        """Hide a name from clients and from coming tasks, or show it again."""
        self._write(
            "UPDATE classes SET hidden = ? WHERE run = ? AND key = ?", (int(hidden), run, key)
        )

    def admit_class(self, run: RunId, key: str) -> None:
        """Let a task take a name that waited for an operator's word."""
        self._write("UPDATE classes SET admitted = 1 WHERE run = ? AND key = ?", (run, key))

    def remove_class(self, run: RunId, key: str) -> None:
        """Remove a name that never got an id (it became an alias of another)."""
        self._write(
            "DELETE FROM classes WHERE run = ? AND key = ? AND class_id IS NULL", (run, key)
        )

    def add_alias(self, run: RunId, key: str, name: str, target: str) -> None:
        """Let a further name stand for the class with key ``target``."""
        self._insert("class_aliases", {"run": run, "key": key, "name": name, "target": target})

    def move_aliases(self, run: RunId, target: str, new_target: str) -> None:
        """Let all aliases of one class stand for another."""
        self._write(
            "UPDATE class_aliases SET target = ? WHERE run = ? AND target = ?",
            (new_target, run, target),
        )

    def aliases(self, run: RunId) -> dict[str, str]:
        """Return alias key -> class key."""
        sql = "SELECT key, target FROM class_aliases WHERE run = ?"
        return {row["key"]: row["target"] for row in self._rows(sql, (run,))}

    def alias_rows(self, run: RunId) -> list[AliasRow]:
        """Return the further names of classes, in order of their keys."""
        sql = "SELECT * FROM class_aliases WHERE run = ? ORDER BY key"
        return self._all(AliasRow, sql, (run,))

    # Tasks.

    def new_task(self, run: RunId, task: int, class_ids: Sequence[int]) -> Task:
        """Open a task; tasks are numbered without gaps."""
        expected = self._number("SELECT count(*) FROM tasks WHERE run = ?", (run,))
        if task != expected:
            raise InternalError(f"expected task {expected} to open next, got {task}.")
        self._insert(
            "tasks",
            {
                "run": run,
                "task": task,
                "class_ids": json.dumps(list(class_ids)),
                "opened_at": self.now,
            },
        )
        return self.tasks(run)[-1]

    def close_task(self, run: RunId, task: int) -> None:
        """Mark a task as learned."""
        self._write(
            "UPDATE tasks SET closed_at = ? WHERE run = ? AND task = ?", (self.now, run, task)
        )

    def tasks(self, run: RunId) -> list[Task]:
        """Return the run's tasks in order."""
        return self._all(Task, "SELECT * FROM tasks WHERE run = ? ORDER BY task", (run,))

    # Rounds.

    def new_round(
        self,
        key: RoundKey,
        *,
        asked: Sequence[ClientId],
        base_state: int,
        remaining_s: float | None = None,
    ) -> Round:
        """Open a round; it gets the run's next ordinal. One round of a run is open at a time."""
        seq = self._number("SELECT ifnull(max(seq) + 1, 0) FROM rounds WHERE run = ?", (key.run,))
        self._insert(
            "rounds",
            {
                **key._asdict(),
                "seq": seq,
                "opened_at": self.now,
                "remaining_s": remaining_s,
                "asked": json.dumps(list(asked)),
                "base_state": base_state,
            },
        )
        return self._must_round(key)

    def set_asked(self, key: RoundKey, asked: Sequence[ClientId]) -> None:
        """Record whom the open round asks, after somebody declined or joined late."""
        self._write_open(key, "asked = ?", (json.dumps(list(asked)),))

    def set_remaining(self, key: RoundKey, remaining_s: float) -> None:
        """Record how much server uptime is left; losing the last value costs seconds only."""
        self._write_open(key, "remaining_s = ?", (remaining_s,), durable=False)

    def reopen_round(
        self, key: RoundKey, *, asked: Sequence[ClientId], remaining_s: float | None
    ) -> None:
        """Let a round that came up short go on; updates already accepted stay accepted."""
        columns = "closed_at = NULL, outcome = 'reopened', reopened = reopened + 1"
        sql = (
            f"UPDATE rounds SET {columns}, asked = ?, remaining_s = ? "  # noqa: S608
            f"WHERE {IN_ROUND} AND new_state IS NULL"
        )
        changed = self._write(sql, (json.dumps(list(asked)), remaining_s, *key))
        if not changed:
            raise InternalError(f"{_in_words(key)} has made a state and cannot be reopened.")

    def close_round(
        self,
        key: RoundKey,
        outcome: str,
        *,
        why: str = "",
        new_state: int | None = None,
        phases: Mapping[str, float] | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Close an open round as ``done``, ``short`` or ``skipped``.

        ``why`` is what closed it (`rounds.events.Why`);
        ``new_state`` is what the round made, already in `StateStore` and `Ledger.add_state`;
        ``phases`` maps names to seconds, ``metrics`` names to further finite numbers.
        """
        end = Outcome(outcome)
        assert end is not Outcome.REOPENED, "reopen_round keeps a round open"
        columns = "closed_at = ?, outcome = ?, why = ?, new_state = ?, phases = ?, metrics = ?"
        texts = [json.dumps(dict(m or {}), allow_nan=False) for m in (phases, metrics)]
        self._write_open(key, columns, (self.now, end.value, why, new_state, *texts))

    def round(self, key: RoundKey) -> Round | None:
        """Return one round."""
        return self._one(Round, f"SELECT * FROM rounds WHERE {IN_ROUND}", key)  # noqa: S608

    def rounds(self, run: RunId, since: int = 0) -> list[Round]:
        """Return the run's rounds in order, from this number on."""
        sql = "SELECT * FROM rounds WHERE run = ? AND seq >= ? ORDER BY seq"
        return self._all(Round, sql, (run, since))

    def was_closed_by(self, run: RunId, task: int, why: str) -> bool:
        """Say whether this closed some round of a task (`rounds.events.Why`)."""
        sql = "SELECT 1 FROM rounds WHERE run = ? AND task = ? AND why = ? LIMIT 1"
        return bool(self._rows(sql, (run, task, why)))

    def was_learned(self, run: RunId, task: int) -> bool:
        """Say whether some round of a task made a new state."""
        sql = "SELECT 1 FROM rounds WHERE run = ? AND task = ? AND new_state IS NOT NULL LIMIT 1"
        return bool(self._rows(sql, (run, task)))

    def void_rounds(self, run: RunId) -> int:
        """Return how many void rounds have ended since the last one that made a state."""
        sql = (
            "SELECT count(*) FROM rounds WHERE run = ? AND why = 'void' AND seq > "
            "(SELECT ifnull(max(seq), -1) FROM rounds WHERE run = ? AND new_state IS NOT NULL)"
        )
        return int(self._number(sql, (run, run)))

    def closed_rounds(self, run: RunId, task: int) -> int:
        """Return how many rounds of a task are closed."""
        sql = "SELECT count(*) FROM rounds WHERE run = ? AND task = ? AND closed_at IS NOT NULL"
        return int(self._number(sql, (run, task)))

    def seq_before(self, row: Round) -> int | None:
        """Return the number of the round that closed before this one; None: it is the first."""
        sql = "SELECT max(seq) FROM rounds WHERE run = ? AND seq < ?"
        found = self._number(sql, (row.run, row.seq))
        return None if found is None else int(found)

    def open_round(self, run: RunId) -> Round | None:
        """Return the round to go on with after a restart, None between rounds."""
        sql = "SELECT * FROM rounds WHERE run = ? AND closed_at IS NULL"
        return self._one(Round, sql, (run,))

    # Updates and answers.

    def accept_update(
        self,
        key: RoundKey,
        client: ClientId,
        *,
        update_id: UpdateId,
        samples: int,
        tensor_bytes: int,
        sealed_bytes: int,
    ) -> None:
        """Record an update, inside the transaction that the caller commits before the Ack.

        Raises:
            AlreadyHave: this client's update for this round was accepted earlier.
        """
        assert self._in_durable, "accept_update belongs in a durable transaction"
        held = self._number(
            f"SELECT update_id FROM updates WHERE {IN_ROUND} AND client = ?",  # noqa: S608
            (*key, client),
        )
        if held is not None:
            raise AlreadyHave(
                f"an update of this client for task {key.task}, {key.kind} round {key.round} "
                f"was accepted before ({held[:16]}), got {update_id[:16]}.",
                action="The first one counts; drop the other.",
            )
        self._insert(
            "updates",
            {
                **key._asdict(),
                "client": client,
                "update_id": update_id,
                "accepted_at": self.now,
                "samples": samples,
                "tensor_bytes": tensor_bytes,
                "sealed_bytes": sealed_bytes,
                "status": UpdateStatus.ACCEPTED,
            },
        )
        # Whoever was given up and answered after all has not failed this round.
        sql = f"DELETE FROM answers WHERE {IN_ROUND} AND client = ?"  # noqa: S608
        self._write(sql, (*key, client))

    def updates(self, key: RoundKey) -> list[UpdateRow]:
        """Return all updates of a round in ClientId order, excluded ones too."""
        # The plus: else SQLite walks all updates of the run, to have them in order.
        sql = f"SELECT * FROM updates WHERE {IN_ROUND} ORDER BY +client"  # noqa: S608
        return self._all(UpdateRow, sql, key)

    def update_of(self, key: RoundKey, client: ClientId) -> UpdateRow | None:
        """Return one client's update of a round."""
        sql = f"SELECT * FROM updates WHERE {IN_ROUND} AND client = ?"  # noqa: S608
        return self._one(UpdateRow, sql, (*key, client))

    def accepted(self, key: RoundKey) -> list[UpdateRow]:
        """Return the updates that aggregation takes, in ClientId order."""
        return [u for u in self.updates(key) if u.status is not UpdateStatus.EXCLUDED]

    def updates_of(self, run: RunId, client: ClientId) -> list[UpdateRow]:
        """Return a client's updates in the order of acceptance."""
        sql = "SELECT * FROM updates WHERE run = ? AND client = ? ORDER BY rowid"
        return self._all(UpdateRow, sql, (run, client))

    def last_judged(self, run: RunId, client: ClientId) -> UpdateRow | None:
        """Return a client's last update whose round is closed."""
        own = "SELECT {} FROM updates WHERE run = ? AND client = ? AND status <> 'accepted'"
        task = self._number(f"{own.format('task')} ORDER BY task DESC LIMIT 1", (run, client))
        sql = f"{own.format('*')} AND task = ? ORDER BY rowid DESC LIMIT 1"
        return self._one(UpdateRow, sql, (run, client, task))

    def counted_tasks(self, run: RunId) -> dict[ClientId, set[int]]:
        """Return the tasks in which an update of a client was counted."""
        sql = "SELECT DISTINCT client, task FROM updates WHERE run = ? AND status = 'counted'"
        found: dict[ClientId, set[int]] = {}
        for row in self._rows(sql, (run,)):
            found.setdefault(ClientId(row["client"]), set()).add(int(row["task"]))
        return found

    def exclude_update(self, key: RoundKey, client: ClientId, reason: str) -> None:
        """Take an accepted update out of aggregation, with the reason that its sender is told."""
        self._write(
            f"UPDATE updates SET status = 'excluded', reason = ? WHERE {IN_ROUND} AND client = ?",  # noqa: S608
            (reason, *key, client),
        )

    def count_updates(self, key: RoundKey) -> None:
        """Mark every update of the round that was not excluded as counted."""
        self._write(
            f"UPDATE updates SET status = 'counted' WHERE {IN_ROUND} AND status = 'accepted'",  # noqa: S608
            key,
        )

    def set_answer(self, key: RoundKey, client: ClientId, answer: str, reason: str) -> None:
        """Record why an asked client gave no update (an `Answer`); the latest stands."""
        self._write(
            "INSERT INTO answers (run, task, kind, round, client, answer, reason, at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "answer = excluded.answer, reason = excluded.reason, at = excluded.at",
            (*key, client, Answer(answer).value, reason, self.now),
        )

    def answers(self, key: RoundKey) -> list[AnswerRow]:
        """Return who gave no update to a round, and why, in ClientId order."""
        sql = f"SELECT * FROM answers WHERE {IN_ROUND} ORDER BY client"  # noqa: S608
        return self._all(AnswerRow, sql, key)

    def _must_round(self, key: RoundKey) -> Round:
        row = self.round(key)
        assert row is not None, f"round {key} was just written"
        return row

    def _write_open(
        self, key: RoundKey, columns: str, values: tuple[Any, ...], *, durable: bool = True
    ) -> None:
        sql = f"UPDATE rounds SET {columns} WHERE {IN_ROUND} AND closed_at IS NULL"  # noqa: S608
        if not self._write(sql, (*values, *key), durable=durable):
            raise InternalError(f"{_in_words(key)} is not open.")


def _in_words(key: RoundKey) -> str:
    return f"task {key.task} {key.kind} round {key.round} of run {key.run}"
