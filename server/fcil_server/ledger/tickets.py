"""The ledger's tables about who may join: tickets that were handed out."""

from __future__ import annotations

from fcil_protocol.ids import ClientId
from fcil_server.ledger.database import LedgerFile
from fcil_server.ledger.enums import Role
from fcil_server.ledger.rows import Client, Ticket

KEPT_S = 90 * 86_400.0  # a ticket that is over is remembered, so that its holder learns why


class TrustTables(LedgerFile):
    """Tickets: public halves of a guest's keys, and what became of them."""

    def add_ticket(
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
        with self.transaction():
            self._execute("DELETE FROM tickets WHERE expires_at < ?", (self.now - KEPT_S,))
            self._insert(
                "tickets",
                {
                    "curve": curve,
                    "signing": signing,
                    "name": name,
                    "issued_at": self.now,
                    "expires_at": expires_at,
                    "role": role.value,
                    "via": via,
                },
            )

    def ticket(self, curve: bytes) -> Ticket | None:
        """Return the ticket that a guest's 32-byte CURVE public key belongs to."""
        return self._one(Ticket, "SELECT * FROM tickets WHERE curve = ?", (curve,))

    def tickets(self) -> list[Ticket]:
        """Return all remembered tickets, oldest first."""
        return self._all(Ticket, "SELECT * FROM tickets ORDER BY issued_at, rowid")

    def use_ticket(self, curve: bytes, client: ClientId) -> None:
        """Note who came in with a ticket."""
        self._write(
            "UPDATE tickets SET used_at = ?, client = ? WHERE curve = ?",
            (self.now, client, curve),
        )

    def withdraw_tickets(self, name: str) -> int:
        """Make the open tickets of a name useless; returns how many there were."""
        return self._write(
            "UPDATE tickets SET withdrawn_at = ? "
            "WHERE name = ? AND used_at IS NULL AND withdrawn_at IS NULL AND expires_at > ?",
            (self.now, name, self.now),
        )

    def clients_via(self, relay: ClientId) -> list[Client]:
        """Return the clients that connect through a relay, revoked ones too."""
        return self._all(Client, "SELECT * FROM clients WHERE via = ? ORDER BY rowid", (relay,))

    def tickets_via(self, relay: ClientId) -> list[Ticket]:
        """Return the remembered tickets whose holders connect through a relay."""
        return self._all(Ticket, "SELECT * FROM tickets WHERE via = ? ORDER BY rowid", (relay,))

    def set_address(self, relay: ClientId, address: str) -> None:
        """Note under which address a relay's clients reach it."""
        self._write("UPDATE clients SET address = ? WHERE client_id = ?", (address, relay))
