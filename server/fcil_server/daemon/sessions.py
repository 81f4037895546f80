"""Clients' sessions: their beginning, their replacement by newer ones, their messages, their end.

A session begins with a Hello and is bound to its connection. `Peers` lists the live ones.
"""

from __future__ import annotations

import asyncio
import contextlib

from fcil_protocol.errors import FcilError, InternalError, NotYet, StorageError, TooLarge
from fcil_protocol.link.zmq_link import Incoming
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    NEXT_RUN,
    Ack,
    Bye,
    Hello,
    Message,
    Parts,
    Rotate,
    nack_of,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.ticket import keys_digest
from fcil_server.daemon.context import ServerContext
from fcil_server.daemon.cut_offs import A_ROTATION, CutOffs
from fcil_server.event_loop import Yielder
from fcil_server.federation.eligibility import LEFT_BY_ITSELF, REVOKED
from fcil_server.ledger.rows import ClientRow
from fcil_server.sessions import handshake
from fcil_server.sessions.peers import GOODBYE_S, Peer


class ClientSessions:
    """Begins and ends sessions, and sends in them.

    Args:
        context: the server whose clients they are.
        cut_offs: cuts clients off for too many refusals.
    """

    def __init__(self, context: ServerContext, cut_offs: CutOffs) -> None:
        self._context = context
        self._cut_offs = cut_offs
        self._connections: set[int] = set()  # those that have sent a Hello

    # --- beginning --------------------------------------------------------------------------

    def begin(self, incoming: Incoming, received: Received, hello: Hello) -> None:
        """Begin the session that a Hello asks for, or send the reason why it cannot take part.

        Raises:
            TrustError, WireError: it belongs to no session (see
                `sessions.handshake.begin_session`).
        """
        context = self._context
        peer = handshake.begin_session(
            context.ledger, context.federation.keys, incoming, received, hello
        )
        if context.peers.is_left_behind(peer):
            context.link.cut(peer.conn)  # the network kept its messages while a newer one was made
            return
        self._cut_offs.count_needless(peer.client)  # a few Hellos are needed; hundreds are not
        self._cut_offs.refuse(peer.client)
        self._note_connection(incoming, peer)
        context.byte_meter.received(peer.client, hello, incoming.frames)
        context.ledger.clients.mark_seen(peer.client, device=hello.device)
        try:
            peer.ready = handshake.check(context.run.terms, hello)
        except FcilError as error:
            self.turn_away(peer, error)
            self.send(peer, nack_of(error))
            return
        if peer.ready and hello.backbone is not None:
            peer.agreement = handshake.feature_distance(context.run.terms, hello.backbone)
            how = f"error {peer.agreement:.1e}, {hello.device}"
            text = f"{peer.name} computes the same features ({how})"
            context.journal.note("info", "features", text, peer.client)
        self._replace(peer)
        self._welcome(peer)

    def _note_connection(self, incoming: Incoming, peer: Peer) -> None:
        """Count and report a connection once, however many Hellos come over it."""
        if incoming.conn in self._connections:
            return
        self._connections.add(incoming.conn)
        if not incoming.relayed:
            self._context.byte_meter.connected(peer.client, incoming.conn)
        text = f"{peer.name} connected ({peer.device})"
        self._context.journal.note("info", "connected", text, peer.client)

    def _replace(self, peer: Peer) -> None:
        old = self._context.peers.add(peer)
        if old is not None:
            text = (
                f"{peer.name} connected again before its older connection was gone; the newer one "
                "stays. If the older was another device, its files were copied: enrol it again."
            )
            self._context.journal.note("warning", "two_links", text, peer.client)
            self.send(old, Bye(code="two_links", reason=text))
            asyncio.get_running_loop().call_later(GOODBYE_S, self._context.link.cut, old.conn)

    def _welcome(self, peer: Peer) -> None:
        context = self._context
        verdict = context.run.coordinator.verdict(peer.client)
        peer.promoted = context.run.promotion.number
        answer = handshake.welcome(
            context.run.terms,
            nonce=peer.channel.nonce,
            ready=peer.ready,
            verdict=verdict,
            clients=len(context.peers),
            clock_s=context.ledger.now,
            promoted=peer.promoted,
            session_key=peer.channel.session_key if peer.channel.agreed else None,
            relay=context.link.summing_relay(peer.conn),
        )
        self.send(peer, answer)
        pool = context.intake_pool
        if pool is not None and peer.ready and peer.channel.agreed and not peer.relayed:
            pool.hand_over(peer.conn, peer.channel, peer.keys)

    # --- sending ----------------------------------------------------------------------------

    def send(self, peer: Peer, message: Message, *blobs: bytes) -> bool:
        """Send one message; False if the client is gone (its session ends on its own)."""
        frames = peer.channel.frames(message, *blobs)
        if not self._context.link.send(peer.route, frames):
            return False
        tensor = 0
        if isinstance(message, Parts):
            tensor = self._context.run.publisher.tensor_bytes(message.digest)
        self._context.byte_meter.sent(peer.client, message, frames, tensor=tensor)
        return True

    def refuse(self, incoming: Incoming, error: FcilError) -> None:
        """Answer a message that belongs to no session, as far as possible."""
        context, row = self._context, None
        with contextlib.suppress(FcilError):
            row = context.ledger.clients.by_curve(incoming.key)
        context.journal.refusal(row.client_id if row else None, error)
        whose = row.client_id if row else context.link.carrier(incoming.conn)
        if whose is not None:
            self._cut_offs.count_needless(whose)
        peer = context.peers.by_conn(incoming.conn)
        greeting = None if row is None else self._greeting(incoming, row)
        if greeting is None and peer is not None:
            self.send(peer, nack_of(error))
        elif row is not None and incoming.frames:
            channel = greeting or Channel(context.federation.keys, row.public_keys)
            context.link.send(incoming.route, channel.frames(nack_of(error)))

    def _greeting(self, incoming: Incoming, row: ClientRow) -> Channel | None:
        """Return the channel of a Hello's answer; None: it is no Hello of this client.

        Its sender has begun a new session, even on a connection that had one. Only what it signed
        counts: a relay could name the nonce of another session.
        """
        channel = Channel(self._context.federation.keys, row.public_keys)
        with contextlib.suppress(FcilError):
            received = parse(incoming.frames, to_server=True)
            if isinstance(received.message, Hello):
                channel.peer_nonce = channel.check(received).nonce
                return channel
        return None

    def turn_away(self, peer: Peer, error: FcilError) -> None:
        """Remember that a client cannot take part as it is, with the reason."""
        self.count_refusal(peer, error)
        self._context.peers.refused[peer.client] = error.message

    def count_refusal(self, peer: Peer, error: FcilError) -> None:
        """Record and report the refusal of a client's message.

        An update that no round takes yet is none: its client offers it again.
        """
        if not isinstance(error, NotYet):
            self._context.journal.refusal(peer.client, error)
            text = f"{peer.name}: {error.message}"
            self._context.journal.note("warning", error.code, text, peer.client, heard=True)
        if not isinstance(error, (InternalError, StorageError)):  # those are the server's faults
            self._cut_offs.count_needless(peer.client)

    def overrun(self, peer: Peer) -> None:
        """Cut a client with too many waiting uploads, and report it."""
        self.count_refusal(peer, TooLarge("too many of its uploads were waiting to be opened."))
        self.cut(peer)

    # --- changes of membership --------------------------------------------------------------

    def rotate(self, peer: Peer, message: Rotate) -> None:
        """Adopt a member's new keys, and answer before connections with the old ones are cut.

        Raises:
            BadSignature, WireError, UsageError: see `Roster.rotate`.
        """
        row = self._row(peer)
        keys = self._context.roster.rotate(row, message)
        self._context.journal.note("info", "rotated", f"{peer.name} has new keys", peer.client)
        self.send(peer, Ack(digest=keys_digest(keys)))
        # Not before: a member that is cut off for it is so with its new keys.
        self._cut_offs.count_needless(peer.client, A_ROTATION)
        if row.via is not None:  # after the answer: the relay cuts connections with an old key
            self._context.roster.changed(row.via)

    def leave(self, peer: Peer) -> None:
        """End the membership of a member that leaves."""
        self.revoke(self._row(peer), keep=True, actor=peer.name, why=LEFT_BY_ITSELF)

    def revoke(self, row: ClientRow, *, keep: bool, actor: str, why: str = "") -> list[str]:
        """Take a client off the list (`Roster.revoke`) and end its connection.

        Returns:
            The names on the open tickets that were withdrawn with it.
        """
        context = self._context
        tickets = context.roster.revoke(row, why, actor, keep=keep)
        context.run.coordinator.on_client_revoked(row.client_id)
        peer = context.peers.by_client(row.client_id)
        if peer is not None:  # it comes back as a guest and gets the reason
            context.link.cut(peer.conn)
        text = f"{row.name} was removed from the allow list: {why or REVOKED}"
        context.journal.note("warning", "revoked", text, row.client_id)
        return tickets

    def _row(self, peer: Peer) -> ClientRow:
        row = self._context.ledger.clients.get(peer.client)
        assert row is not None, "it has a session"
        return row

    # --- ending -----------------------------------------------------------------------------

    def end(self, conn: int) -> None:
        """End the session of a closed connection; without a session, forget the connection."""
        context = self._context
        self._connections.discard(conn)
        context.byte_meter.departed(conn)
        peer = context.peers.remove(conn)
        if peer is not None and context.peers.by_client(peer.client) is None:
            context.journal.note("info", "left", f"{peer.name} left", peer.client)
            context.ledger.clients.mark_seen(peer.client)
            context.run.coordinator.on_client_left(peer.client)

    def cut(self, peer: Peer) -> None:
        """End a client's connection, and drop its partially received envelopes."""
        for digest in list(peer.receiver.under_way):
            self._context.intake.forget(peer, digest)
        self._context.link.cut(peer.conn)

    async def say_goodbye(self, *, next_run: bool = False) -> None:
        """Tell all clients that the server stops, or closes their links to begin another run."""
        context, yielder = self._context, Yielder()
        stops = Bye(reason="the server stops")
        bye = Bye(code=NEXT_RUN, reason="the next run begins") if next_run else stops
        for peer in context.peers:
            self.send(peer, bye)
            context.ledger.clients.mark_seen(peer.client)
            await yielder.yield_if_long()
        await asyncio.sleep(0.05 + 0.0005 * len(context.peers))  # for the last messages to leave
