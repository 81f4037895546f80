"""The ledger's verbs that take somebody out: forgotten by a run, or erased from the federation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from fcil_protocol.errors import InternalError, UsageError
from fcil_protocol.ids import ClientId, Digest, RunId
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.ledger.database import LedgerFile
from fcil_server.ledger.rows import Client, Erased, Run

FORGOTTEN = "the client was forgotten"

# Where people's words may name a client: table, its key, its text.
_TEXTS = (
    ("events", "id", "text"),
    ("refusals", "id", "reason"),
    ("updates", "rowid", "reason"),
    ("answers", "rowid", "reason"),
    ("clients", "rowid", "revoked_why"),
)

# What else is said of one client alone.
_ABOUT = (
    "UPDATE classes SET first_seen_by = NULL WHERE first_seen_by = ?",
    "UPDATE answers SET reason = '' WHERE client = ?",
    "DELETE FROM tickets WHERE client = ?",
    "DELETE FROM refusals WHERE client = ?",
)


class ForgetTables(LedgerFile):
    """What makes a client's part in a run, or its name in the ledger, go."""

    # Forgetting: a fork without a client.

    def counted_ids(self, run: RunId) -> set[str]:
        """Return the ids of the updates that are in the run's states."""
        sql = (
            "SELECT update_id FROM updates WHERE run = ? AND status = 'counted' "
            "AND kind <> ? AND samples > 0"
        )
        return {str(row["update_id"]) for row in self._rows(sql, (run, EVALUATE))}

    def forgotten(self, run: RunId) -> frozenset[tuple[ClientId, int]]:
        """Return the clients that a run has forgotten, each with the tasks of its updates."""
        sql = (
            "SELECT DISTINCT client, task FROM updates "
            "WHERE run = ? AND status = 'excluded' AND reason = ?"
        )
        rows = self._rows(sql, (run, FORGOTTEN))
        return frozenset((ClientId(row["client"]), int(row["task"])) for row in rows)

    def forget_in(
        self, run: RunId, client: ClientId, states: Sequence[tuple[int, Digest, Digest | None]]
    ) -> None:
        """Make a fork one without a client: its states are these, its updates are not counted.

        To be called in the transaction that forks. ``states``: number, digest, parent's digest.
        """
        assert self._in_durable, "a fork is one durable transaction"
        for state, digest, parent in states:
            self._execute(
                "UPDATE states SET digest = ?, parent = ? WHERE run = ? AND state = ?",
                (digest, parent, run, state),
            )
        self._execute(
            "UPDATE updates SET status = 'excluded', reason = ? "
            "WHERE run = ? AND client = ? AND status = 'counted'",
            (FORGOTTEN, run, client),
        )
        self._execute("DELETE FROM evaluations WHERE run = ? AND client = ?", (run, client))

    def lineage(self, run: RunId) -> list[RunId]:
        """Return a run and those that it was forked from, newest first."""
        found: list[RunId] = []
        at: RunId | None = run
        while at is not None and at not in found:
            found.append(at)
            at = self._number("SELECT parent_run FROM runs WHERE run_id = ?", (at,))
        return found

    def counts_of(self, client: ClientId) -> dict[RunId, int]:
        """Return in which runs, and how often, a client's updates are in the states."""
        sql = (
            "SELECT run, count(*) AS n FROM updates JOIN runs ON run_id = run "
            "WHERE client = ? AND updates.status = 'counted' AND kind <> ? AND samples > 0 "
            "AND emptied_at IS NULL GROUP BY run ORDER BY runs.rowid"
        )
        return {RunId(row["run"]): int(row["n"]) for row in self._rows(sql, (client, EVALUATE))}

    def empty_run(self, run: RunId) -> None:
        """Note that a run's states, updates and parts are to go: somebody in them was forgotten.

        Its rows stay. The files are the caller's to remove, after this is committed.
        """
        with self.transaction():
            self._execute("UPDATE runs SET emptied_at = ? WHERE run_id = ?", (self.now, run))
            self._execute("DELETE FROM parts WHERE run = ?", (run,))

    def emptied_runs(self) -> list[Run]:
        """Return the runs that `empty_run` was called for."""
        return self._all(Run, "SELECT * FROM runs WHERE emptied_at IS NOT NULL ORDER BY rowid")

    # Erasing: a member's name and keys.

    def erase_client(self, client_id: ClientId) -> Erased:
        """Remove what is stored about a client: name, keys, device, tests, events, words.

        Its id stays in the history of rounds, where it says nothing more, and a digest of its
        key, so that the key is never enrolled again. Updates that were counted are part of the
        states and cannot be taken out; the answer says how many. Lines of the audit log stay.

        Raises:
            UsageError: it was erased before.
        """
        self._execute("PRAGMA secure_delete = ON")  # zeros instead of what was there
        with self.transaction():
            row = self._one(Client, "SELECT * FROM clients WHERE client_id = ?", (client_id,))
            if row is None:
                raise InternalError(f"there is no client {client_id}.")
            if not row.curve:
                raise UsageError(f"the client {row.name} was erased before.")
            pseudonym = f"erased-{client_id[:8]}"
            counted = self._number(
                "SELECT count(*) FROM updates WHERE client = ? AND status = 'counted'",
                (client_id,),
            )
            for sql in _ABOUT:
                self._execute(sql, (client_id,))
            evaluations = self._write("DELETE FROM evaluations WHERE client = ?", (client_id,))
            events = self._write("DELETE FROM events WHERE client = ?", (client_id,))
            self._execute(
                "INSERT INTO erased VALUES (?, ?, ?)", (client_id, self.now, _digest(row.curve))
            )
            self._execute(
                "UPDATE clients SET name = ?, curve = x'', signing = x'', sealing = x'', "
                "device = '', address = '', last_seen = NULL, not_after = NULL, "
                "revoked_why = '', revoked_at = ifnull(revoked_at, ?) WHERE client_id = ?",
                (pseudonym, self.now, client_id),
            )
            self._replace_words(row.name, pseudonym)
        return Erased(
            pseudonym=pseudonym,
            evaluations=evaluations,
            events=events,
            counted=counted,
            audited=self._audited(row.name),
        )

    def _replace_words(self, name: str, pseudonym: str) -> None:
        """Replace a name wherever it stands as a word of its own in what was said of others."""
        word = as_word(name)
        for table, key, text in _TEXTS:
            sql = f"SELECT {key} AS k, {text} AS t FROM {table} WHERE instr({text}, ?)"  # noqa: S608 - names are ours
            for row in self._rows(sql, (name,)):
                self._execute(
                    f"UPDATE {table} SET {text} = ? WHERE {key} = ?",  # noqa: S608
                    (word.sub(pseudonym, row["t"]), row["k"]),
                )

    def _audited(self, name: str) -> int:
        word = as_word(name)
        rows = self._rows("SELECT actor, detail FROM audit")
        return sum(bool(word.search(f"{row['actor']} {row['detail']}")) for row in rows)

    def refuse_erased_key(self, curve: bytes) -> None:
        """Refuse a key that an erased client had.

        Raises:
            UsageError: it is one.
        """
        sql = "SELECT 1 FROM erased WHERE key_digest = ?"
        if curve and self._number(sql, (_digest(curve),)) is not None:
            raise UsageError(
                "this key was a member's that was erased, and is not taken again.",
                action="Let the device make new keys: remove its state directory, then enrol it.",
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def as_word(name: str) -> re.Pattern[str]:
    """Return what finds a client's name where it stands for itself, not within another one."""
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
