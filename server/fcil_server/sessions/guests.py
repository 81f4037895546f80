"""Enrolment of guests: a ticket's holder sends Enrol, gets one answer and is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fcil_protocol.errors import BadSignature, BadTicket, FcilError, TooLarge, UnknownClient
from fcil_protocol.link.zmq_link import Incoming
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Enrol, Enrolled, Hello, Message, nack_of
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, verify_signature
from fcil_protocol.trust.ticket import PROOF, proof_text
from fcil_server.federation.allow_list import MAX_GUEST_BYTES
from fcil_server.federation.eligibility import check_ticket
from fcil_server.federation.roster import Roster
from fcil_server.ledger.rows import TicketRow

MAX_FORMER_BYTES = 160 << 10  # for a former member: a Hello with the features of a large backbone
SHOWN_OUT_S = 5.0  # for the answer to arrive before the connection is cut


@dataclass
class Guests:
    """Answers connections that are not (yet) members'.

    Args:
        roster: the roster that tickets add members to.
        keys: the server's.
        send: queues frames to a route. cut: ends a connection.
        addresses: returns the server's addresses for a new member.
        notify: takes a note for the operator: level, code, text, and the key that caused it
            (``origin``).
    """

    roster: Roster
    keys: PrivateKeys
    send: Callable[[bytes, Sequence[bytes]], bool]
    cut: Callable[[int], None]
    addresses: Callable[[], list[str]]
    notify: Callable[..., None]
    _answered: set[int] = field(default_factory=set)  # connections of guests on their way out

    def was_answered(self, incoming: Incoming) -> bool:
        """Return True if a connection is an answered guest's, about to be cut."""
        return incoming.conn in self._answered

    def departed(self, conn: int) -> None:
        """Forget a connection that ended."""
        self._answered.discard(conn)

    def check_size(self, incoming: Incoming) -> None:
        """Refuse messages that are too long for a connection that is not a member's.

        Raises:
            TooLarge: with both sizes.
        """
        size = sum(len(frame) for frame in incoming.frames)
        if size <= MAX_GUEST_BYTES or self.roster.allow_list.is_member(incoming.key):
            return
        # A client that was just removed sends a complete Hello, and must get the reason.
        former = self.roster.federation.ledger.clients.by_curve(incoming.key) is not None
        if size > MAX_FORMER_BYTES or not former:
            self.cut(incoming.conn)
            raise TooLarge(f"a guest's message of {size} bytes exceeds {MAX_GUEST_BYTES}.")

    def cut_after_answer(self, incoming: Incoming) -> None:
        """End a guest's connection once the answer had time to arrive; members stay."""
        if not self.roster.allow_list.is_member(incoming.key):
            self._cut_later(incoming)

    def dismiss(self, conn: int) -> None:
        """Ignore further messages of a connection that another component will cut."""
        self._answered.add(conn)

    def _cut_later(self, incoming: Incoming) -> None:
        self.dismiss(incoming.conn)
        asyncio.get_running_loop().call_later(SHOWN_OUT_S, self.cut, incoming.conn)

    def enrol(self, incoming: Incoming, received: Received, message: Enrol) -> None:
        """Enrol a ticket's holder, or answer with the reason for the refusal."""
        ticket = self.roster.federation.ledger.tickets.get(incoming.key)
        if ticket is None:  # a member or a former one; the gate admits no other key
            raise BadTicket("this connection was not made with a ticket.")
        channel = Channel(self.keys, _guest(ticket))
        channel.peer_nonce = message.nonce
        answer: Message
        try:
            channel.check(received)
            answer = self._enrolled(ticket, message)
        except FcilError as error:
            text = f"the ticket of {ticket.name}: {error.message}"
            self.notify("warning", error.code, text, origin=incoming.key.hex())
            answer = nack_of(error)
        self.send(incoming.route, channel.frames(answer))
        # Its key remains a guest's: the member comes back with keys of its own.
        self._cut_later(incoming)

    def answer_unreadable(self, incoming: Incoming, error: FcilError) -> None:
        """Tell a ticket's holder, and the operator, why its message was not understood.

        The answer carries no nonce: what it would answer was not read.
        """
        member = self.roster.allow_list.is_member(incoming.key)
        ticket = None if member else self.roster.federation.ledger.tickets.get(incoming.key)
        if ticket is not None:
            text = f"the ticket of {ticket.name}: {error.message}"
            self.notify("warning", error.code, text, origin=incoming.key.hex())
            channel = Channel(self.keys, _guest(ticket))
            self.send(incoming.route, channel.frames(nack_of(error)))

    def explain(self, incoming: Incoming, received: Received, message: Hello) -> bool:
        """Tell a ticket's holder that sends Hello the state of its ticket, which stays unused.

        Returns False for any other key: a former member gets its reason elsewhere.
        """
        ledger = self.roster.federation.ledger
        member = self.roster.allow_list.is_member(incoming.key)
        ticket = None if member else ledger.tickets.get(incoming.key)
        if ticket is None:
            return False
        channel = Channel(self.keys, _guest(ticket))
        channel.peer_nonce = message.nonce
        try:
            channel.check(received)
            check_ticket(ticket, ledger.now)
            raise UnknownClient("this ticket has not been used yet.")
        except FcilError as error:
            self.send(incoming.route, channel.frames(nack_of(error)))
        self._cut_later(incoming)
        return True

    def _enrolled(self, ticket: TicketRow, message: Enrol) -> Enrolled:
        keys = PublicKeys.from_fields(
            {"curve": message.curve, "signing": message.signing, "sealing": message.sealing}
        )
        try:
            verify_signature(keys.signing, PROOF, proof_text(ticket.curve, keys), message.proof)
        except BadSignature as error:
            raise BadSignature(
                "the new keys are not those of the client that asks to be enrolled.",
                action="Remove the client's directory and join again with the ticket.",
            ) from error
        client = self.roster.redeem(ticket, keys, message.device)
        row = self.roster.federation.ledger.clients.get(client)
        assert row is not None, "it was just enrolled"
        if ticket.client is None:  # else the first answer is repeated
            said = f"{row.name} enrolled with its ticket ({message.device})"
            self.notify("info", "enrolled", said)
        return Enrolled(
            client=client,
            name=row.name,
            certificate=self.roster.federation.certificate.to_bytes(),
            addresses=self.addresses(),
        )


def _guest(ticket: TicketRow) -> PublicKeys:
    # Nothing is ever sealed for a guest, so its third key is not kept.
    return PublicKeys(curve=ticket.curve, signing=ticket.signing, sealing=b"")
