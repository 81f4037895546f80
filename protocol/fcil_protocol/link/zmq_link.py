"""The link: one ROUTER, many DEALERs, CURVE always on.

Only this file, `gate` and `socket_reader` import zmq.

The behaviour of libzmq under attack, on slow links and at its limits was measured before this was
written; PROTOCOL.md section 2 gives the rules that follow from it. In short: the gate (ZAP) is ours
and is up before any socket is bound, the monitor is always drained, queues are short, a chunk is a
message, and sending never waits: a peer that requests nothing gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import zmq

from fcil_protocol.link.backlog import FEW_BYTES, UNSPOKEN_BYTES
from fcil_protocol.link.connection_counts import ConnectionCounts
from fcil_protocol.link.descriptors import Descriptors, Silent
from fcil_protocol.link.door import Door, spare_descriptors
from fcil_protocol.link.flood_watch import FloodWatch
from fcil_protocol.link.gate import MONITOR_EVENT, ZAP_DOMAIN, Gate
from fcil_protocol.link.interface import (
    COME_AGAIN,
    HANDSHAKE_DOWN_BYTES,
    HANDSHAKE_UP_BYTES,
    ClientLink,
    Incoming,
    LinkNews,
    ServerLink,
    SharedFrame,
    frame_wire_bytes,
    wire_bytes,
)
from fcil_protocol.link.listeners import backlog, cannot_listen
from fcil_protocol.link.socket_reader import MAX_FRAMES, MAX_SUM_BYTES, SocketReader
from fcil_protocol.link.tcp_info import TcpCounts, shut_down
from fcil_protocol.link.unread_watch import UnreadWatch, WatchedConnection

__all__ = [
    "HANDSHAKE_DOWN_BYTES",
    "HANDSHAKE_UP_BYTES",
    "ClientLink",
    "Dealer",
    "Incoming",
    "LinkNews",
    "Links",
    "Router",
    "ServerLink",
    "frame_wire_bytes",
    "wire_bytes",
]

MAX_MESSAGE_BYTES = 5 << 19  # the largest frame: an update's header blob
MEMBER_BYTES = 4 << 20  # unread bytes of a peer allowed beyond its requested data: a message
HIGH_WATER = 256  # messages to a peer, usually of 256 KiB; windows keep real queues far below
HANDSHAKE_MS = 30_000  # six messages one after the other: 12 s where each takes 2
CONNECT_MS = 20_000  # five SYN packets; the kernel alone would wait two minutes for a lost host
_NOT_NOW = 500  # of the gate: this key may pass, but not now
CROWDED = (
    "more are open than this process may open files for, and those that say nothing go first "
    "(ulimit -n, LimitNOFILE)"
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # before a client connects again
SILENT_S = 30.0  # a connection without any message is cut after this time


def _send_now(sock: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    parts = [_in_place(frame) if isinstance(frame, SharedFrame) else frame for frame in frames]
    try:
        sock.send_multipart(parts, zmq.NOBLOCK, copy=True)
    except zmq.Again:
        # By itself libzmq looks for news at most once a millisecond: asked, it may report a new
        # connection or room in a queue.
        sock.getsockopt(zmq.EVENTS)
        sock.send_multipart(parts, zmq.NOBLOCK, copy=True)


def _in_place(frame: SharedFrame) -> zmq.Frame:
    """Return the message of a frame for many peers; libzmq reads its bytes where they are.

    Not the frame's own bytes: pyzmq keeps these until the last message with them is gone, so a
    frame that keeps a message of itself stays for ever. And not a new message for each peer: at
    its end a thread of pyzmq needs the interpreter: 0.2 to 1.7 ms for each of 300 clients.
    """
    if not isinstance(frame.message, zmq.Frame):
        frame.message = zmq.Frame(bytes(memoryview(frame)), copy=False)
    return frame.message


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _common_options(sock: zmq.Socket[bytes], heartbeat_ms: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    # Without a limit: libzmq 4.3.5 stops reading a connection whose queue is full, and if that is
    # reset then, the next heartbeat ends the process with a failed assertion. Bytes are bounded by
    # the gate, and by the requests.
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # Liveness counts whole frames: the timeout must exceed a chunk on the slowest link.
    sock.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_ms * 3)
    sock.setsockopt(zmq.HEARTBEAT_TTL, heartbeat_ms * 3)


class Router:
    """The server's ROUTER socket behind the gate.

    Args:
        curve_secret, curve_public: the server's 32-byte CURVE keys.
        admit: called in the gate's thread with a client's 32-byte key; True lets it in.
        heartbeat_s: silence after which a peer is probed; three such periods without an answer end
            the connection.
        allow: called with a client's key at its first message; returns the bytes that may be unread
            before its connection is cut.
        flooded: receives the key, if known, and a sentence for a connection that was cut for that,
            for a message that is too long, or because too many are open.
        numbers: called in the gate's thread; returns the number of the next connection, larger than
            those before. None: they count from 1.
    """

    def __init__(
        self,
        *,
        curve_secret: bytes,
        curve_public: bytes,
        admit: Callable[[bytes], bool],
        heartbeat_s: float = 10.0,
        allow: Callable[[bytes], int] = lambda _: MEMBER_BYTES,
        flooded: Callable[[bytes, str], None] = lambda *_: None,
        numbers: Callable[[], int] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._allow = allow
        self._flooded = flooded
        spare = spare_descriptors()
        self._door = Door(spare)
        self._counts = ConnectionCounts(self._door.most)
        self._watch = FloodWatch(self._cut_floods)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._gate = Gate(self._context, admit, self._heard, self._watches, numbers)
        self._socket = self._context.socket(zmq.ROUTER)
        _common_options(self._socket, int(heartbeat_s * 1000))
        self._socket.setsockopt(zmq.BACKLOG, backlog())
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_public)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        mask = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        mask |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._silent = Silent(SILENT_S, shut_down, lambda: not self._reader.drained)
        self._connections = Descriptors()
        self.refused_handshakes = 0
        self._reader = SocketReader(self._socket, self._incoming, self._departures, self._too_long)
        self._gate.guard(self._socket, mask)

    def bind(self, host: str, port: int) -> int:
        """Listen on a port; 0 picks a free one. Return the port.

        Raises:
            PortInUse, LinkError.
        """
        try:
            self._socket.bind(_endpoint(host, port))
        except zmq.ZMQError as error:
            raise cannot_listen(host, port, error.errno, error.strerror) from error
        self._reader.wake()
        last = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(last.rstrip("\0").rsplit(":", 1)[1])

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from a socket that listens already, and own it from now on."""
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind("tcp://127.0.0.1:*")  # libzmq wants an address, and does not use it
        self._reader.wake()

    def _heard(self, event: int, value: int, newest: int) -> None:  # gate's thread
        if event == zmq.EVENT_DISCONNECTED:
            self._counts.ended(value)
            self._door.open_if_room()
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self._loop.call_soon_threadsafe(self._end, value, newest)
        elif event == zmq.EVENT_LISTENING:
            self._door.guard(value)
        elif event == zmq.EVENT_ACCEPTED:
            self._began(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused_handshakes += 1

    def _began(self, fd: int) -> None:  # gate's thread
        crowded = self._counts.began(fd)
        self._door.shut_if_crowded()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._silent.began, fd)
            if crowded:
                self._loop.call_soon_threadsafe(self._flooded, b"", CROWDED)

    def _watches(self) -> int | None:  # gate's thread
        self._door.open_if_room()
        return self._watch.tick() if self._counts or self._door.is_shut else None

    def _cut_floods(self, now: float) -> bool:  # gate's thread
        floods = self._counts.cut_floods(now)
        for conn, size in floods:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_flood, conn, size)
        return bool(floods)

    def _tell_flood(self, conn: int, size: int) -> None:
        found = self._connections.of(conn)
        text = f"{size} unsolicited bytes were left unread"
        self._flooded(found[1].key if found else b"", text)

    def _too_long(self, frame: zmq.Frame) -> None:
        conn, fd = int(str(frame.get("X-Conn"))), int(frame.get(zmq.SRCFD))
        self._silent.spoke(fd)
        if not self._connections.is_over(fd, conn):
            shut_down(fd)
            self._watch.flooded()
            text = f"a message has more than {MAX_FRAMES} frames or {MAX_SUM_BYTES} bytes"
            self._flooded(bytes.fromhex(str(frame.get("User-Id"))), text)

    def _end(self, fd: int, newest: int) -> None:
        self._silent.spoke(fd)
        self._connections.end(fd, newest)
        self._reader.wake()

    def _departures(self) -> None:
        # Only now, when no message is left to read: a peer's last messages precede its end.
        for gone in self._connections.departures():
            self._reader.tell(gone)

    async def recv(self) -> Incoming:
        """Wait for the next message, or for the departure of a peer that had sent one."""
        return await self._reader.get()

    def _incoming(self, frames: list[zmq.Frame]) -> Incoming | None:
        first = frames[-1]
        route, conn = frames[0].bytes, int(str(first.get("X-Conn")))
        key, fd = bytes.fromhex(str(first.get("User-Id"))), int(first.get(zmq.SRCFD))
        self._silent.spoke(fd)
        if self._connections.is_left_behind(fd, conn):
            return None
        if self._connections.is_new(fd, conn):
            before = self._connections.spoke(fd, Incoming(route, conn, key))
            if before is not None:  # its descriptor now belongs to this one
                self._reader.tell(before)
            self._counts.spoke(fd, conn, self._allowance(key))
        self._counts.delivered(fd, [frame_wire_bytes(len(f)) for f in frames[1:]])
        return Incoming(route, conn, key, tuple(f.bytes for f in frames[1:]))

    def _allowance(self, key: bytes) -> int:
        try:
            return self._allow(key)
        except Exception:  # a ledger that cannot be read must not stop the reading of messages
            return UNSPOKEN_BYTES

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if the peer is gone or does not read."""
        try:
            _send_now(self._socket, [route, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        finally:
            self._reader.wake()
        return True

    def allow_unread(self, conn: int, most_bytes: int) -> None:
        """Change how many bytes of a connection may be unread."""
        found = self._connections.of(conn)
        if found is not None:
            self._counts.spoke(found[0], conn, most_bytes)

    async def settle_counts(self) -> None:
        """Return at once: `take_counts` asks the kernel itself."""

    def take_counts(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield the kernel's counts since the last call, by connection number, in pieces.

        Empty if the system does not count (`tcp_info`).
        """
        return self._counts.take()

    def cut(self, conn: int) -> None:
        """Shut down the TCP connection of one peer at once."""
        found = self._connections.of(conn)
        if found is not None:
            shut_down(found[0])

    def close(self) -> None:
        """Stop listening and end the threads."""
        self._silent.close()
        self._reader.close()
        self._socket.disable_monitor()
        self._socket.close(0)
        self._context.term()  # ends the gate, which closes its own sockets
        self._counts.close()
        self._door.close()


class Links:
    """Resources of many clients' links in one process: libzmq's threads and its socket table.

    Args:
        most: largest number of links open at once.

    Attributes:
        watch: of the links' connections.
    """

    def __init__(self, most: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Each link has its socket and the two ends of its monitor; some close while others open.
        self.context.set(zmq.MAX_SOCKETS, 4 * most + 64)
        self.watch = UnreadWatch()

    def close(self) -> None:
        """End the threads; all links must be closed before."""
        self.context.term()


class Dealer:
    """The client's DEALER socket to one server address at a time.

    Its monitor is read in the event loop: events come only from this socket's own attempts to
    connect, a few in a second at most, so no peer can fill it.

    Args:
        server_key: the server's 32-byte CURVE key, pinned at enrolment.
        links: resources shared with other links; None: it has threads of its own.
        retry_s: pause before a connection is tried again that was refused, or cut for a flood.
    """

    def __init__(
        self,
        *,
        curve_secret: bytes,
        curve_public: bytes,
        server_key: bytes,
        heartbeat_s: float = 10.0,
        retry_s: float = 5.0,
        links: Links | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._own = None if links else Links(1)
        self._retry_s = retry_s
        self._endpoint = ""
        shared = self._own or links
        assert shared is not None, "one of the two is there"
        self._watch = shared.watch
        self._watched: WatchedConnection | None = None
        self._flooded = False  # its connection is cut; its end is pending
        self._pause_s = FIRST_PAUSE_S
        self._again: asyncio.TimerHandle | None = None  # the next attempt to connect
        self._socket = shared.context.socket(zmq.DEALER)
        _common_options(self._socket, int(heartbeat_s * 1000))
        # Not 1: libzmq 4.3.5 would drop the queue of a lost connection, at any moment, and end the
        # process with a failed assertion if a message was half read (`!_more`, fq.cpp).
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        # Never: this class connects again, between two messages, and with an empty queue.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 24 * 3_600_000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve_public)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        mask = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        mask |= zmq.EVENT_HANDSHAKE_SUCCEEDED
        mask |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        mask |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._up = False
        self._reader: SocketReader[LinkNews | tuple[bytes, ...]] = SocketReader(
            self._socket, self._delivered, lambda: None, self._too_long
        )
        self._monitor = self._socket.get_monitor_socket(mask)
        self._news: SocketReader[LinkNews] = SocketReader(self._monitor, self._heard, lambda: None)

    def _tell(self, state: str, reason: str = "") -> None:
        self._reader.tell(LinkNews(state, reason))

    def connect(self, host: str, port: int) -> None:
        """Start connecting; `recv` returns the result."""
        self._endpoint = _endpoint(host, port)
        self._socket.connect(self._endpoint)
        self._reader.wake()

    def _heard(self, frames: list[zmq.Frame]) -> None:
        event, value = MONITOR_EVENT.unpack(frames[0].bytes)
        if event == zmq.EVENT_CONNECTED:
            self._unwatch()
            self._watched = self._watch.begin(value, MEMBER_BYTES, self._cut)
            return
        if event not in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CONNECT_RETRIED):
            self._unwatch()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up = True
            self._pause_s = FIRST_PAUSE_S
            self._tell("up")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._tell("refused", COME_AGAIN if value == _NOT_NOW else "unknown_client")
            self._try_again(self._retry_s)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._tell("refused", "wrong_server_key")
            self._try_again()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._tell("refused", "not_fcil")
            self._try_again(self._retry_s)
        elif event == zmq.EVENT_DISCONNECTED:
            if self._up:
                self._up = False
                self._tell("down")
            self._try_again(self._retry_s if self._flooded else None)
        elif event == zmq.EVENT_CONNECT_RETRIED and self._again is None:
            # After a loss or a refusal, libzmq reports its own next attempt too.
            self._tell("down", "unreachable")
            self._try_again()

    def _delivered(self, frames: list[zmq.Frame]) -> tuple[bytes, ...]:
        if self._watched is not None:
            self._watched.unread.read([frame_wire_bytes(len(f)) for f in frames])
        return tuple(f.bytes for f in frames)

    def _cut(self) -> None:
        self._flooded = True
        self._tell("flooded")

    def _too_long(self, frame: zmq.Frame) -> None:
        if self._watched is not None:
            self._watched.cut()
        elif self._up and not self._flooded:  # another system than Linux
            shut_down(int(frame.get(zmq.SRCFD)))
            self._cut()

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watch.end(self._watched)
            self._watched = None

    def allow(self, requested: int) -> None:
        """Set how many bytes this connection's peer may be asked for at a time; 0 at its start."""
        if self._watched is not None:
            # With what chunks need besides their data. A small message before does not make a
            # requested window one of small frames.
            window = requested * 5 // 4
            self._watched.unread.allowed = MEMBER_BYTES + window
            self._watched.unread.few = max(FEW_BYTES, window)

    def _try_again(self, pause_s: float | None = None) -> None:
        """Connect after a pause; without one given, it grows from attempt to attempt."""
        if self._again is not None:
            return
        if pause_s is None:
            pause_s = self._pause_s * random.uniform(1.0, 1.5)  # noqa: S311 - not all at once
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._again = self._loop.call_later(pause_s, self._connect_again)

    def _connect_again(self) -> None:
        self._again = None
        if self._socket.closed:
            return
        if not self._reader.is_between or self._monitor.poll(0):
            # Half of a message would be lost; or news of the last attempt would be taken for the
            # next one's.
            self._news.wake()
            self._try_again(FIRST_PAUSE_S)
            return
        self._flooded = False
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._endpoint)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.connect(self._endpoint)
        self._reader.wake()

    async def recv(self) -> LinkNews | tuple[bytes, ...]:
        """Wait for the next message or link news."""
        return await self._reader.get()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if there is no live connection."""
        if not self._up:
            return False  # libzmq would keep it for a later session
        try:
            _send_now(self._socket, frames)
        except zmq.Again:
            return False
        finally:
            self._reader.wake()
        return True

    def close(self) -> None:
        """End the link, once; unsent messages are lost here, never in the outbox."""
        if self._socket.closed:
            return
        self._unwatch()
        self._reader.close()
        self._news.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        if self._own is not None:
            self._own.close()
