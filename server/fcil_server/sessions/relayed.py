"""Relays as the server sees them: every lane is a connection, and no relay is trusted.

`RelayedLink` stands between the socket and the daemon, which knows of no relays. A relay's message
proves one thing: that the holder of a CURVE key enrolled behind this relay connected to it. The
signature of the first message identifies the client, as on any connection. For itself a relay may
request only chunks of parts that all clients get: sealed bytes, without a key. One that adds up
updates also sends sums of its clients' updates, which count if each client has offered its own.

A relay may be behind another one. Then its own connection is a lane, and its clients' lanes are
within that lane; each relay vouches for those behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import fcil_protocol
from fcil_protocol.errors import (
    BadTicket,
    FcilError,
    TrustError,
    WireError,
    as_fcil_error,
)
from fcil_protocol.ids import ClientId
from fcil_protocol.link.interface import Incoming, ServerLink
from fcil_protocol.link.send_queue import SendQueue
from fcil_protocol.link.tcp_info import TcpCounts
from fcil_protocol.messages import relay_frames as lanes
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    Admit,
    Chunk,
    Message,
    Release,
    Update,
    Uplink,
    Want,
    nack_of,
)
from fcil_protocol.messages.relay_frames import Laned
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.ticket import check_address
from fcil_server.federation.allow_list import MAX_BEHIND
from fcil_server.federation.eligibility import refusal
from fcil_server.federation.roster import MAX_GUESTS_BEHIND, Roster
from fcil_server.ledger import rows as ledger_rows
from fcil_server.ledger.enums import Direction, Role
from fcil_server.sessions.byte_meter import ByteMeter
from fcil_server.sessions.guests import SHOWN_OUT_S
from fcil_server.sessions.handshake import check_uplink
from fcil_server.sessions.peers import FIRST_LANE, GOODBYE_S, Peer

# First byte of a route, so that no route that a client chose can pass for another kind.
_DIRECT, _LANE = b"d", b"l"
MAX_LANES = 2 * (MAX_BEHIND + MAX_GUESTS_BEHIND)  # of one relay; a client may come back early


@dataclass
class _Relay:
    """One connection of a relay, direct or a lane of the relay that it is behind.

    Attributes:
        peer: its session; None until its `Uplink` is accepted.
        lanes: number -> the connection that the daemon sees.
        newest: highest number of a lane so far; ended lanes do not come back.
        queue: messages that its socket does not take yet.
        silenced: its messages are ignored; the connection is about to be cut.
    """

    row: ledger_rows.ClientRow
    route: bytes
    conn: int
    queue: SendQueue
    peer: Peer | None = None
    lanes: dict[int, _RelayedConnection] = field(default_factory=dict)
    newest: int = -1
    silenced: bool = False

    @property
    def sums(self) -> bool:
        """True if it has a session in which it adds up updates."""
        return self.peer is not None and self.peer.sums


@dataclass
class _RelayedConnection:
    relay: _Relay
    number: int
    incoming: Incoming  # without frames: the key, and the route of answers
    cut: bool = False


class RelayedLink:
    """A `ServerLink` whose connections are clients, behind relays or not.

    Args:
        link: the server's socket.
        roster: relays, and the clients behind them.
        credit: bytes that a relay may have in flight.
        byte_meter: returns the byte counts; called when there are bytes to count.
        serve: answers a relay's Want, chunks only.
        notify: takes a note for the operator: level, code, text, relay.
        summed: takes what a relay that adds up updates sends about its sums.
        refused: receives errors of a relay's own messages.
        must_be_heard: raises for a relay that is cut off.
        greets: counts a relay's beginnings, each of which is answered with long lists.
    """

    def __init__(
        self,
        link: ServerLink,
        roster: Roster,
        *,
        credit: int,
        byte_meter: Callable[[], ByteMeter],
        serve: Callable[[Peer, Want], None],
        notify: Callable[[str, str, str, ClientId], None],
        summed: Callable[[Peer, Received, Update | Chunk | Release], None] = lambda *_: None,
        refused: Callable[[ClientId, FcilError], None] = lambda *_: None,
        must_be_heard: Callable[[ClientId], None] = lambda _: None,
        greets: Callable[[ClientId], None] = lambda _: None,
    ) -> None:
        self._link = link
        self._roster = roster
        self._credit = credit
        self._byte_meter = byte_meter
        self._serve = serve
        self._summed = summed
        self._notify = notify
        self._refused = refused
        self._must_be_heard = must_be_heard
        self._greets = greets
        self._kinds: dict[int, _Relay | None] = {}  # of every connection that has spoken
        self._lanes: dict[int, _RelayedConnection] = {}
        self._last = FIRST_LANE
        self._ready: deque[Incoming] = deque()

    # --- the link that the daemon sees ------------------------------------------------------

    async def recv(self) -> Incoming:
        """Wait for the next message or departure of a client."""
        while not self._ready:
            self._sort(await self._link.recv())
        return self._ready.popleft()

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if the client is gone or does not read."""
        kind, rest = route[:1], route[1:]
        if kind == _DIRECT:
            return self._link.send(rest, frames)
        conn = int.from_bytes(rest, "big")
        lane = self._lanes.get(conn)
        if lane is None:  # a relay's own session
            relay = self._kinds.get(conn)
            return relay is not None and self._post(relay, list(frames))
        return not lane.cut and self._down(lane, frames)

    def cut(self, conn: int) -> None:
        """End one connection; a lane ends when its relay reports it, and is ignored until then."""
        lane = self._lanes.get(conn)
        if lane is None:
            self._link.cut(conn)
        elif not lane.cut:
            self._down(lane, ())
            lane.cut = True
            if (relay := self._kinds.get(conn)) is not None:
                self._end(relay)  # not when the relay that carries it says so, which may lie

    async def settle_counts(self) -> None:
        """Wait until `take_counts` has every byte up to now."""
        await self._link.settle_counts()

    def take_counts(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield the kernel's counts of real connections; lanes are part of a relay's."""
        return self._link.take_counts()

    def close(self) -> None:
        """Stop listening; messages that a relay has not taken are dropped."""
        for relay in self._kinds.values():
            if relay is not None:
                relay.queue.clear()  # the socket takes none after this
        self._link.close()

    # --- relays -----------------------------------------------------------------------------

    def send_lists(self, client: ClientId) -> None:
        """Send a relay its lists again; a revoked relay is cut."""
        for relay in self._relays(client):
            row = self._roster.federation.ledger.clients.get(client)
            if row is None or not row.may_join(self._roster.federation.ledger.now):
                self.cut(relay.conn)
            elif relay.peer is not None:
                self._admit(relay.peer)

    def silence(self, client: ClientId) -> None:
        """Ignore a relay's connections, and cut them once the reason had time to arrive."""
        for relay in self._relays(client):
            relay.silenced = True
            asyncio.get_running_loop().call_later(GOODBYE_S, self.cut, relay.conn)

    def carrier(self, conn: int) -> ClientId | None:
        """Return the relay that carries a connection."""
        lane = self._lanes.get(conn)
        return lane.relay.row.client_id if lane else None

    def summing_relay(self, conn: int) -> ledger_rows.ClientRow | None:
        """Return the relay that carries a connection, if it adds up updates."""
        lane = self._lanes.get(conn)
        return lane.relay.row if lane is not None and lane.relay.sums else None

    def summing_relays(self) -> list[Peer]:
        """Return the sessions of relays that add up updates."""
        relays = (r for r in self._kinds.values() if r is not None and r.sums)
        return [relay.peer for relay in relays if relay.peer is not None]

    def has(self, client: ClientId) -> bool:
        """Return True if a relay is connected and greeted."""
        return any(relay.peer is not None for relay in self._relays(client))

    def relays(self) -> list[ClientId]:
        """Return the relays that are connected and greeted."""
        greeted = (r for r in self._kinds.values() if r is not None and r.peer is not None)
        return sorted({relay.row.client_id for relay in greeted})

    def _relays(self, client: ClientId) -> list[_Relay]:
        return [r for r in self._kinds.values() if r is not None and r.row.client_id == client]

    def _sort(self, incoming: Incoming) -> None:
        """Take a message of a connection, or its end: it is a relay's, or for the daemon."""
        relay = self._kind(incoming)
        if not incoming.frames:
            self._kinds.pop(incoming.conn, None)
            if relay is not None:
                self._byte_meter().departed(incoming.conn)
        if relay is None:
            route = incoming.route if incoming.relayed else _DIRECT + incoming.route
            self._ready.append(replace(incoming, route=route))
            return
        try:
            self._hear(relay, incoming)
        except Exception as error:  # also our own defect is not the end of the server
            self._refuse(relay, as_fcil_error(error))

    def _kind(self, incoming: Incoming) -> _Relay | None:
        if incoming.conn not in self._kinds:
            row, relay = self._roster.federation.ledger.clients.by_curve(incoming.key), None
            if row is not None and row.role is Role.RELAY and incoming.frames:
                queue = SendQueue(partial(self._link.send, incoming.route))
                relay = _Relay(row, incoming.route, incoming.conn, queue)
            self._kinds[incoming.conn] = relay
        return self._kinds[incoming.conn]

    def _hear(self, relay: _Relay, incoming: Incoming) -> None:
        if not incoming.frames:
            self._end(relay)
        elif relay.silenced:
            return
        elif lanes.is_laned(incoming.frames):
            self._lane(relay, lanes.read_up(incoming.frames))
        else:
            self._own(relay, incoming)

    def _own(self, relay: _Relay, incoming: Incoming) -> None:
        """Take a relay's own message."""
        received = parse(incoming.frames, to_server=True)
        message = received.message
        if isinstance(message, Uplink):
            self._greets(relay.row.client_id)
            self._greet(relay, received, message)
        elif relay.peer is None:
            raise WireError("the session of a relay begins with an uplink.")
        else:
            relay.peer.channel.check(received)
        self._byte_meter().received(relay.row.client_id, message, incoming.frames)
        if isinstance(message, Want) and relay.peer is not None:
            if message.header:
                raise TrustError("a relay gets no key of any part.")
            try:
                self._serve(relay.peer, message)
            except FcilError as error:  # the part is gone, or is one client's alone
                self._answer(relay.peer, nack_of(error, message.digest))
        elif isinstance(message, Update | Chunk | Release) and relay.peer and relay.sums:
            self._summed(relay.peer, received, message)
        elif not isinstance(message, Uplink):
            raise WireError(f"a relay does not send {message.type}.")

    def _greet(self, relay: _Relay, received: Received, message: Uplink) -> None:
        federation = self._roster.federation
        row = federation.ledger.clients.by_curve(relay.row.curve)
        if row is None:
            raise refusal(row, federation.ledger.now)
        channel = Channel(federation.keys, row.public_keys)
        channel.peer_nonce = message.nonce
        channel.check(received)
        peer = Peer(
            client=row.client_id,
            name=row.name,
            keys=row.public_keys,
            route=_LANE + relay.conn.to_bytes(8, "big"),
            conn=relay.conn,
            channel=channel,
            ready=True,
            sums=message.sums,
        )
        self._end_all(relay)
        relay.peer = None  # a second uplink starts from scratch
        try:
            check_uplink(row, message, federation.id, federation.ledger.now)
            _check_reported(message.address)
            self._must_be_heard(row.client_id)
        except FcilError as error:
            self._answer(peer, nack_of(error))
            raise
        for other in self._relays(row.client_id):
            if other is not relay:
                self.cut(other.conn)
        relay.peer = peer
        federation.ledger.clients.mark_seen(row.client_id)
        federation.ledger.clients.set_address(row.client_id, message.address)
        if relay.conn not in self._lanes:  # else the bytes are its carrier's
            self._byte_meter().connected(row.client_id, relay.conn)
        self._admit(peer)
        adds = ", adds up its clients' updates" if message.sums else ""
        self._note(relay, "info", "relay", f"connected, listening on {message.address}{adds}")

    def _admit(self, peer: Peer) -> None:
        members, guests, invited = self._roster.lists(peer.client)
        federation = self._roster.federation
        message = Admit(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            server_nonce=peer.channel.nonce,
            certificate=federation.certificate.to_bytes(),
            credit=self._credit,
            members=members,
            guests=guests,
            invited=invited,
            relays=self._roster.relays_of(peer.client),
            outer=self._roster.relays_in_row(peer.client) - 1,
        )
        self._answer(peer, message)

    def _answer(self, peer: Peer, message: Message) -> None:
        frames = peer.channel.frames(message)
        if self.send(peer.route, frames):
            self._byte_meter().sent(peer.client, message, frames)

    def _refuse(self, relay: _Relay, error: FcilError) -> None:
        self._note(relay, "warning", error.code, error.message)
        self._refused(relay.row.client_id, error)
        if relay.peer is not None:
            self._answer(relay.peer, nack_of(error))
        else:
            asyncio.get_running_loop().call_later(SHOWN_OUT_S, self.cut, relay.conn)

    def _note(self, relay: _Relay, level: str, code: str, text: str) -> None:
        self._notify(level, code, f"relay {relay.row.name}: {text}", relay.row.client_id)

    # --- lanes ------------------------------------------------------------------------------

    def _lane(self, relay: _Relay, laned: Laned) -> None:
        self._byte_meter().head(relay.row.client_id, Direction.UP, laned.head)
        if relay.peer is None:
            return  # of a session that is over
        lane = relay.lanes.get(laned.number)
        if lane is None:
            lane = self._begin(relay, laned)
        if lane is None or (lane.cut and laned.frames):
            return
        if laned.key != lane.incoming.key:
            raise WireError("a lane belongs to one key from its beginning to its end.")
        if laned.frames:
            self._sort(replace(lane.incoming, frames=laned.frames))
        else:
            self._end_lane(lane)

    def _begin(self, relay: _Relay, laned: Laned) -> _RelayedConnection | None:
        if not laned.frames:
            return None
        if laned.number <= relay.newest:  # over; its client must start again
            self._post(relay, lanes.down(laned.number))
            return None
        relay.newest = laned.number
        if len(relay.lanes) >= MAX_LANES:
            self._post(relay, lanes.down(laned.number))
            raise WireError(f"it has {MAX_LANES} connections already.")
        if not self._roster.is_behind(laned.key, relay.row.client_id):
            self._post(relay, lanes.down(laned.number))
            raise TrustError("it speaks for a key that is not enrolled behind it.")
        self._last += 1
        route = _LANE + self._last.to_bytes(8, "big")
        incoming = Incoming(route, self._last, laned.key, relayed=True)
        lane = _RelayedConnection(relay, laned.number, incoming)
        relay.lanes[laned.number] = self._lanes[self._last] = lane
        return lane

    def _end(self, relay: _Relay) -> None:
        """End a relay's session, and all its lanes."""
        self._end_all(relay)
        if relay.peer is not None:
            self._note(relay, "warning", "relay_left", "left")
            self._roster.federation.ledger.clients.mark_seen(relay.row.client_id)
        relay.peer = None

    def _end_lane(self, lane: _RelayedConnection) -> None:
        del lane.relay.lanes[lane.number]
        del self._lanes[lane.incoming.conn]
        self._sort(lane.incoming)

    def _end_all(self, relay: _Relay) -> None:
        relay.queue.clear()
        for lane in list(relay.lanes.values()):
            self._end_lane(lane)

    # --- out --------------------------------------------------------------------------------

    def _down(self, lane: _RelayedConnection, frames: Sequence[bytes]) -> bool:
        message = lanes.down(lane.number, frames)
        sent = self._post(lane.relay, message)
        if sent:
            self._byte_meter().head(lane.relay.row.client_id, Direction.DOWN, message[0])
        return sent

    def _post(self, relay: _Relay, message: list[bytes]) -> bool:
        """Send a relay a message, or let it wait; a relay that has stopped reading is cut."""
        if relay.conn in self._lanes:  # the queue of the outermost one holds all
            return self.send(relay.route, message)
        if relay.queue.put(message):
            return True
        if not relay.silenced:
            self._note(relay, "warning", "relay_deaf", "does not read, and is cut")
            relay.silenced = True
        self._link.cut(relay.conn)  # its clients come back when it does
        return False


def _check_reported(address: str) -> None:
    """Check the address that a relay reports: tickets through it name this address.

    Raises:
        WireError: no ticket can name it.
    """
    try:
        check_address(address, "Start the relay with --listen or --advertise HOST:PORT.")
    except BadTicket as error:
        raise WireError(f"the relay's own address: {error.message}", action=error.action) from error
