"""The interface of a link, independent of its transport: both sides, their news, their costs.

`zmq_link` implements it with ZeroMQ, `testing` in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fcil_protocol.link.tcp_info import TcpCounts


def frame_wire_bytes(size: int) -> int:
    """Return the TCP payload bytes of one ZMTP frame of ``size`` bytes under CURVE (exact)."""
    boxed = size + 33
    return boxed + (2 if boxed <= 255 else 9)


def wire_bytes(frames: Sequence[bytes]) -> int:
    """Return the TCP payload bytes of one message under CURVE, without retransmissions."""
    return sum(frame_wire_bytes(len(f)) for f in frames)


class SharedFrame(bytes):
    """A frame for many peers: a link holds its bytes once, however many queues it waits in.

    Attributes:
        message: what the link sends in its place, made when it is first sent.
        number: by which the processes of an `intake_pool` know it; 0: none has it.
    """

    message: object = None
    number = 0


_K = TypeVar("_K", bound=Hashable)


class SharedFrames(Generic[_K]):
    """Frames by name; the ones used least recently make room for new ones.

    Two of them that see the same calls in the same order remember the same frames.

    Args:
        most_bytes: of all frames together, except the newest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[_K, SharedFrame] = OrderedDict()
        self._bytes = 0

    def use(self, name: _K) -> SharedFrame | None:
        """Return a frame by its name; None: it is not remembered."""
        found = self._held.get(name)
        if found is not None:
            self._held.move_to_end(name)
        return found

    def keep(self, name: _K, frame: SharedFrame) -> SharedFrame:
        """Remember a new frame, and return it."""
        self._held[name] = frame
        self._bytes += len(frame)
        while self._bytes > self._most_bytes and len(self._held) > 1:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= len(oldest)
        return frame


HANDSHAKE_UP_BYTES = 64 + 202 + 301  # client -> server, with an empty routing id
HANDSHAKE_DOWN_BYTES = 64 + 170 + 67  # server -> client
COME_AGAIN = "come_again"  # reason of a refused link: this key may pass, but not now


class ComeAgain(Exception):
    """Raised by `Gate`'s ``admit`` for a key that may pass, but not now."""


@dataclass(frozen=True)
class Incoming:
    """A message from a peer, or (``frames`` empty) the news that it went away.

    Attributes:
        route: address for an answer; meaningless after the peer has gone.
        conn: number of the connection, unique for the life of the server.
        key: CURVE public key that authenticated the connection (32 bytes).
        relayed: a relay authenticated that key and forwards the messages.
    """

    route: bytes
    conn: int
    key: bytes
    frames: tuple[bytes, ...] = ()
    relayed: bool = False


class ServerLink(Protocol):
    """The server's side of a link; `Router` here, `MemoryRouter` in the test kit."""

    async def recv(self) -> Incoming:
        """Wait for the next message or departure."""
        ...

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if the peer is gone or does not read."""
        ...

    def cut(self, conn: int) -> None:
        """End one connection now."""
        ...

    async def settle_counts(self) -> None:
        """Wait until `take_counts` has every byte up to now, if that takes waiting."""
        ...

    def take_counts(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield the kernel's counts since the last call, by connection number, in pieces."""
        ...

    def close(self) -> None:
        """Stop listening."""
        ...


class ClientLink(Protocol):
    """The client's side of a link; `Dealer` here, `MemoryDealer` in the test kit."""

    async def recv(self) -> LinkNews | tuple[bytes, ...]:
        """Wait for the next message or link news."""
        ...

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if there is no live connection."""
        ...

    def allow(self, requested: int) -> None:
        """Set how many bytes this connection's peer may be asked for at a time; 0 at its start."""
        ...

    def close(self) -> None:
        """End the link."""
        ...


@dataclass(frozen=True)
class LinkNews:
    """News of a client's link: ``up``, ``down`` or ``refused`` with a reason.

    ``flooded``: the peer sent more than it may; the link is cut, and ``down`` is next.
    """

    state: str
    reason: str = ""
