"""What a relay does while it has a session with the server: let in, pass on, fetch once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from fcil_protocol import lanes
from fcil_protocol.channel import Channel
from fcil_protocol.envelope import parse_header, verify_header
from fcil_protocol.errors import FcilError, InternalError, WireError
from fcil_protocol.keys import PublicKeys
from fcil_protocol.link import Incoming, ServerLink
from fcil_protocol.messages import Admit, Chunk, Message, Parts, Want, parse
from fcil_protocol.wellknown import REGISTRY
from fcil_server.doorkeeper import Doorkeeper
from fcil_server.guests import MAX_GUEST_BYTES
from fcil_server.relay_cache import Cache
from fcil_server.relay_fetches import Fetches

FULL_S = 0.005  # between attempts to send while the uplink's queue is full
MAX_OUT = 64  # messages that wait for the uplink; then clients are not read
_MAX_PLAIN = 1 << 40  # the client, who knows the federation's limit, checks the size

Door = Callable[[Callable[[bytes], bool]], ServerLink]


class Session:
    """Lists, lanes and fetches, as long as the session with the server lasts.

    Args:
        channel: the relay's own session.
        server: who must have signed the headers of parts.
        first: the answer to the relay's `Uplink`.
        cache: chunks that came earlier.
        counts: what passes is counted here.
        push: sends over the uplink; False if its queue is full.
        fail: ends the relay.

    Attributes:
        lanes: number of a lane -> the connection that it is.
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
    ) -> None:
        self._channel = channel
        self._server = server
        self._cache = cache
        self._counts = counts
        self._uplink = push
        self._fail = fail
        self._keeper = Doorkeeper()
        self._members = frozenset(first.members)
        self._keeper.replace(first.members, first.guests)
        self._fetches = Fetches(first.credit)
        self._out: deque[list[bytes]] = deque()
        self._flowing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._door: ServerLink
        self._numbers: dict[int, int] = {}  # connection -> lane
        self._last = 0
        self.lanes: dict[int, Incoming] = {}

    def open(self, door: Door) -> None:
        """Begin to listen.

        Raises:
            PortInUse, LinkError.
        """
        self._door = door(self._keeper)
        self._tasks = [asyncio.create_task(w) for w in (self._receive(), self._flow())]

    async def close(self) -> None:
        """End all lanes and listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._door.close()

    # --- up ---------------------------------------------------------------------------------

    async def _receive(self) -> None:
        try:
            while True:
                self._up(await self._door.recv())
                # TCP holds the clients back meanwhile; a socket does not tell when it has room.
                while len(self._out) >= MAX_OUT:  # noqa: ASYNC110
                    await asyncio.sleep(FULL_S)
        except FcilError as error:
            self._fail(error)
        except Exception as error:
            wrapped = InternalError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._fail(wrapped)

    async def _flow(self) -> None:
        while True:
            await self._flowing.wait()
            while self._out:
                if not self._uplink(self._out[0]):
                    await asyncio.sleep(FULL_S)
                    continue
                self._out.popleft()
            self._flowing.clear()

    def _push(self, frames: list[bytes]) -> None:
        if self._out or not self._uplink(frames):
            self._out.append(frames)
            self._flowing.set()

    def _up(self, incoming: Incoming) -> None:
        frames = incoming.frames
        if not frames:
            self._ended(incoming)
            return
        size = sum(len(frame) for frame in frames)
        if size > MAX_GUEST_BYTES and incoming.key not in self._members:
            self._door.cut(incoming.conn)
            return
        number = self._numbers.get(incoming.conn)
        if number is None:
            # Counted here: who connected first does not always speak first.
            self._last += 1
            number = self._numbers[incoming.conn] = self._last
            self.lanes[number] = replace(incoming, frames=())
        if not self._serve(number, frames):
            self._push(lanes.up(number, incoming.key, frames))

    def _ended(self, incoming: Incoming) -> None:
        number = self._numbers.pop(incoming.conn, None)
        if number is not None:
            del self.lanes[number]
            self._fetches.left(number)
            self._push(lanes.up(number, incoming.key))

    def _serve(self, number: int, frames: tuple[bytes, ...]) -> bool:
        """Take a Want for chunks that are here or can be fetched once for all; False: pass it."""
        want = _peek(frames)
        if not isinstance(want, Want) or want.header or not want.chunks:
            return False
        hashes = {i: self._fetches.hash_of(want.digest, i) for i in want.chunks}
        if None in hashes.values():
            return False  # a client's own part, an unknown one, or no such chunk
        missing = []
        for index in want.chunks[: self._fetches.credit]:
            data = self._cache.get(want.digest, index, hashes[index] or b"")
            if data is None:
                missing.append(index)
            elif not self._give(number, want.digest, index, data):
                return True
            else:
                self._counts["from_cache"] += 1
        if missing:
            self._ask(want.digest, self._fetches.wait(number, want.digest, missing))
        return True

    def _ask(self, digest: str, chunks: list[int]) -> None:
        if chunks:
            self._push(self._channel.frames(Want(digest=digest, chunks=chunks)))

    # --- down -------------------------------------------------------------------------------

    def down(self, laned: lanes.Laned) -> None:
        """Pass a message on to its client, or cut the client."""
        lane = self.lanes.get(laned.number)
        if lane is None:
            return
        if not laned.frames:
            self._door.cut(lane.conn)
            return
        self._learn(laned.frames)
        self._counts["passed"] += 1
        if not self._door.send(lane.route, laned.frames):
            self._door.cut(lane.conn)  # it does not read: its session ends, it comes back

    def _learn(self, frames: tuple[bytes, ...]) -> None:
        """Note the hashes of a part that is for all clients, if the server signed its header."""
        message = _peek(frames)
        if not isinstance(message, Parts):
            return
        data, signature, _ = frames[2:]
        try:
            verify_header(data, signature, self._server)
            header = parse_header(data, max_plain_bytes=_MAX_PLAIN)
        except FcilError:
            return  # the client refuses it in its own words
        if header.update_id == message.digest and header.core.part != REGISTRY:
            self._fetches.learn(message.digest, tuple(header.hashes))

    def chunk(self, message: Chunk, data: bytes) -> None:
        """Take a chunk that was asked for: keep it, and give it to all who wait."""
        expected = self._fetches.hash_of(message.digest, message.index)
        if expected is None:
            return  # of a part that was given up
        if hashlib.sha256(data).digest() != expected:
            self.refused(message.digest)
            raise WireError(f"chunk {message.index} of part {message.digest[:16]} does not fit.")
        self._counts["fetched"] += 1
        self._cache.put(message.digest, message.index, data)
        waiting, more = self._fetches.arrived(message.digest, message.index)
        for number in sorted(waiting):
            self._give(number, message.digest, message.index, data)
            self._counts["fanned_out"] += 1
        self._ask(message.digest, more)

    def _give(self, number: int, digest: str, index: int, data: bytes) -> bool:
        lane = self.lanes.get(number)
        if lane is None:
            return False
        frames = self._channel.frames(Chunk(digest=digest, index=index), data)
        if self._door.send(lane.route, frames):
            return True
        self._door.cut(lane.conn)
        return False

    def refused(self, digest: str) -> None:
        """The server has no such part any more: those who wait for it begin anew, and hear so."""
        for number in sorted(self._fetches.refused(digest)):
            if (lane := self.lanes.get(number)) is not None:
                self._door.cut(lane.conn)

    def admit(self, message: Admit) -> None:
        """Take new lists; who is on none, or is a member no more, is cut."""
        members, guests = frozenset(message.members), frozenset(message.guests)
        self._keeper.replace(members, guests)
        for lane in self.lanes.values():
            was_member = lane.key in self._members
            if lane.key not in members and (was_member or lane.key not in guests):
                self._door.cut(lane.conn)
        self._members = members


def _peek(frames: tuple[bytes, ...]) -> Message | None:
    """Read a message that somebody else will judge; None if it is none that is known here."""
    try:
        return parse(frames).message
    except FcilError:
        return None
