"""Rounds, the updates that clients sent to them, and why others sent none."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fcil_protocol.errors import AlreadyHave, InternalError
from fcil_protocol.ids import ClientId, RoundKey, RunId, UpdateId
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_server.ledger.databases.database import MOST_ROWS, Database
from fcil_server.ledger.enums import SPLIT_SUM, Answer, Outcome, UpdateStatus
from fcil_server.ledger.rows import AnswerRow, RoundRow, UpdateFate, UpdateRow

FORGOTTEN = "the client was forgotten"
IN_ROUND = "run = ? AND task = ? AND kind = ? AND round = ?"
# Not one of the rounds that a forked run copied from its parent.
OWN_ROUND = (
    "NOT EXISTS (SELECT 1 FROM rounds AS r JOIN runs ON runs.run_id = r.run "
    "WHERE r.run = {table}.run AND r.task = {table}.task AND r.kind = {table}.kind "
    "AND r.round = {table}.round AND r.seq < runs.inherited)"
)
_RECENT = 8  # rounds without a training, such as evaluations, that may follow the last one with it
_COUNTED = "status = 'counted' GROUP BY client"


@dataclass(frozen=True)
class Training:
    """Loss and accuracy of the training of an update, or of a round's, weighted by samples.

    Attributes:
        loss: of the last epoch; None: no client reports it.
        accuracy: share of the training images, 0 to 1; None: no client reports it.
    """

    loss: float | None = None
    accuracy: float | None = None

    @classmethod
    def mean(cls, fates: Iterable[UpdateFate]) -> Training:
        """Return the means over the updates that report them, excluded ones left out."""
        kept = [f for f in fates if f.status is not UpdateStatus.EXCLUDED]
        return cls(
            _weighted((f.train_loss, f.samples) for f in kept),
            _weighted((f.train_accuracy, f.samples) for f in kept),
        )


def _weighted(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    total = sum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / total if total else None


class RoundTable:
    """The exchanges of the runs; at most one of a run is open. Table ``rounds``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def open(
        self,
        key: RoundKey,
        *,
        asked: Sequence[ClientId],
        base_state: int,
        remaining_s: float | None = None,
    ) -> RoundRow:
        """Open a round; it gets the run's next ordinal. One round of a run is open at a time."""
        seq = self._db.number(
            "SELECT ifnull(max(seq) + 1, 0) FROM rounds WHERE run = ?", (key.run,)
        )
        self._db.insert(
            "rounds",
            {
                **key._asdict(),
                "seq": seq,
                "opened_at": self._db.now,
                "remaining_s": remaining_s,
                "asked": json.dumps(list(asked)),
                "base_state": base_state,
            },
        )
        return self._must_round(key)

    def set_asked(self, key: RoundKey, asked: Sequence[ClientId], *, durable: bool = True) -> None:
        """Record the clients that the open round asks, after one declined or joined late.

        Not ``durable``: those that a power cut forgets are asked again.
        """
        self._write_open(key, "asked = ?", (json.dumps(list(asked)),), durable=durable)

    def set_remaining(self, key: RoundKey, remaining_s: float) -> None:
        """Record how much server uptime is left; losing the last value costs seconds only."""
        self._write_open(key, "remaining_s = ?", (remaining_s,), durable=False)

    def reopen(
        self, key: RoundKey, *, asked: Sequence[ClientId], remaining_s: float | None
    ) -> None:
        """Let a round that came up short go on; updates already accepted stay accepted."""
        columns = "closed_at = NULL, outcome = 'reopened', reopened = reopened + 1"
        sql = (
            f"UPDATE rounds SET {columns}, asked = ?, remaining_s = ? "  # noqa: S608
            f"WHERE {IN_ROUND} AND new_state IS NULL"
        )
        changed = self._db.write(sql, (json.dumps(list(asked)), remaining_s, *key))
        if not changed:
            raise InternalError(f"{_in_words(key)} has made a state and cannot be reopened.")

    def close(
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
        ``new_state`` is what the round made, already in `StateStore` and `StateTable`;
        ``phases`` maps names to seconds, ``metrics`` names to further finite numbers.
        """
        end = Outcome(outcome)
        assert end is not Outcome.REOPENED, "`reopen` keeps a round open"
        columns = "closed_at = ?, outcome = ?, why = ?, new_state = ?, phases = ?, metrics = ?"
        texts = [json.dumps(dict(m or {}), allow_nan=False) for m in (phases, metrics)]
        self._write_open(key, columns, (self._db.now, end.value, why, new_state, *texts))

    def get(self, key: RoundKey) -> RoundRow | None:
        """Return one round."""
        return self._db.one(RoundRow, f"SELECT * FROM rounds WHERE {IN_ROUND}", key)  # noqa: S608

    def all(self, run: RunId, since: int = 0, limit: int | None = None) -> list[RoundRow]:
        """Return the run's rounds in order, from this number on; at most ``limit``."""
        sql = "SELECT * FROM rounds WHERE run = ? AND seq >= ? ORDER BY seq LIMIT ?"
        return self._db.all(RoundRow, sql, (run, since, MOST_ROWS if limit is None else limit))

    def count(self, run: RunId) -> int:
        """Return the number of the run's rounds."""
        return int(self._db.number("SELECT count(*) FROM rounds WHERE run = ?", (run,)))

    def newest(self, run: RunId, most: int) -> list[RoundRow]:
        """Return the run's newest rounds, the newest first."""
        sql = "SELECT * FROM rounds WHERE run = ? ORDER BY seq DESC LIMIT ?"
        return self._db.all(RoundRow, sql, (run, most))

    def begun_by(self, run: RunId, at: float) -> RoundRow | None:
        """Return the run's newest round that was opened at this time or before."""
        sql = "SELECT * FROM rounds WHERE run = ? AND opened_at <= ? ORDER BY seq DESC LIMIT 1"
        return self._db.one(RoundRow, sql, (run, at))

    def at(self, run: RunId, seq: int) -> RoundRow:
        """Return the run's round of this number."""
        sql = "SELECT * FROM rounds WHERE run = ? AND seq = ?"
        return self._db.all(RoundRow, sql, (run, seq))[0]

    def seqs_after(self, run: RunId, seq: int) -> list[int]:
        """Return the numbers of the run's rounds after this one, in order."""
        sql = "SELECT seq FROM rounds WHERE run = ? AND seq > ? ORDER BY seq"
        return [int(row["seq"]) for row in self._db.rows(sql, (run, seq))]

    def current(self, run: RunId) -> RoundRow | None:
        """Return the round to go on with after a restart, None between rounds."""
        sql = "SELECT * FROM rounds WHERE run = ? AND closed_at IS NULL"
        return self._db.one(RoundRow, sql, (run,))

    def was_closed_by(self, run: RunId, task: int, why: str) -> bool:
        """Say whether this closed some round of a task (`rounds.events.Why`)."""
        sql = "SELECT 1 FROM rounds WHERE run = ? AND task = ? AND why = ? LIMIT 1"
        return bool(self._db.rows(sql, (run, task, why)))

    def was_learned(
        self, run: RunId, task: int, *, late: bool = False, without: Collection[str] = ()
    ) -> bool:
        """Say whether some round of a task made a new state; with ``late`` one of late images.

        Args:
            run: the run.
            task: the task.
            late: of late images; otherwise of the task's own rounds.
            without: kinds whose states have learned nothing yet.
        """
        sql = (
            "SELECT DISTINCT kind FROM rounds WHERE run = ? AND task = ? AND (kind = ?) = ? "
            "AND new_state IS NOT NULL"
        )
        kinds = {str(row["kind"]) for row in self._db.rows(sql, (run, task, LATE, late))}
        return bool(kinds.difference(without))

    def count_void(self, run: RunId) -> int:
        """Return how many void rounds have ended since the last one that made a state."""
        sql = (
            "SELECT count(*) FROM rounds WHERE run = ? AND why = 'void' AND seq > "
            "(SELECT ifnull(max(seq), -1) FROM rounds WHERE run = ? AND new_state IS NOT NULL)"
        )
        return int(self._db.number(sql, (run, run)))

    def count_closed(self, run: RunId, task: int) -> int:
        """Return how many rounds of a task are closed, apart from those of late images."""
        sql = (
            "SELECT count(*) FROM rounds WHERE run = ? AND task = ? AND kind <> ? "
            "AND closed_at IS NOT NULL"
        )
        return int(self._db.number(sql, (run, task, LATE)))

    def closed_of(self, run: RunId, task: int) -> list[RoundRow]:
        """Return the closed rounds of a task, the oldest first, apart from those of late images."""
        sql = (
            "SELECT * FROM rounds WHERE run = ? AND task = ? AND kind <> ? "
            "AND closed_at IS NOT NULL ORDER BY seq"
        )
        return self._db.all(RoundRow, sql, (run, task, LATE))

    def count_late(self, run: RunId, task: int) -> int:
        """Return how many rounds of late images have closed after a task's own."""
        sql = (
            "SELECT count(*) FROM rounds WHERE run = ? AND task = ? AND kind = ? "
            "AND closed_at IS NOT NULL"
        )
        return int(self._db.number(sql, (run, task, LATE)))

    def seq_before(self, row: RoundRow) -> int | None:
        """Return the number of the round that closed before this one; None: it is the first."""
        sql = "SELECT max(seq) FROM rounds WHERE run = ? AND seq < ?"
        found = self._db.number(sql, (row.run, row.seq))
        return None if found is None else int(found)

    def _must_round(self, key: RoundKey) -> RoundRow:
        row = self.get(key)
        assert row is not None, f"round {key} was just written"
        return row

    def _write_open(
        self, key: RoundKey, columns: str, values: tuple[Any, ...], *, durable: bool = True
    ) -> None:
        sql = f"UPDATE rounds SET {columns} WHERE {IN_ROUND} AND closed_at IS NULL"  # noqa: S608
        if not self._db.write(sql, (*values, *key), durable=durable):
            raise InternalError(f"{_in_words(key)} is not open.")


class UpdateTable:
    """The updates that were accepted, and what became of each. Table ``updates``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def accept(
        self,
        key: RoundKey,
        client: ClientId,
        *,
        update_id: UpdateId,
        samples: int,
        tensor_bytes: int,
        sealed_bytes: int,
        train_loss: float | None = None,
        train_accuracy: float | None = None,
        base_state: int | None = None,
        sum_id: UpdateId | None = None,
    ) -> None:
        """Record an update, inside the transaction that the caller commits before the Ack.

        Raises:
            AlreadyHave: this client's update for this round was accepted earlier.
        """
        assert self._db.in_durable, "an update is accepted in a durable transaction"
        held = self._db.number(
            f"SELECT update_id FROM updates WHERE {IN_ROUND} AND client = ?",  # noqa: S608
            (*key, client),
        )
        if held is not None:
            raise AlreadyHave(
                f"an update of this client for task {key.task}, {key.kind} round {key.round} "
                f"was accepted before ({held[:16]}), got {update_id[:16]}.",
                action="The first one counts; drop the other.",
            )
        self._db.insert(
            "updates",
            {
                **key._asdict(),
                "client": client,
                "update_id": update_id,
                "accepted_at": self._db.now,
                "samples": samples,
                "tensor_bytes": tensor_bytes,
                "sealed_bytes": sealed_bytes,
                "status": UpdateStatus.ACCEPTED,
                "train_loss": train_loss,
                "train_accuracy": train_accuracy,
                "base_state": base_state,
                "sum_id": sum_id,
            },
        )
        # Whoever was given up and answered after all has not failed this round.
        sql = f"DELETE FROM answers WHERE {IN_ROUND} AND client = ?"  # noqa: S608
        self._db.write(sql, (*key, client))

    def of_round(self, key: RoundKey) -> list[UpdateRow]:
        """Return all updates of a round in ClientId order, excluded ones too."""
        # As an expression: else SQLite walks all updates of the run, to have them in order.
        sql = f"SELECT * FROM updates WHERE {IN_ROUND} ORDER BY client || ''"  # noqa: S608
        return self._db.all(UpdateRow, sql, key)

    def fates(self, key: RoundKey) -> list[UpdateFate]:
        """Return the fate of each update of a round, in ClientId order; cheaper than `of_round`."""
        columns = "client, status, reason, samples, train_loss, train_accuracy, base_state"
        sql = f"SELECT {columns} FROM updates WHERE {IN_ROUND} ORDER BY client || ''"  # noqa: S608
        return self._db.all(UpdateFate, sql, key)

    def newest_training(self, run: RunId) -> dict[str, Any] | None:
        """Return task, kind, round, loss and accuracy of the newest closed round with a loss.

        Of the newest rounds only: its cost does not grow with the run.
        """
        for row in RoundTable(self._db).newest(run, _RECENT):
            found = Training() if row.closed_at is None else self._training(row.key)
            if found.loss is not None:
                place = {"task": row.task, "kind": row.kind, "round": row.round}
                return {**place, **asdict(found)}
        return None

    def _training(self, key: RoundKey) -> Training:
        """Return the means of a round, as `Training.mean`; the database adds them up."""
        means = ", ".join(
            f"sum(train_{name} * samples) / "
            f"nullif(sum(samples) FILTER (WHERE train_{name} IS NOT NULL), 0) AS {name}"
            for name in ("loss", "accuracy")
        )
        kept = f"{IN_ROUND} AND status != 'excluded'"
        sql = f"SELECT {means} FROM updates WHERE {kept}"  # noqa: S608 - names are ours
        return self._db.one(Training, sql, key) or Training()

    def get(self, key: RoundKey, client: ClientId) -> UpdateRow | None:
        """Return one client's update of a round."""
        sql = f"SELECT * FROM updates WHERE {IN_ROUND} AND client = ?"  # noqa: S608
        return self._db.one(UpdateRow, sql, (*key, client))

    def holds(self, run: RunId, update_id: str) -> bool:
        """Return True if a run has an update, or a sum of some, of whichever round."""
        # Two searches: for an OR, SQLite reads all updates of the run.
        sql = (
            "SELECT 1 FROM updates WHERE run = ? AND update_id = ? "
            "UNION ALL SELECT 1 FROM updates WHERE run = ? AND sum_id = ? LIMIT 1"
        )
        return self._db.number(sql, (run, update_id, run, update_id)) is not None

    def accepted(self, key: RoundKey) -> list[UpdateRow]:
        """Return the updates that aggregation takes, in ClientId order."""
        return [u for u in self.of_round(key) if u.status is not UpdateStatus.EXCLUDED]

    def count_accepted(self, key: RoundKey) -> int:
        """Return the number of updates that aggregation takes."""
        sql = f"SELECT count(*) FROM updates WHERE {IN_ROUND} AND status <> 'excluded'"  # noqa: S608
        return int(self._db.number(sql, key))

    def counted_tasks_of(self, run: RunId, client: ClientId) -> set[int]:
        """Return the tasks in which an update of one client was counted."""
        sql = (
            "SELECT DISTINCT task FROM updates WHERE run = ? AND client = ? AND status = 'counted'"
        )
        return {int(row["task"]) for row in self._db.rows(sql, (run, client))}

    def of_client(self, run: RunId, client: ClientId) -> list[UpdateRow]:
        """Return a client's updates in the order of acceptance."""
        sql = "SELECT * FROM updates WHERE run = ? AND client = ? ORDER BY rowid"
        return self._db.all(UpdateRow, sql, (run, client))

    def of_erased(self, run: RunId) -> list[UpdateId]:
        """Return the records of all updates of clients that were erased."""
        sql = (
            "SELECT ifnull(sum_id, update_id) AS record FROM updates WHERE run = ? "
            "AND client IN (SELECT client_id FROM clients WHERE curve = x'') ORDER BY rowid"
        )
        return [UpdateId(row["record"]) for row in self._db.rows(sql, (run,))]

    def last_judged(self, run: RunId, client: ClientId) -> UpdateRow | None:
        """Return a client's last update whose round is closed."""
        own = "SELECT {} FROM updates WHERE run = ? AND client = ? AND status <> 'accepted'"
        task = self._db.number(f"{own.format('task')} ORDER BY task DESC LIMIT 1", (run, client))
        sql = f"{own.format('*')} AND task = ? ORDER BY rowid DESC LIMIT 1"
        return self._db.one(UpdateRow, sql, (run, client, task))

    def exclude(self, key: RoundKey, client: ClientId, reason: str) -> None:
        """Take an accepted update out of aggregation, with the reason for its sender.

        The other updates of a relay's sum that it is in are excluded with it, as `SPLIT_SUM`.
        """
        mine = f"{IN_ROUND} AND client = ?"
        self._db.write(
            f"UPDATE updates SET status = 'excluded', reason = ? WHERE {mine}",  # noqa: S608
            (reason, *key, client),
        )
        self._db.write(
            f"UPDATE updates SET status = 'excluded', reason = ? WHERE {IN_ROUND} "  # noqa: S608
            "AND status = 'accepted' AND sum_id IS NOT NULL "
            f"AND sum_id = (SELECT sum_id FROM updates WHERE {mine})",
            (SPLIT_SUM, *key, *key, client),
        )

    def mark_counted(self, key: RoundKey) -> None:
        """Mark every update of the round that was not excluded as counted."""
        self._db.write(
            f"UPDATE updates SET status = 'counted' WHERE {IN_ROUND} AND status = 'accepted'",  # noqa: S608
            key,
        )

    def counted_tasks(self, run: RunId) -> dict[ClientId, set[int]]:
        """Return the tasks in which an update of a client was counted."""
        sql = "SELECT DISTINCT client, task FROM updates WHERE run = ? AND status = 'counted'"
        found: dict[ClientId, set[int]] = {}
        for row in self._db.rows(sql, (run,)):
            found.setdefault(ClientId(row["client"]), set()).add(int(row["task"]))
        return found

    def counted_ids(self, run: RunId) -> set[str]:
        """Return the ids of the updates that are in the run's states."""
        sql = (
            "SELECT update_id FROM updates WHERE run = ? AND status = 'counted' "
            "AND kind <> ? AND samples > 0"
        )
        return {str(row["update_id"]) for row in self._db.rows(sql, (run, EVALUATE))}

    def counted_by_run(self, client: ClientId) -> dict[RunId, int]:
        """Return in which runs, and how often, a client's updates are in the states."""
        sql = (
            "SELECT run, count(*) AS n FROM updates JOIN runs ON run_id = run "
            "WHERE client = ? AND updates.status = 'counted' AND kind <> ? AND samples > 0 "
            "AND emptied_at IS NULL GROUP BY run, runs.rowid ORDER BY runs.rowid"
        )
        return {RunId(row["run"]): int(row["n"]) for row in self._db.rows(sql, (client, EVALUATE))}

    def inherited_from(self, run: RunId, kind: str | None = None) -> frozenset[ClientId]:
        """Return the clients with images in a fork by rounds before it began.

        Args:
            run: the fork.
            kind: of the rounds; None: any but the evaluation.
        """
        if not self._db.number("SELECT inherited FROM runs WHERE run_id = ?", (run,)):
            return frozenset()
        own = OWN_ROUND.format(table="updates")
        sql = (
            "SELECT DISTINCT client FROM updates WHERE run = ? AND kind <> ? AND samples > 0 "  # noqa: S608
            f"AND kind = ifnull(?, kind) AND status = 'counted' AND NOT ({own})"
        )
        rows = self._db.rows(sql, (run, EVALUATE, kind))
        return frozenset(ClientId(row["client"]) for row in rows)

    def forgotten(self, run: RunId) -> frozenset[tuple[ClientId, int]]:
        """Return the clients that a run has forgotten, each with the tasks of its updates."""
        sql = (
            "SELECT DISTINCT client, task FROM updates "
            "WHERE run = ? AND status = 'excluded' AND reason = ?"
        )
        rows = self._db.rows(sql, (run, FORGOTTEN))
        return frozenset((ClientId(row["client"]), int(row["task"])) for row in rows)

    def rounds_by_client(self) -> dict[ClientId, int]:
        """Return client -> in how many rounds of all runs its update was counted.

        What a forked run copied from its parent counts once.
        """
        own = OWN_ROUND.format(table="updates")
        sql = f"SELECT client, count(*) AS n FROM updates WHERE {own} AND {_COUNTED}"  # noqa: S608
        return {row["client"]: row["n"] for row in self._db.rows(sql)}


class AnswerTable:
    """Why asked clients gave no update. Table ``answers``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def set(
        self, key: RoundKey, client: ClientId, answer: str, reason: str, *, durable: bool = True
    ) -> None:
        """Record why an asked client gave no update (an `Answer`); the latest stands."""
        with self._db.transaction(durable=durable):
            self.set_each(key, [(client, answer, reason)])

    def set_each(self, key: RoundKey, answers: Iterable[tuple[ClientId, str, str]]) -> None:
        """Record why some clients gave no update, each with its answer and reason.

        Call it in a transaction.
        """
        now = self._db.now
        self._db.execute_each(
            "INSERT INTO answers (run, task, kind, round, client, answer, reason, at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run, task, kind, round, client) DO UPDATE SET "
            "answer = excluded.answer, reason = excluded.reason, at = excluded.at",
            [
                (*key, client, Answer(answer).value, reason, now)
                for client, answer, reason in answers
            ],
        )

    def get(self, key: RoundKey, client: ClientId) -> AnswerRow | None:
        """Return why a client gave no update to a round; None if it gave one or was not asked."""
        sql = f"SELECT * FROM answers WHERE {IN_ROUND} AND client = ?"  # noqa: S608
        return self._db.one(AnswerRow, sql, (*key, client))

    def of_round(self, key: RoundKey) -> list[AnswerRow]:
        """Return who gave no update to a round, and why, in ClientId order."""
        sql = f"SELECT * FROM answers WHERE {IN_ROUND} ORDER BY client"  # noqa: S608
        return self._db.all(AnswerRow, sql, key)

    def declined_for(self, run: RunId, task: int, kind: str, reason: str) -> frozenset[ClientId]:
        """Return the clients that declined rounds of a kind in a task for this reason."""
        sql = (
            "SELECT DISTINCT client FROM answers WHERE run = ? AND task = ? AND kind = ? "
            "AND answer = ? AND reason = ?"
        )
        found = self._db.rows(sql, (run, task, kind, Answer.DECLINED.value, reason))
        return frozenset(ClientId(row["client"]) for row in found)


def _in_words(key: RoundKey) -> str:
    return f"task {key.task} {key.kind} round {key.round} of run {key.run}"
