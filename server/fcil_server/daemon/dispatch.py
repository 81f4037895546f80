"""Dispatch of clients' messages from the link to the parts of the server.

This module parses and checks incoming frames and passes them to guests, sessions, intake, publisher
or coordinator. Every failure of a message becomes a Nack and a row in the ledger, never a traceback
to a peer and never the end of the server.
"""

from __future__ import annotations

import contextlib

from fcil_protocol.errors import (
    BadSignature,
    FcilError,
    InternalError,
    NotNow,
    WireError,
    as_fcil_error,
)
from fcil_protocol.link.zmq_link import MEMBER_BYTES, Incoming
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    LEFT,
    Bye,
    Chunk,
    Decline,
    Enrol,
    Fetched,
    Hello,
    Message,
    Progress,
    Release,
    Rotate,
    Update,
    Want,
    nack_of,
)
from fcil_server.daemon.context import ServerContext
from fcil_server.daemon.cut_offs import CutOffs
from fcil_server.daemon.sessions import ClientSessions
from fcil_server.event_loop import Yielder
from fcil_server.sessions import handshake
from fcil_server.sessions.guests import Guests
from fcil_server.sessions.inbox import Inbox
from fcil_server.sessions.intake_pool.pool import PassedOn
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import ReceivedUpdate

MOST_ATTEMPTS = 4  # at a part, of which a client reports bytes
MOST_REPORTED = 64  # parts of a session of which these bytes are remembered
MOST_STRAYS = 4  # a member's connections that were refused and have no session


class Dispatch:
    """Receives messages and hands each to its part of the server.

    Args:
        context: the server.
        sessions: of members.
        guests: connections that are not (yet) members'.
        cut_offs: cuts members off for too many refusals.
    """

    def __init__(
        self, context: ServerContext, sessions: ClientSessions, guests: Guests, cut_offs: CutOffs
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._guests = guests
        self._cut_offs = cut_offs
        self._strays: dict[bytes, list[int]] = {}  # a member's key -> connections without a session
        self._credit = context.config.wire.credit
        self._inbox = Inbox(
            context.intake,
            alive=lambda peer: peer is context.peers.by_conn(peer.conn) or peer.sums,
            refuse=self._turn_down,
            cut=sessions.overrun,
            most_bytes=MEMBER_BYTES + self._credit,
        )

    async def receive(self) -> None:
        """Take one message after the other, until cancelled."""
        yielder = Yielder()
        while True:
            await yielder.yield_if_long()
            await self._context.intake.has_room()
            incoming = await self._context.link.recv()
            try:
                self._take(incoming)
            except Exception as error:  # for our defects, the peer gets a code, the log the details
                self._refuse(incoming, as_fcil_error(error))

    def _take(self, incoming: Incoming) -> None:
        guests, context = self._guests, self._context
        if not incoming.frames:
            self._departed(incoming.conn)
            return
        if isinstance(incoming, PassedOn) and incoming.update is not None:
            self._take_update(incoming, incoming.update)
            return
        if guests.was_answered(incoming):
            return
        guests.check_size(incoming)
        received = parse(incoming.frames, to_server=True)
        if isinstance(received.message, Hello):
            if not guests.explain(incoming, received, received.message):
                self._sessions.begin(incoming, received, received.message)
            return
        if isinstance(received.message, Enrol):
            guests.enrol(incoming, received, received.message)
            return
        peer = context.peers.by_conn(incoming.conn)
        if peer is None:
            raise WireError("a session begins with a Hello.")
        if isinstance(incoming, PassedOn):
            peer.channel.note_heard(incoming.heard)
        message = peer.channel.check(received)
        context.byte_meter.received(peer.client, message, incoming.frames)
        digest = getattr(message, "digest", "")
        try:
            self._handle(peer, received, message)
        except FcilError as error:
            self._turn_down(peer, digest, error)

    def _take_update(self, incoming: PassedOn, digest: str) -> None:
        """Take an update, or the fault of one, that an intake process has received."""
        peer = self._context.peers.by_conn(incoming.conn)
        if peer is None:
            return  # its session has ended, and it offers the update again in the next
        if incoming.chunks is not None:
            update = ReceivedUpdate(digest, incoming.frames)
            self._context.intake.keep_partial(peer, update, incoming.chunks)
            if incoming.goes_on:
                self._inbox.put(peer, Received(Update(digest=digest), b"", b"", update.blobs[:3]))
        elif incoming.fault is None:
            self._inbox.put(peer, ReceivedUpdate(digest, incoming.frames))
        elif digest:
            self._turn_down(peer, digest, incoming.fault)
        else:  # its chunk is requested again
            self._sessions.count_refusal(peer, incoming.fault)

    def _turn_down(self, peer: Peer, digest: str, error: FcilError) -> None:
        self._sessions.count_refusal(peer, error)
        self._context.intake.forget(peer, digest)
        self._sessions.send(peer, nack_of(error, digest))

    def _handle(self, peer: Peer, received: Received, message: Message) -> None:
        match message:
            case Update() | Chunk():
                self._inbox.put(peer, received)
            case Want():
                self._context.run.publisher.serve(peer, message, self._credit)
            case Fetched():
                self._fetched(peer, message)
            case Decline():
                self._decline(peer, message)
            case Progress():
                peer.progress = (self._phase(message), message.done, message.total)
                peer.paused = message.paused
            case Rotate():
                self._sessions.rotate(peer, message)
            case Bye(code=code) if code == LEFT:
                self._sessions.leave(peer)
            case Bye():
                if message.code:
                    self._sessions.turn_away(peer, handshake.leaving(message))
                self._departed(peer.conn)
            case _:
                raise WireError(f"a client does not send {message.type}.")

    def take_sum(self, peer: Peer, received: Received, message: Update | Chunk | Release) -> None:
        """Handle a relay's sum of updates, or those that it does not add up."""
        try:
            if isinstance(message, Release):
                self._context.intake.release(message.digests)
            else:
                self._inbox.put(peer, received)
        except FcilError as error:
            self._turn_down(peer, "", error)

    def _fetched(self, peer: Peer, message: Fetched) -> None:
        """Count what a client says it has fetched elsewhere, as far as that is possible.

        It is never refused: the part may be an earlier one by now, and the client has it anyway.
        """
        self._cut_offs.count_needless(peer.client)  # one for each large part; not hundreds
        sealed = self._context.run.publisher.public_size(message.digest)
        told = peer.fetched.get(message.digest, 0)
        size = min(message.size, max(0, MOST_ATTEMPTS * sealed - told))
        if size:
            peer.fetched[message.digest] = told + size
            if len(peer.fetched) > MOST_REPORTED:
                del peer.fetched[next(iter(peer.fetched))]
            self._context.byte_meter.fetched(peer.client, size)

    def _phase(self, message: Progress) -> str:
        """Return the phase of a client's work, and its round if that is an earlier one."""
        coordinator = self._context.run.coordinator
        current = coordinator.progress.key(coordinator.context.run)
        earlier = current is not None and message.key.precedes(current)
        return f"round {message.round}: {message.phase}" if earlier else message.phase

    def _decline(self, peer: Peer, message: Decline) -> None:
        coordinator = self._context.run.coordinator
        text = f"{peer.name}: {message.reason}"
        self._context.journal.note("info", "declined", text, peer.client)
        if message.run == coordinator.context.run:
            peer.resting = message.reason == NotNow.code
        if not coordinator.on_client_declined(peer.client, message.key, message.reason):
            self._cut_offs.count_needless(peer.client)

    def _limit_strays(self, incoming: Incoming) -> None:
        """Cut the oldest of a member's connections without a session when there are too many."""
        context = self._context
        if not context.roster.allow_list.is_member(incoming.key):
            return
        strays = [c for c in self._strays.get(incoming.key, ()) if c != incoming.conn]
        strays = [c for c in (*strays, incoming.conn) if context.peers.by_conn(c) is None]
        for conn in strays[:-MOST_STRAYS]:
            context.link.cut(conn)
        self._strays[incoming.key] = strays[-MOST_STRAYS:]

    def _departed(self, conn: int) -> None:
        self._guests.departed(conn)
        self._sessions.end(conn)

    def _refuse(self, incoming: Incoming, error: FcilError) -> None:
        """Answer a message that belongs to no session; the connection of a guest ends with it."""
        self._sessions.refuse(incoming, error)
        with contextlib.suppress(FcilError):  # a ledger that cannot be read
            self._guests.answer_unreadable(incoming, error)
        self._guests.cut_after_answer(incoming)
        self._limit_strays(incoming)
        if isinstance(error, InternalError | BadSignature):
            origin, who = incoming.key.hex(), "a client"
            with contextlib.suppress(FcilError):
                who = self._context.roster.who(incoming.key)
            self._context.journal.note(
                "error", error.code, f"{who}: {error.message}", origin=origin
            )
