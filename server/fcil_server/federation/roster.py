"""Membership: tickets, enrolment, revocation. Each act is audited.

The allow-list of the gate (`AllowList`) follows the ledger; only this module changes both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fcil_protocol.envelopes.window import MIN_WINDOW_BYTES, TOTAL_BYTES
from fcil_protocol.errors import UsageError
from fcil_protocol.formats import minute
from fcil_protocol.ids import ClientId, named_client_id, new_client_id
from fcil_protocol.messages.messages import Rotate
from fcil_protocol.messages.relay_frames import MOST_RELAYS
from fcil_protocol.trust.keys import PublicKeys, verify_signature
from fcil_protocol.trust.ticket import PROOF, Ticket, proof_text
from fcil_server.federation.allow_list import MAX_BEHIND, AllowList
from fcil_server.federation.directory import Federation
from fcil_server.federation.eligibility import REVOKED, check_ticket, former_client_state, refusal
from fcil_server.ledger import rows as ledger_rows
from fcil_server.ledger.enums import Role, UpdateStatus
from fcil_server.ledger.ledger import Ledger

_LIST = "List them with: fcil-server clients"
WITHDRAWN = "the client was revoked before the round closed"
MAX_WHY = 200  # characters of the reason in a message to a client
MAX_GUESTS_BEHIND = 1_000  # keys that one `Admit` to a relay can list, beside those of members
MAX_RELAYS_BEHIND = 500  # of the members, those that are relays


@dataclass
class Roster:
    """The federation's members and open tickets.

    Args:
        federation: its ledger has the members, its keys go into tickets.
        allow_list: the gate's lists.
        changed: receives the relay that needs new lists.
        named_ids: True if ids derive from names ([federation] ids).
    """

    federation: Federation
    allow_list: AllowList
    changed: Callable[[ClientId], None] = lambda _: None
    named_ids: bool = False

    @property
    def _ledger(self) -> Ledger:
        return self.federation.ledger

    def open(self) -> None:
        """Put all clients that the ledger knows on the gate's lists."""
        members, former = self._ledger.clients.curves()
        now = self._ledger.now
        tickets = {t.curve: t.open_s(now) for t in self._ledger.tickets.all()}
        self.allow_list.replace(
            members, {k: s for k, s in tickets.items() if s}, former | tickets.keys()
        )

    # --- becoming a member ------------------------------------------------------------------

    def issue(
        self,
        name: str,
        lasts_s: float,
        addresses: tuple[str, ...],
        actor: str,
        *,
        role: Role = Role.CLIENT,
        via: str | None = None,
    ) -> Ticket:
        """Make a ticket for one new member; earlier open tickets of this name end.

        Args:
            name: of the new member.
            lasts_s: the ticket's lifetime, seconds.
            addresses: the server's, for the ticket.
            actor: the caller, for the audit log.
            role: the new member's role.
            via: name of the relay that the new member will connect to, for ever.

        Raises:
            UsageError: a client has the name, or ``via`` is no relay that can take it.
        """
        check_name(name)
        self._ledger.clients.refuse_taken(name)
        relay = None if via is None else self._relay(via, role)
        ticket = Ticket.new(
            relay.curve if relay else self.federation.keys.public.curve,
            self.federation.id,
            (relay.address,) if relay else addresses,
            lasts_s,
            via=relay is not None,
            relay=role is Role.RELAY,
        )
        guest = ticket.guest_keys().public
        with self._ledger.transaction():
            older = [ticket.curve for ticket in self._ledger.tickets.named(name)]
            self._ledger.tickets.withdraw(name)
            self._ledger.tickets.add(
                name,
                curve=guest.curve,
                signing=guest.signing,
                expires_at=float(ticket.expires),
                role=role,
                via=relay.client_id if relay else None,
            )
            self._ledger.audit.add(actor, "enrol", name)
        for curve in older:
            self.allow_list.explain(curve)
        self.allow_list.invite(guest.curve, lasts_s)
        if relay:
            self.changed(relay.client_id)
        return ticket

    def _relay(self, name: str, role: Role) -> ledger_rows.ClientRow:
        """Return the relay that a new member can connect to."""
        row = self.named(name)
        problem = ""
        if row.role is not Role.RELAY or not self._carries(row):
            problem = f"{row.name!r} is not a relay, or no longer is one"
        elif not row.address:
            problem = f"the relay {row.name!r} has never connected, so its address is not known"
        elif any(self._is_full(one) for one in self._relays_from(row.client_id)):
            problem = (
                f"the relay {row.name!r}, or one that it is behind, has {MAX_BEHIND} members, as "
                "many as it can"
            )
        elif role is Role.RELAY and len(self.relays_of(row.client_id)) >= MAX_RELAYS_BEHIND:
            problem = f"{row.name!r} has {MAX_RELAYS_BEHIND} relays behind it, as many as it can"
        elif role is Role.RELAY and self.relays_in_row(row.client_id) >= MOST_RELAYS:
            problem = (
                f"{row.name!r} is the last of {MOST_RELAYS} relays in a row, the most there are"
            )
        if problem:
            raise UsageError(
                f"{problem}.",
                action="Make one with `fcil-server enrol RELAY --relay`, start it with "
                "`fcil-server relay`, then enrol its clients.",
            )
        return row

    def redeem(self, ticket: ledger_rows.TicketRow, keys: PublicKeys, device: str) -> ClientId:
        """Make the bearer of a ticket a member; repeat the answer for the same keys.

        Raises:
            TicketUsed, TicketExpired, BadTicket: the ticket is no longer good.
            UsageError: the name was given to another client meanwhile.
        """
        if ticket.client is not None:
            row = self._ledger.clients.get(ticket.client)
            if row is not None and row.curve == keys.curve and row.signing == keys.signing:
                return row.client_id  # the first answer was lost
        check_ticket(ticket, self._ledger.now)
        with self._ledger.transaction():
            client = self._add(ticket.name, keys, device, role=ticket.role, via=ticket.via)
            self._ledger.tickets.use(ticket.curve, client)
            self._ledger.audit.add(f"ticket of {ticket.name}", "enrolled", client)
        self.allow_list.admit(keys.curve)
        self.allow_list.used(ticket.curve)
        if ticket.via is not None:
            self.changed(ticket.via)
        return client

    def enrol_local(self, name: str, keys: PublicKeys, actor: str) -> ClientId:
        """Make a client of this machine and user a member; known keys keep their client.

        The caller syncs the ledger before it answers.
        """
        known = self._ledger.clients.by_curve(keys.curve)
        if known is not None and known.may_join(self._ledger.now):
            return known.client_id
        if known is not None:
            raise refusal(known, self._ledger.now)
        with self._ledger.transaction(waits=False):
            client = self._add(self._ledger.clients.free_name(name), keys, "")
            self._ledger.audit.add(actor, "enrol_local", client)
        self.allow_list.admit(keys.curve)
        return client

    def rotate(self, row: ledger_rows.ClientRow, message: Rotate) -> PublicKeys:
        """Adopt a member's new keys; the old ones become invalid.

        Raises:
            BadSignature, WireError: the new keys do not prove themselves, or are no keys.
            UsageError: they are another client's.
            Revoked, MembershipExpired: it is no longer a member.
        """
        if not row.may_join(self._ledger.now):
            raise refusal(row, self._ledger.now)
        keys = PublicKeys.from_fields(
            {"curve": message.curve, "signing": message.signing, "sealing": message.sealing}
        )
        verify_signature(keys.signing, PROOF, proof_text(row.curve, keys), message.proof)
        holder = self._ledger.clients.by_curve(keys.curve)
        if holder is not None and holder.client_id != row.client_id:
            raise UsageError("these keys belong to another client.", action="Generate new ones.")
        if keys == row.public_keys:
            return keys  # sent again, since the answer was lost
        with self._ledger.transaction():
            self._ledger.clients.replace_keys(row.client_id, keys)
            self._ledger.audit.add(row.name, "rotate_keys", keys.fingerprint)
        self.allow_list.admit(keys.curve)
        self.allow_list.forget(row.curve)
        return keys

    def _add(
        self,
        name: str,
        keys: PublicKeys,
        device: str,
        *,
        role: Role = Role.CLIENT,
        via: ClientId | None = None,
    ) -> ClientId:
        client = self._new_id(name)
        self._ledger.clients.add(
            client,
            name,
            curve=keys.curve,
            signing=keys.signing,
            sealing=keys.sealing,
            device=device,
            role=role,
            via=via,
        )
        return client

    def _new_id(self, name: str) -> ClientId:
        """Return an unused id, random or derived from the name."""
        if self.named_ids:
            for words in (name.rpartition(":")[2], name):  # the first is without the machine's name
                if self._ledger.clients.get(named_client_id(words)) is None:
                    return named_client_id(words)
        return new_client_id()

    # --- members behind a relay -------------------------------------------------------------

    def lists(self, relay: ClientId) -> tuple[list[bytes], list[bytes], int]:
        """Return the CURVE keys of members and guests that a relay admits: only its own.

        The guests with open tickets come last; the number is how many those are.
        """
        now = self._ledger.now
        members, former, newcomers = list[bytes](), list[bytes](), list[bytes]()
        for ticket in self._ledger.tickets.via(relay):
            (newcomers if ticket.open_s(now) else former).append(ticket.curve)
        for row in self._ledger.clients.via(relay):
            if row.curve:
                (members if row.may_join(now) else former).append(row.curve)
        guests = (former + newcomers)[-MAX_GUESTS_BEHIND:]
        return members[:MAX_BEHIND], guests, min(len(newcomers), len(guests))

    def relays_of(self, relay: ClientId) -> list[bytes]:
        """Return the CURVE keys of the relays that connect through this one."""
        rows, now = self._ledger.clients.via(relay), self._ledger.now
        relays = (row for row in rows if row.role is Role.RELAY and row.may_join(now))
        return [row.curve for row in relays if row.curve][:MAX_RELAYS_BEHIND]

    def _relays_from(self, relay: ClientId) -> list[ledger_rows.ClientRow]:
        """Return a relay and those that it is behind, the outermost last."""
        row = self._ledger.clients.get(relay)
        if row is None:
            return []
        return [row, *(self._relays_from(row.via) if row.via is not None else ())]

    def relays_in_row(self, relay: ClientId) -> int:
        """Return the number of relays between the server and the clients of this one."""
        return len(self._relays_from(relay))

    def _carries(self, relay: ledger_rows.ClientRow) -> bool:
        """Return True if a relay, and each that it is behind, is a member now."""
        return all(row.may_join(self._ledger.now) for row in self._relays_from(relay.client_id))

    def _is_full(self, relay: ledger_rows.ClientRow) -> bool:
        return len(self._ledger.clients.behind(relay.client_id)) >= MAX_BEHIND

    def is_behind(self, key: bytes, relay: ClientId) -> bool:
        """Return True if a client, or a ticket's holder, may connect through this relay."""
        row = self._ledger.clients.by_curve(key)
        ticket = self._ledger.tickets.get(key) if row is None else None
        via = row.via if row else ticket.via if ticket else None
        return via == relay

    # --- limits of connections --------------------------------------------------------------

    def allow(self, key: bytes) -> int:
        """Return a connection's limit of unread bytes; a relay's is for all clients behind it."""
        row = self._ledger.clients.by_curve(key)
        relays = row is not None and row.role is Role.RELAY and self.allow_list.is_member(key)
        if row is None or not relays:
            return self.allow_list.allow(key)
        behind = MIN_WINDOW_BYTES * len(self._ledger.clients.behind(row.client_id))
        return self.allow_list.allow(key) + max(TOTAL_BYTES, behind)

    def who(self, key: bytes) -> str:
        """Return the name of a CURVE key's holder for a note; no key: it never spoke."""
        row = self._ledger.clients.by_curve(key) if key else None
        if row is not None and row.name:
            return row.name
        return "a ticket holder or a former member" if key else "a peer that sent nothing"

    # --- end of membership ------------------------------------------------------------------

    def revoke(
        self, row: ledger_rows.ClientRow, why: str, actor: str, *, keep: bool = False
    ) -> list[str]:
        """Take a client off the allow-list. Its key still gets the reason, nothing else.

        The open tickets that lead through it, a relay, are withdrawn.

        Args:
            row: the client.
            why: the reason in the message to it; empty: the usual one.
            actor: the caller, for the audit log.
            keep: its update to the open round is aggregated; else it is excluded.

        Returns:
            The names on these tickets.
        """
        why = why[:MAX_WHY] or REVOKED
        self._withdraw(row.name)  # first: repeated after a fault, the revocation finds the name
        with self._ledger.transaction():
            if not keep:
                self._leave_out(row.client_id)
            self._ledger.clients.revoke(row.client_id, why)
            self._ledger.audit.add(actor, "revoke", f"{row.name}: {why}")
            tickets = self._withdraw_via(row.client_id, actor)
        for curve in (row.curve, *(ticket.curve for ticket in tickets)):
            if curve:
                self.allow_list.explain(curve)
        self._end_at_relays(row)
        return [ticket.name for ticket in tickets]

    def behind(self, row: ledger_rows.ClientRow) -> list[str]:
        """Return the names of the members that can connect only through this one, a relay."""
        return [c.name for c in self._ledger.clients.behind(row.client_id)]

    def suspend(self, row: ledger_rows.ClientRow) -> None:
        """Admit a member only occasionally, as a former one, until `readmit`."""
        if row.curve:
            self.allow_list.explain(row.curve)

    def readmit(self, row: ledger_rows.ClientRow) -> None:
        """Admit a barred member again, if it still is a member."""
        if row.curve and row.may_join(self._ledger.now):
            self.allow_list.admit(row.curve)

    def _leave_out(self, client: ClientId) -> None:
        run = self._ledger.runs.newest()
        row = self._ledger.rounds.current(run.run_id) if run else None
        update = self._ledger.updates.get(row.key, client) if row else None
        if row is not None and update is not None and update.status is UpdateStatus.ACCEPTED:
            self._ledger.updates.exclude(row.key, client, WITHDRAWN)

    def withdraw(self, name: str, actor: str) -> bool:
        """Withdraw the open tickets for a name that no client has; return True if any were."""
        if self._ledger.clients.by_name(name) is not None or not self._withdraw(name):
            return False
        self._ledger.audit.add(actor, "withdraw", name)
        return True

    def _withdraw(self, name: str) -> bool:
        """Withdraw the open tickets for a name, also at relays; return True if there were any."""
        tickets = self._ledger.tickets.named(name)
        if not self._ledger.tickets.withdraw(name):
            return False
        for ticket in tickets:
            self.allow_list.explain(ticket.curve)
        for relay in {t.via for t in tickets if t.via is not None}:
            self.changed(relay)
        return True

    def _withdraw_via(self, relay: ClientId, actor: str) -> list[ledger_rows.TicketRow]:
        """Withdraw the open tickets that lead through a relay, also an inner one; return them."""
        now = self._ledger.now
        tickets = [t for t in self._ledger.tickets.via(relay) if t.open_s(now)]
        for ticket in tickets:
            self._ledger.tickets.withdraw(ticket.name)
            self._ledger.audit.add(actor, "withdraw", ticket.name)
        for row in self._ledger.clients.via(relay):
            if row.role is Role.RELAY:
                tickets += self._withdraw_via(row.client_id, actor)
        return tickets

    def _end_at_relays(self, row: ledger_rows.ClientRow) -> None:
        """Tell the relay that a former member is behind; if it is a relay itself, it is cut."""
        if row.via is not None:
            self.changed(row.via)
        self.changed(row.client_id)

    def erase(self, row: ledger_rows.ClientRow, actor: str) -> ledger_rows.Erased:
        """Take a client off the list and remove its name, keys and tests from the ledger.

        Its key gets no reason any more; the audit log gets only its id.
        """
        with self._ledger.transaction():
            self._leave_out(row.client_id)
            erased = self._ledger.clients.erase(row.client_id)
            self._ledger.audit.add(actor, "erase", row.client_id)
            tickets = self._withdraw_via(row.client_id, actor)
        self.allow_list.forget(row.curve)
        for ticket in tickets:
            self.allow_list.explain(ticket.curve)
        self._end_at_relays(row)
        return erased

    def named(self, name: str, *, exact: bool = False) -> ledger_rows.ClientRow:
        """Return the member with this name, or id (`named`)."""
        return named(self._ledger, name, exact=exact)


def named(ledger: Ledger, name: str, *, exact: bool = False) -> ledger_rows.ClientRow:
    """Return the member with this name, or with this beginning of its id.

    Args:
        ledger: the federation's.
        name: the name, or four characters of the id or more.
        exact: the complete id is wanted: a program does not see which client it means by a part.

    Raises:
        UsageError: none or several.
    """
    row = ledger.clients.by_name(name)
    if row is not None:
        return row
    part = not exact and len(name) >= 4
    rows = [
        r
        for r in ledger.clients.all()
        if r.client_id == name or (part and r.client_id.startswith(name))
    ]
    if not rows:
        raise _absence(ledger, name)
    if len(rows) > 1:
        raise UsageError(f"more than one client is called {name[:80]!r}.", action=_LIST)
    return rows[0]


def _absence(ledger: Ledger, name: str) -> UsageError:
    """Return why there is no member with a name: it left, has not joined yet, or was never one."""
    for ticket in ledger.tickets.named(name):
        if ticket.open_s(ledger.now):
            role = ticket.role.value
            return UsageError(
                f"the {role} {name!r} has an open ticket and has not joined yet.",
                action=f"Start the {role} first, with its ticket.",
            )
    former = [row for row in ledger.clients.all() if row.name == name]
    if former:
        last = max(former, key=lambda row: row.revoked_at or 0.0)
        how = "left" if former_client_state(last) == "left" else "was revoked"
        when = minute(last.revoked_at)
        return UsageError(
            f"no member is called {name[:80]!r} any more: it {how} on {when}.", action=_LIST
        )
    return UsageError(f"no client is called {name[:80]!r}.", action=_LIST)


def ever_named(ledger: Ledger, name: str, *, exact: bool = False) -> ledger_rows.ClientRow:
    """Return the client with this name, even if its membership is over (`named`).

    Raises:
        UsageError: none or several.
    """
    if ledger.clients.by_name(name) is None:
        former = [r for r in ledger.clients.all() if r.name == name]
        if len(former) == 1:
            return former[0]
        if former:
            ids = ", ".join(r.client_id[:8] for r in former)
            raise UsageError(
                f"{len(former)} former members were called {name[:80]!r}: {ids}.",
                action="Name one by the first characters of its id.",
            )
    return named(ledger, name, exact=exact)


def check_name(name: Any) -> str:
    """Return a client's name if it is valid.

    Raises:
        UsageError: it is empty, too long, or not printable.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isprintable():
        raise UsageError(
            f"a client's name has 1 to 128 printable characters, got {ascii(name)[:80]}.",
            action="Choose a name such as camera-3.",
        )
    return name
