"""A test kit for both sides of the protocol: a link in memory with scripted faults.

For the tests of fcil and of packages that add methods; never used in production.
One process, no sockets, no threads, no time::

    router = MemoryRouter()
    dealer = router.dealer(b"k" * 32, up=".d2", down="x")
    dealer.connect()
    assert await dealer.recv() == LinkNews("up")
    dealer.send([b"first"])   # arrives
    dealer.send([b"second"])  # lost
    dealer.send([b"third"])   # arrives twice
    route = (await router.recv()).route
    router.send(route, [b"answer"])  # cuts the connection instead
    assert await dealer.recv() == LinkNews("down")
    dealer.connect()

`MemoryRouter` and `MemoryDealer` behave like `link.zmq_link.Router` and `link.zmq_link.Dealer`: the
same news, departures after the last message of a peer and only of peers that had sent one, False
instead of waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fcil_protocol.errors import UsageError
from fcil_protocol.link.interface import COME_AGAIN, ComeAgain, Incoming, LinkNews
from fcil_protocol.link.tcp_info import TcpCounts

Frames = tuple[bytes, ...]
HIGH_WATER = 256  # waiting messages in one direction of a connection before send returns False
_LETTERS = {
    ".": "passes",
    "d": "is dropped",
    "2": "comes twice",
    "f": "has one bit flipped",
    "r": "comes after the next one",
    "x": "is lost with the connection",
}


class FaultScript:
    """The faults of one direction's messages, one letter each.

    ``.`` passes, ``d`` is dropped, ``2`` arrives twice, ``f`` has one bit flipped (in the middle of
    its longest frame), ``r`` arrives after the next one that arrives, ``x`` is lost together with
    the connection. After the last letter every message passes.

    Attributes:
        seen: number of messages judged, in all connections.

    Raises:
        UsageError: a letter has no meaning.
    """

    def __init__(self, letters: str = "") -> None:
        unknown = sorted(set(letters) - set(_LETTERS))
        if unknown:
            known = ", ".join(f"{k!r} {v}" for k, v in _LETTERS.items())
            raise UsageError(
                f"fault script {letters[:40]!r} has {', '.join(map(repr, unknown))}.",
                action=f"Known letters: {known}.",
            )
        self._letters = letters
        self._held: list[Frames] = []
        self.seen = 0

    @property
    def finished(self) -> bool:
        """True if every letter has been applied to a message."""
        return self.seen >= len(self._letters)

    def judge(self, frames: Frames) -> tuple[list[Frames], bool]:
        """Return the messages that arrive now, in order, and True if the connection ends."""
        letter = self._letters[self.seen] if self.seen < len(self._letters) else "."
        self.seen += 1
        match letter:
            case "x":
                return [], True
            case "d":
                return [], False
            case "r":
                self._held.append(frames)
                return [], False
            case "f":
                frames = flip_bit(frames)
        arriving = [frames, frames] if letter == "2" else [frames]
        arriving += self._held
        self._held = []
        return arriving, False

    def lose(self) -> None:
        """Forget held messages: their connection is gone."""
        self._held = []


def flip_bit(frames: Frames) -> Frames:
    """Return the frames with one bit changed, in the middle of the longest; empty ones stay."""
    where = max(range(len(frames)), key=lambda i: len(frames[i]))
    changed = bytearray(frames[where])
    if changed:
        changed[len(changed) // 2] ^= 0x10
    return (*frames[:where], bytes(changed), *frames[where + 1 :])


@dataclass(eq=False)
class _Connection:
    """One connection: its client, its number, and the messages that wait on the server's side."""

    dealer: MemoryDealer
    route: bytes
    number: int
    waiting: int = 0
    spoken: bool = False
    alive: bool = True


class MemoryRouter:
    """The server's side of a link in memory; a `fcil_protocol.link.interface.ServerLink`.

    Args:
        admit: called with a client's 32-byte key at every connection; True lets it in.

    Attributes:
        refused_handshakes: number of connections that it did not admit.
    """

    def __init__(self, admit: Callable[[bytes], bool] = lambda _: True) -> None:
        self.refused_handshakes = 0
        self._admit = admit
        self._queue: asyncio.Queue[tuple[_Connection, Incoming]] = asyncio.Queue()
        self._connections: dict[bytes, _Connection] = {}
        self._number = 0
        self._closed = False

    def dealer(self, key: bytes, *, up: str = "", down: str = "") -> MemoryDealer:
        """Return an unconnected client of this server."""
        return MemoryDealer(self, key, up=up, down=down)

    async def recv(self) -> Incoming:
        """Wait for the next message, or for the departure of a peer that had sent one."""
        connection, incoming = await self._queue.get()
        connection.waiting -= 1
        return incoming

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if the peer is gone or does not read."""
        connection = self._connections.get(route)
        if connection is None:
            return False
        return connection.dealer._arrive(_copy(frames))  # noqa: SLF001 - two halves of one link

    def cut(self, conn: int) -> None:
        """End one connection; its client receives the news and may connect again."""
        for connection in list(self._connections.values()):
            if connection.number == conn:
                self._end(connection)

    async def settle_counts(self) -> None:
        """Return at once: there are no counts."""

    def take_counts(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield nothing: the kernel has no counts of a link in memory."""
        return iter(())

    def close(self) -> None:
        """End all connections and admit no more clients."""
        self._closed = True
        for connection in list(self._connections.values()):
            self._end(connection)

    @property
    def connected(self) -> int:
        """Number of connected clients."""
        return len(self._connections)

    def _accept(self, dealer: MemoryDealer) -> _Connection | LinkNews:
        if self._closed:
            return LinkNews("down", "unreachable")
        try:
            reason = "" if self._admit(dealer.key) else "unknown_client"
        except ComeAgain:
            reason = COME_AGAIN
        if reason:
            self.refused_handshakes += 1
            return LinkNews("refused", reason)
        self._number += 1
        route = b"\0" + self._number.to_bytes(4, "big")
        connection = _Connection(dealer, route, self._number)
        self._connections[route] = connection
        return connection

    def _put(self, connection: _Connection, frames: Frames) -> None:
        connection.waiting += 1
        connection.spoken = True
        key = connection.dealer.key
        incoming = Incoming(connection.route, connection.number, key, frames)
        self._queue.put_nowait((connection, incoming))

    def _end(self, connection: _Connection) -> None:
        if not connection.alive:
            return
        connection.alive = False
        del self._connections[connection.route]
        if connection.spoken:
            self._put(connection, ())
        connection.dealer._lost(connection)  # noqa: SLF001 - two halves of one link


class MemoryDealer:
    """A client's side of a link in memory; a `fcil_protocol.link.interface.ClientLink`.

    Args:
        router: the server.
        key: the 32-byte key under which the server sees this client.
        up, down: faults of the messages to and from the server (`FaultScript`); a script continues
            over reconnects.

    Attributes:
        allowed: requested bytes that the owner last allowed.
    """

    def __init__(self, router: MemoryRouter, key: bytes, *, up: str = "", down: str = "") -> None:
        if len(key) != 32:
            raise UsageError(f"a client's key has 32 bytes, got {len(key)}.")
        self.key = key
        self.up = FaultScript(up)
        self.down = FaultScript(down)
        self._router = router
        self._queue: asyncio.Queue[LinkNews | Frames] = asyncio.Queue()
        self._waiting = 0  # messages in the queue, without news
        self._connection: _Connection | None = None
        self.allowed = 0

    def allow(self, requested: int) -> None:
        """Note how many bytes may be asked for; messages in memory are not counted."""
        self.allowed = requested

    @property
    def is_up(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    def connect(self) -> None:
        """Try to connect once; `recv` returns the result. Does nothing while connected."""
        if self._connection is not None:
            return
        answer = self._router._accept(self)  # noqa: SLF001 - two halves of one link
        if isinstance(answer, LinkNews):
            self._queue.put_nowait(answer)
        else:
            self._connection = answer
            self._queue.put_nowait(LinkNews("up"))

    def disconnect(self) -> None:
        """Lose the connection, as when a cable is pulled; both sides receive the news."""
        if self._connection is not None:
            self._router._end(self._connection)  # noqa: SLF001 - two halves of one link

    def reconnect(self) -> None:
        """Lose the connection and make a new one."""
        self.disconnect()
        self.connect()

    async def recv(self) -> LinkNews | Frames:
        """Wait for the next message or link news."""
        item = await self._queue.get()
        self._waiting -= not isinstance(item, LinkNews)
        return item

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if there is no connection or no room."""
        connection = self._connection
        if connection is None or connection.waiting >= HIGH_WATER:
            return False
        arriving, cut = self.up.judge(_copy(frames))
        for message in arriving:
            self._router._put(connection, message)  # noqa: SLF001 - two halves of one link
        if cut:
            self.disconnect()
        return True

    def close(self) -> None:
        """End the link."""
        self.disconnect()

    def _arrive(self, frames: Frames) -> bool:
        if self._waiting >= HIGH_WATER:
            return False
        arriving, cut = self.down.judge(frames)
        for message in arriving:
            self._waiting += 1
            self._queue.put_nowait(message)
        if cut:
            self.disconnect()
        return True

    def _lost(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self.up.lose()
            self.down.lose()
            self._queue.put_nowait(LinkNews("down"))


def _copy(frames: Sequence[bytes]) -> Frames:
    assert frames, "a message has at least one frame"
    return tuple(bytes(frame) for frame in frames)
