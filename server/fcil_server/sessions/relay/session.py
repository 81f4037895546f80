"""A relay's session with the server: admit clients, pass messages on, fetch parts once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from fcil_protocol.envelopes.envelope import parse_header, verify_header
from fcil_protocol.envelopes.header import Header
from fcil_protocol.envelopes.transfer import Sender, granted
from fcil_protocol.errors import FcilError, WireError, as_fcil_error
from fcil_protocol.link.interface import Incoming, ServerLink
from fcil_protocol.link.send_queue import SendQueue
from fcil_protocol.link.socket_reader import MAX_SUM_BYTES
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import MAX_BLOBS, Received, parse
from fcil_protocol.messages.messages import (
    Ack,
    Admit,
    Chunk,
    Message,
    Nack,
    Parts,
    Want,
    Welcome,
)
from fcil_protocol.messages.relay_frames import MOST_RELAYS
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.trust.keys import PublicKeys
from fcil_server.federation.allow_list import MAX_GUEST_BYTES, AllowList
from fcil_server.sessions.relay.cache import Cache
from fcil_server.sessions.relay.fetches import Fetches
from fcil_server.sessions.relay.summing import Summing

FULL_S = 0.005  # between attempts to send while the uplink's queue is full
WATCH_S = 10.0  # between checks for requests that were lost on a live uplink
MAX_OUT = 64  # messages that wait for the uplink; then the relay reads no client
MAX_OUT_BYTES = 8 << 20  # of them together, not counting the last one
MAX_PASSED_BYTES = MAX_SUM_BYTES - 64 * MOST_RELAYS  # of a message, apart from the heads of lanes
_MAX_PLAIN = 1 << 40  # the client, which knows the federation's limit, checks the size

OpenLink = Callable[[AllowList], ServerLink]


class RelaySession:
    """Lists, lanes and fetches, as long as the session with the server lasts.

    Args:
        channel: the relay's own session.
        server: keys that must have signed the headers of parts.
        first: the answer to the relay's `Uplink`.
        cache: chunks received earlier.
        counts: totals of the traffic.
        push: sends over the uplink; False if its queue is full.
        fail: ends the relay.
        summing: makes what adds up clients' updates; None: all pass.

    Attributes:
        lanes: number of a lane -> its connection.
        credit: bytes that one client may have in flight.
        summing: adds up clients' updates, if the relay does.
    """

    def __init__(
        self,
        channel: Channel,
        server: PublicKeys,
        first: Admit,
        *,
        cache: Cache,
        counts: Counter[str],
        push: Callable[[list[bytes]], bool],
        fail: Callable[[FcilError], None],
        summing: Callable[[RelaySession], Summing] | None = None,
    ) -> None:
        self._channel = channel
        self._server = server
        self._cache = cache
        self._counts = counts
        self._uplink = push
        self._fail = fail
        self._allow_list = AllowList(credit=first.credit)
        self._members = frozenset(first.members)
        self._relay_keys: frozenset[bytes] = frozenset()  # of members that are relays
        self._outer = first.outer
        self._admit(first)
        self.credit = first.credit
        self._fetches = Fetches(first.credit)
        self._spans: dict[int, int] = {}  # lane -> chunks that its client takes in one message
        self._out: deque[list[bytes]] = deque()
        self._out_bytes = 0
        self._flowing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._link: ServerLink
        self._numbers: dict[int, int] = {}  # connection -> lane
        self._last = 0
        self._welcomed: set[int] = set()  # lanes over which a Welcome has passed
        self._queues: dict[int, SendQueue] = {}  # of those over which an Admit has: relays
        self.lanes: dict[int, Incoming] = {}
        self.summing = None if summing is None else summing(self)

    def open(self, open_link: OpenLink) -> None:
        """Begin to listen.

        Raises:
            PortInUse, LinkError.
        """
        self._link = open_link(self._allow_list)
        work = (self._receive, self._flow, self._watch)
        self._tasks = [asyncio.create_task(self._guard(w)) for w in work]

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one of the session's tasks; an error that it lets out ends the relay."""
        try:
            await work()
        except Exception as error:
            self._fail(as_fcil_error(error))

    async def close(self) -> None:
        """End all lanes and stop listening."""
        for task in self._tasks:
            task.cancel()
        for queue in self._queues.values():
            queue.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.summing is not None:
            await self.summing.close()
        self._link.close()

    # --- up ---------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            self._on_client_message(await self._link.recv())
            # Meanwhile clients' messages wait in libzmq, within the bytes that may be unread
            # (`fcil_protocol.link.backlog`); a socket does not signal that it has room.
            while len(self._out) >= MAX_OUT or self._out_bytes >= MAX_OUT_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(FULL_S)

    async def _flow(self) -> None:
        while True:
            await self._flowing.wait()
            while self._out:
                if not self._uplink(self._out[0]):
                    await asyncio.sleep(FULL_S)
                    continue
                self._out_bytes -= sum(map(len, self._out.popleft()))
            self._flowing.clear()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for _ in self._link.take_counts():
                pass  # unused here, and must not pile up
            if self._fetches.revive(time.monotonic()):
                self._ask()
            if self.summing is not None:
                self.summing.revive()

    def _push(self, frames: list[bytes]) -> None:
        if self._out or not self._uplink(frames):
            self._out.append(frames)
            self._out_bytes += sum(map(len, frames))
            self._flowing.set()

    def _on_client_message(self, incoming: Incoming) -> None:
        frames = incoming.frames
        if not frames:
            self._on_client_left(incoming)
            return
        if not self._may_pass(incoming.key, frames):
            self._link.cut(incoming.conn)
            return
        number = self._numbers.get(incoming.conn)
        if number is None:
            of_key = (lane.conn for lane in self.lanes.values() if lane.key == incoming.key)
            if max(of_key, default=0) > incoming.conn:
                self._link.cut(incoming.conn)  # the network kept it while a newer one was made
                return
            # Numbered here: the first client to connect is not always the first to speak.
            self._last += 1
            number = self._numbers[incoming.conn] = self._last
            self.lanes[number] = replace(incoming, frames=())
        received = _peek(frames, to_server=True)
        if received is not None and self._serve(number, received.message):
            return
        passing: tuple[bytes, ...] | None = frames
        if received is not None and self.summing is not None and number in self._welcomed:
            passing = self.summing.on_client_message(number, received, frames)
        if passing is not None:
            self._push(relay_frames.up(number, incoming.key, passing))

    def _may_pass(self, key: bytes, frames: tuple[bytes, ...]) -> bool:
        """Return True if a message has only heads that its sender may use, and is not too large.

        The next relay, or the server, cuts a connection with a message that exceeds its limits.
        """
        own = relay_frames.innermost(frames)
        heads, size = len(frames) - len(own), sum(map(len, own))
        if heads > (MOST_RELAYS - 1 - self._outer if key in self._relay_keys else 0):
            return False
        most = MAX_PASSED_BYTES if key in self._members else MAX_GUEST_BYTES
        return len(own) <= 2 + MAX_BLOBS and size <= most

    def _on_client_left(self, incoming: Incoming) -> None:
        number = self._numbers.pop(incoming.conn, None)
        if number is not None:
            del self.lanes[number]
            self._fetches.left(number)
            self._spans.pop(number, None)
            self._welcomed.discard(number)
            if (queue := self._queues.pop(number, None)) is not None:
                queue.clear()
            self._push(relay_frames.up(number, incoming.key))
            if self.summing is not None:
                self.summing.on_client_left(number)

    def _serve(self, number: int, want: Message) -> bool:
        """Serve a Want for chunks that are cached or worth fetching for all; False: pass it on.

        Only in a session, of which the server sees that a client has one: chunks wait in memory
        until they are read.
        """
        if not isinstance(want, Want) or want.header or not want.chunks:
            return False
        if number not in self._welcomed and number not in self._queues:
            return False
        header = self._fetches.header_of(want.digest)
        if header is None or max(want.chunks) >= len(header.hashes):
            return False  # a client's own part, an unknown one, or no such chunk
        if number not in self._spans:
            self._cut_older(number)
        self._spans[number] = want.span
        here: dict[int, bytes] = {}
        missing: list[int] = []
        for index in granted(header, want.chunks, self.credit):
            data = self._cache.get(want.digest, index, header.hashes[index])
            if data is None:
                missing.append(index)
            else:
                here[index] = data
        self._counts["from_cache"] += len(here)
        if self._give(number, header, here) and missing:
            self._fetches.wait(number, want.digest, missing)
            self._ask()
        return True

    def _cut_older(self, number: int) -> None:
        """Cut a client's older lanes that chunks were sent to: it has a newer session."""
        key = self.lanes[number].key
        for other, lane in self.lanes.items():
            if other < number and other in self._spans and lane.key == key:
                self._link.cut(lane.conn)

    def _ask(self) -> None:
        for want in self._fetches.wants(time.monotonic()):
            self._push(self._channel.frames(want))

    # --- down -------------------------------------------------------------------------------

    def on_server_message(self, laned: relay_frames.Laned) -> None:
        """Pass a message on to its client, or cut the client."""
        lane = self.lanes.get(laned.number)
        if lane is None:
            return
        if not laned.frames:
            self._link.cut(lane.conn)
            return
        own = relay_frames.innermost(laned.frames)
        received = _peek(own)
        message = None if received is None else received.message
        if isinstance(message, Parts):
            self._learn(message, own)
        if message is not None and not relay_frames.is_laned(laned.frames):
            self._note_session(laned.number, message)
        self._counts["passed"] += 1
        self._send(laned.number, laned.frames)

    def _send(self, number: int, frames: Sequence[bytes]) -> bool:
        """Send over a lane, which is cut if its other end does not read; False: it is gone."""
        lane, queue = self.lanes.get(number), self._queues.get(number)
        if lane is None:
            return False
        if self._link.send(lane.route, frames) if queue is None else queue.put(frames):
            return True
        self._link.cut(lane.conn)
        return False

    def _note_session(self, number: int, message: Message) -> None:
        """Note the session that a message begins, and pass the message to what adds up updates."""
        if isinstance(message, Welcome):
            self._welcomed.add(number)
        elif isinstance(message, Admit) and number not in self._queues:
            self._queues[number] = SendQueue(partial(self._link.send, self.lanes[number].route))
        if self.summing is not None:
            self.summing.on_server_message(number, message)

    def _learn(self, message: Parts, frames: Sequence[bytes]) -> None:
        """Note the hashes of a part that is for all clients, if the server signed its header."""
        data, signature, _ = frames[2:]
        try:
            verify_header(data, signature, self._server)
            header = parse_header(data, max_plain_bytes=_MAX_PLAIN)
        except FcilError:
            return  # the client refuses it with its own error
        if header.update_id == message.digest and header.core.part != REGISTRY:
            self._fetches.learn(header)

    def on_chunk(self, message: Chunk, data: bytes) -> None:
        """Keep requested chunks, and send them to all waiting clients."""
        header = self._fetches.header_of(message.digest)
        if header is None:
            return  # of a part that was dropped
        came: dict[int, bytes] = {}
        for start in range(0, len(data), header.chunk_bytes):
            index = message.index + start // header.chunk_bytes
            piece = data[start : start + header.chunk_bytes]
            if index >= len(header.hashes) or not header.fits(index, piece):
                self.on_part_refused(message.digest)
                raise WireError(f"chunk {index} of part {message.digest[:16]} does not match.")
            came[index] = piece
            self._cache.put(message.digest, index, piece)
        self._counts["fetched"] += len(came)
        waiting = self._fetches.arrived(message.digest, came, time.monotonic())
        for number in sorted(waiting):
            self._give(number, header, {i: came[i] for i in waiting[number]})
            self._counts["fanned_out"] += len(waiting[number])
        self._ask()

    def _give(self, number: int, header: Header, pieces: dict[int, bytes]) -> bool:
        """Send chunks to a client, as many per message as it takes; False: it is gone."""
        sender = Sender(header, lambda run: b"".join(pieces[i] for i in run))
        messages = sender.messages(pieces, self._spans.get(number, 1))
        return all(self._send(number, self._channel.frames(*message)) for message in messages)

    def take_answer(self, message: Ack | Nack) -> bool:
        """Take an answer to a sum; False: it is about something else."""
        return self.summing is not None and self.summing.on_answer(message)

    def send(self, message: Message, *blobs: bytes) -> None:
        """Send the server a message of the relay's own."""
        self._push(self._channel.frames(message, *blobs))

    def key_of(self, number: int) -> bytes:
        """Return the CURVE key of a lane's client; empty: the lane is over."""
        lane = self.lanes.get(number)
        return b"" if lane is None else lane.key

    def send_down(self, number: int, message: Message) -> None:
        """Send a client a message of the relay's own; if it does not read, it is cut."""
        self._send(number, self._channel.frames(message))

    def on_part_refused(self, digest: str) -> None:
        """Cut the clients that wait for a part the server no longer has; they start again.

        A relay that waits for it repeats its request, which then passes to the server: to cut the
        relay would end the sessions of all its clients.
        """
        for number in sorted(self._fetches.refused(digest) - self._queues.keys()):
            if (lane := self.lanes.get(number)) is not None:
                self._link.cut(lane.conn)
        self._ask()  # others may have its room

    def _admit(self, message: Admit) -> None:
        former = max(0, len(message.guests) - message.invited)
        newcomers = dict.fromkeys(message.guests[former:], inf)
        former_members = message.guests[:former]
        self._allow_list.replace(message.members, newcomers, former_members, message.relays)
        self._relay_keys = frozenset(message.relays)

    def on_admit(self, message: Admit) -> None:
        """Replace the lists and cut keys that are on none, or are no longer members."""
        members, guests = frozenset(message.members), frozenset(message.guests)
        self._admit(message)
        for lane in self.lanes.values():
            was_member = lane.key in self._members
            if lane.key not in members and (was_member or lane.key not in guests):
                self._link.cut(lane.conn)
        self._members = members


def _peek(frames: Sequence[bytes], *, to_server: bool = False) -> Received | None:
    """Read a message that its recipient will check; None if it is of no known kind."""
    try:
        return parse(frames, to_server=to_server)
    except FcilError:
        return None
