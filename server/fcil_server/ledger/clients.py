"""Clients and tickets: members, their keys, invitations, and erasing a member."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from fcil_protocol.errors import InternalError, UsageError
from fcil_protocol.ids import ClientId
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.enums import Role
from fcil_server.ledger.rows import ClientRow, Erased, TicketRow

KEPT_S = 90 * 86_400.0  # a ticket that is over is remembered, so that its holder learns why

# Where people's words may name a client: table, its key, its text.
_TEXTS = (
    ("events", "id", "text"),
    ("refusals", "id", "reason"),
    ("updates", "rowid", "reason"),
    ("answers", "rowid", "reason"),
    ("clients", "rowid", "revoked_why"),
)

# Of a member now, neither revoked nor expired; with a time.
_MEMBER = "revoked_at IS NULL AND (not_after IS NULL OR ? < not_after)"
_OPEN = "used_at IS NULL AND withdrawn_at IS NULL AND expires_at > ?"  # of a ticket, at a time
# What else is said of one client alone.
_ABOUT = (
    "UPDATE classes SET first_seen_by = NULL WHERE first_seen_by = ?",
    "UPDATE answers SET reason = '' WHERE client = ?",
    "UPDATE updates SET train_loss = NULL, train_accuracy = NULL WHERE client = ?",
    "DELETE FROM tickets WHERE client = ?",
    "DELETE FROM refusals WHERE client = ?",
)


class ClientTable:
    """The members: clients and relays, also those that were revoked or erased.

    Table ``clients``, and ``erased`` for the keys that are not taken again.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        client_id: ClientId,
        name: str,
        *,
        curve: bytes,
        signing: bytes,
        sealing: bytes,
        not_after: float | None = None,
        device: str = "",
        role: Role = Role.CLIENT,
        via: ClientId | None = None,
    ) -> None:
        """Enrol a client with its public keys.

        Raises:
            UsageError: the name or the key belongs to another client, or to an erased one.
        """
        with self._db.transaction():
            self.refuse_erased_key(curve)
            self.refuse_taken(name)
            holder = self.by_curve(curve)
            if holder is not None:
                raise UsageError(
                    f"this key belongs to the enrolled client {holder.name!r}.",
                    action="Let every device make its own keys; do not copy state directories.",
                )
            self._db.insert(
                "clients",
                {
                    "client_id": client_id,
                    "name": name,
                    "curve": curve,
                    "signing": signing,
                    "sealing": sealing,
                    "enrolled_at": self._db.now,
                    "not_after": not_after,
                    "device": device,
                    "role": role.value,
                    "via": via,
                },
            )

    def get(self, client_id: ClientId) -> ClientRow | None:
        """Return one client, revoked ones too."""
        return self._db.one(ClientRow, "SELECT * FROM clients WHERE client_id = ?", (client_id,))

    def may_join(self, client_id: ClientId) -> bool:
        """Return True if a client is a member now, neither revoked nor expired."""
        sql = f"SELECT 1 FROM clients WHERE client_id = ? AND {_MEMBER}"  # noqa: S608
        return self._db.number(sql, (client_id, self._db.now)) is not None

    def by_curve(self, key: bytes) -> ClientRow | None:
        """Return the client that a 32-byte CURVE public key belongs to, revoked ones too."""
        sql = "SELECT * FROM clients WHERE curve = ? AND length(curve) > 0"
        return self._db.one(ClientRow, sql, (key,))

    def by_name(self, name: str) -> ClientRow | None:
        """Return the client that bears the name now; a revoked one has given it free."""
        sql = "SELECT * FROM clients WHERE name = ? AND revoked_at IS NULL"
        return self._db.one(ClientRow, sql, (name,))

    def refuse_taken(self, name: str) -> None:
        """Refuse a new member's name that a client already has.

        Raises:
            UsageError: a client has this name.
        """
        if self.by_name(name) is not None:
            raise UsageError(
                f"a client named {name!r} is enrolled.",
                action="Choose another name, or revoke that client first.",
            )

    def all(self) -> list[ClientRow]:
        """Return all clients in the order of their enrolment."""
        return self._db.all(ClientRow, "SELECT * FROM clients ORDER BY enrolled_at, rowid")

    def any(self) -> bool:
        """Return True if there is or was a member."""
        return self._db.number("SELECT 1 FROM clients LIMIT 1") is not None

    def curves(self) -> tuple[set[bytes], set[bytes]]:
        """Return the CURVE public keys of members now, and those of former ones."""
        members, former = set[bytes](), set[bytes]()
        sql = f"SELECT curve, ({_MEMBER}) AS may FROM clients WHERE length(curve) > 0"  # noqa: S608
        for row in self._db.rows(sql, (self._db.now,)):
            (members if row["may"] else former).add(bytes(row["curve"]))
        return members, former

    def via(self, relay: ClientId) -> list[ClientRow]:
        """Return the clients that connect through a relay, revoked ones too."""
        return self._db.all(
            ClientRow, "SELECT * FROM clients WHERE via = ? ORDER BY rowid", (relay,)
        )

    def behind(self, relay: ClientId) -> list[ClientRow]:
        """Return the members that connect through a relay, or through others behind it."""
        found: list[ClientRow] = []
        for row in self.via(relay):
            found += [row] if row.may_join(self._db.now) else []
            found += self.behind(row.client_id) if row.role is Role.RELAY else []
        return found

    def free_name(self, wanted: str) -> str:
        """Return ``wanted``, or ``wanted-2`` ... if a client bears it, or an open ticket is for it.

        Else the name would mean two: `revoke` of it would leave the ticket open.
        """
        name, number = wanted, 1
        while self.by_name(name) is not None or is_open(self._db, name):
            number += 1
            name = f"{wanted}-{number}"
        return name

    def mark_seen(self, client_id: ClientId, *, device: str | None = None) -> None:
        """Note that a client, if it is not erased, was seen now, and the device text it gave."""
        self._db.write(
            "UPDATE clients SET last_seen = ?, device = ifnull(?, device) "
            "WHERE client_id = ? AND length(curve) > 0",
            (self._db.now, device, client_id),
            durable=False,
        )

    def touch_all(self, clients: Sequence[ClientId]) -> None:
        """Note that these clients are connected now; losing the last note costs seconds only."""
        self._db.write(
            "UPDATE clients SET last_seen = ? "
            "WHERE client_id IN (SELECT value FROM json_each(?)) AND length(curve) > 0",
            (self._db.now, json.dumps(list(clients))),
            durable=False,
        )

    def set_address(self, relay: ClientId, address: str) -> None:
        """Note under which address a relay's clients reach it; it says so whenever it connects."""
        self._db.write(
            "UPDATE clients SET address = ? WHERE client_id = ?", (address, relay), durable=False
        )

    def revoke(self, client_id: ClientId, why: str = "") -> None:
        """Bar a client from now on; the first revocation's time and reason stay."""
        self._db.write(
            "UPDATE clients SET revoked_at = ?, revoked_why = ? "
            "WHERE client_id = ? AND revoked_at IS NULL",
            (self._db.now, why, client_id),
        )

    def replace_keys(self, client_id: ClientId, keys: PublicKeys) -> None:
        """Take over a client's new public keys.

        Raises:
            UsageError: they are those of an erased client.
        """
        self.refuse_erased_key(keys.curve)
        self._db.write(
            "UPDATE clients SET curve = ?, signing = ?, sealing = ? WHERE client_id = ?",
            (keys.curve, keys.signing, keys.sealing, client_id),
        )

    def erase(self, client_id: ClientId) -> Erased:
        """Remove the data stored about a client: name, keys, device, tests, events, words.

        Its id stays in the history of rounds, without any other data, and a digest of its
        key, so that the key is never enrolled again. Updates that were counted are part of the
        states and cannot be taken out; the answer says how many. Lines of the audit log stay.

        Raises:
            UsageError: it was erased before.
        """
        self._db.overwrite_removed()
        with self._db.transaction():
            row = self.get(client_id)
            if row is None:
                raise InternalError(f"there is no client {client_id}.")
            if not row.curve:
                raise UsageError(f"the client {row.name} was erased before.")
            pseudonym = f"erased-{client_id[:8]}"
            counted = self._db.number(
                "SELECT count(*) FROM updates WHERE client = ? AND status = 'counted'",
                (client_id,),
            )
            for sql in _ABOUT:
                self._db.execute(sql, (client_id,))
            self._db.execute(  # earlier ones for it, which were never used
                f"DELETE FROM tickets WHERE name = ? AND client IS NULL AND NOT ({_OPEN})",  # noqa: S608 - ours
                (row.name, self._db.now),
            )
            evaluations = self._db.write("DELETE FROM evaluations WHERE client = ?", (client_id,))
            events = self._db.write("DELETE FROM events WHERE client = ?", (client_id,))
            self._db.execute(
                "INSERT INTO erased VALUES (?, ?, ?)", (client_id, self._db.now, _digest(row.curve))
            )
            self._db.execute(
                "UPDATE clients SET name = ?, curve = x'', signing = x'', sealing = x'', "
                "device = '', address = '', last_seen = NULL, not_after = NULL, "
                "revoked_why = '', revoked_at = ifnull(revoked_at, ?) WHERE client_id = ?",
                (pseudonym, self._db.now, client_id),
            )
            self._replace_words(row.name, pseudonym)
        return Erased(
            pseudonym=pseudonym,
            evaluations=evaluations,
            events=events,
            counted=counted,
            audited=self._audited(row.name),
        )

    def refuse_erased_key(self, curve: bytes) -> None:
        """Refuse a key that an erased client had.

        Raises:
            UsageError: it is one.
        """
        sql = "SELECT 1 FROM erased WHERE key_digest = ?"
        if curve and self._db.number(sql, (_digest(curve),)) is not None:
            raise UsageError(
                "this key belonged to an erased member and is not accepted again.",
                action="Let the device make new keys: remove its state directory, then enrol it.",
            )

    def _replace_words(self, name: str, pseudonym: str) -> None:
        """Replace a name wherever it stands as a word of its own in what was said of others."""
        word = as_word(name)
        for table, key, text in _TEXTS:
            sql = f"SELECT {key} AS k, {text} AS t FROM {table} WHERE instr({text}, ?) > 0"  # noqa: S608 - names are ours
            for row in self._db.rows(sql, (name,)):
                self._db.execute(
                    f"UPDATE {table} SET {text} = ? WHERE {key} = ?",  # noqa: S608
                    (word.sub(pseudonym, row["t"]), row["k"]),
                )

    def _audited(self, name: str) -> int:
        word = as_word(name)
        rows = self._db.rows("SELECT actor, detail FROM audit")
        return sum(bool(word.search(f"{row['actor']} {row['detail']}")) for row in rows)


class TicketTable:
    """The tickets: their holders' public keys, and what became of each. Table ``tickets``."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        name: str,
        *,
        curve: bytes,
        signing: bytes,
        expires_at: float,
        role: Role = Role.CLIENT,
        via: ClientId | None = None,
    ) -> None:
        """Record a ticket for one client that will bear ``name``; forget those long over."""
        with self._db.transaction():
            self._db.execute("DELETE FROM tickets WHERE expires_at < ?", (self._db.now - KEPT_S,))
            self._db.insert(
                "tickets",
                {
                    "curve": curve,
                    "signing": signing,
                    "name": name,
                    "issued_at": self._db.now,
                    "expires_at": expires_at,
                    "role": role.value,
                    "via": via,
                },
            )

    def get(self, curve: bytes) -> TicketRow | None:
        """Return the ticket that a guest's 32-byte CURVE public key belongs to."""
        return self._db.one(TicketRow, "SELECT * FROM tickets WHERE curve = ?", (curve,))

    def all(self) -> list[TicketRow]:
        """Return all remembered tickets, oldest first."""
        return self._db.all(TicketRow, "SELECT * FROM tickets ORDER BY issued_at, rowid")

    def named(self, name: str) -> list[TicketRow]:
        """Return the tickets for a name."""
        return self._db.all(TicketRow, "SELECT * FROM tickets WHERE name = ?", (name,))

    def via(self, relay: ClientId) -> list[TicketRow]:
        """Return the remembered tickets whose holders connect through a relay."""
        return self._db.all(
            TicketRow, "SELECT * FROM tickets WHERE via = ? ORDER BY rowid", (relay,)
        )

    def is_open(self, name: str) -> bool:
        """Return True if a ticket for a name is still open."""
        return is_open(self._db, name)

    def use(self, curve: bytes, client: ClientId) -> None:
        """Note who came in with a ticket."""
        self._db.write(
            "UPDATE tickets SET used_at = ?, client = ? WHERE curve = ?",
            (self._db.now, client, curve),
        )

    def withdraw(self, name: str) -> int:
        """Make the open tickets of a name useless; returns how many there were."""
        return self._db.write(
            f"UPDATE tickets SET withdrawn_at = ? WHERE name = ? AND {_OPEN}",  # noqa: S608 - ours
            (self._db.now, name, self._db.now),
        )


def is_open(database: Database, name: str) -> bool:
    """Return True if a ticket for a name is still open."""
    sql = f"SELECT count(*) FROM tickets WHERE name = ? AND {_OPEN}"  # noqa: S608 - ours
    return bool(database.number(sql, (name, database.now)))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def as_word(name: str) -> re.Pattern[str]:
    """Return what finds a client's name where it stands for itself, not within another one."""
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")
