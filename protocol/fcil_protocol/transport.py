"""The link: one ROUTER, many DEALERs, CURVE always on; the only file that imports zmq.

What libzmq does under attack, on slow links and at its limits was measured before this was
written; PROTOCOL.md section 2 gives the rules that follow from it. In short: the gate (ZAP)
is ours and is up before anything is bound, the monitor is always drained, queues are short,
a chunk is a message, and sending never waits: a peer that does not ask gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio

from fcil_protocol.errors import LinkError, PortInUse

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"fcil"
MAX_MESSAGE_BYTES = 9 << 20  # the largest frame: an update's header blob
HIGH_WATER = 256  # messages per peer; credit keeps real queues far below
BACKLOG = 1024
HANDSHAKE_MS = 10_000
QUEUE = 64  # messages read ahead of the daemon; TCP holds the rest back
YIELD_EVERY = 16  # zmq.asyncio never yields while its queue is non-empty


def frame_wire_bytes(size: int) -> int:
    """TCP payload bytes of one ZMTP frame of ``size`` bytes under CURVE (exact)."""
    boxed = size + 33
    return boxed + (2 if boxed <= 255 else 9)


def wire_bytes(frames: Sequence[bytes]) -> int:
    """TCP payload bytes of one message under CURVE, retransmissions apart."""
    return sum(frame_wire_bytes(len(f)) for f in frames)


HANDSHAKE_UP_BYTES = 64 + 202 + 301  # client -> server, with an empty routing id
HANDSHAKE_DOWN_BYTES = 64 + 170 + 67  # server -> client


@dataclass(frozen=True)
class Incoming:
    """Something from a peer: a message, or (``frames`` empty) the news that it went away.

    Attributes:
        route: where an answer goes; meaningless after the peer has gone.
        conn: number of the connection, unique for the life of the server.
        key: the CURVE public key that the connection was authenticated with (32 bytes).
    """

    route: bytes
    conn: int
    key: bytes
    frames: tuple[bytes, ...] = ()


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

    def close(self) -> None:
        """Stop listening."""
        ...


class ClientLink(Protocol):
    """The client's side of a link; `Dealer` here, `MemoryDealer` in the test kit."""

    async def recv(self) -> LinkNews | tuple[bytes, ...]:
        """Wait for the next message, or for news of the link itself."""
        ...

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if there is no live connection."""
        ...

    def close(self) -> None:
        """End the link."""
        ...


@dataclass(frozen=True)
class LinkNews:
    """What happened to a client's link: ``up``, ``down`` or ``refused`` with a reason."""

    state: str
    reason: str = ""


class _Gate(threading.Thread):
    """The ZAP handler: asks ``admit(key)`` for every handshake and numbers connections."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], admit: Callable[[bytes], bool]
    ) -> None:
        super().__init__(name="fcil-gate", daemon=True)
        self._admit = admit
        self._conn = 0
        # Bound here, in the caller's thread: nothing may listen before the gate stands.
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)

    def run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):
            while True:
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self._answer(request))
        self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id = request[0], request[1]
        mechanism, key = (request[5], request[6]) if len(request) > 6 else (b"", b"")
        admitted = mechanism == b"CURVE" and len(key) == 32 and self._ask(key)
        if not admitted:
            return [version, request_id, b"400", b"not on the allow-list", b"", b""]
        self._conn += 1
        name, value = b"X-Conn", str(self._conn).encode()
        metadata = bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        return [version, request_id, b"200", b"", key.hex().encode(), metadata]

    def _ask(self, key: bytes) -> bool:
        try:
            return self._admit(key)
        except Exception:
            return False  # a gate that cannot decide stays shut


class _Monitor(threading.Thread):
    """Drains a socket's monitor: an undrained one lets strangers block the I/O thread."""

    def __init__(
        self, sock: zmq.Socket[bytes], mask: int, heard: Callable[[int, int], None]
    ) -> None:
        super().__init__(name="fcil-monitor", daemon=True)
        self._pair = sock.get_monitor_socket(mask)
        self._heard = heard

    def run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):
            while True:
                event, value = struct.unpack("=HI", self._pair.recv_multipart()[0])
                if event == zmq.EVENT_MONITOR_STOPPED:
                    break
                self._heard(event, value)
        self._pair.close(0)


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _common_options(sock: zmq.Socket[bytes], heartbeat_ms: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER)
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
        heartbeat_s: silence after which a peer is asked whether it lives; three such
            periods without an answer end the connection.
    """

    def __init__(
        self,
        *,
        curve_secret: bytes,
        curve_public: bytes,
        admit: Callable[[bytes], bool],
        heartbeat_s: float = 10.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._gate = _Gate(plain, admit)
        self._gate.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        _common_options(self._plain, int(heartbeat_s * 1000))
        self._plain.setsockopt(zmq.BACKLOG, BACKLOG)
        self._plain.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._plain.setsockopt(zmq.CURVE_SERVER, 1)
        self._plain.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
        self._plain.setsockopt(zmq.CURVE_PUBLICKEY, curve_public)
        self._plain.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        mask = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        mask |= zmq.EVENT_CLOSED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        mask |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitor = _Monitor(self._plain, mask, self._heard)
        self._monitor.start()
        self._queue: asyncio.Queue[Incoming] = asyncio.Queue(QUEUE)
        self._by_fd: dict[int, Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused_handshakes = 0
        self._spawn(self._pump())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def bind(self, host: str, port: int) -> int:
        """Listen; port 0 picks a free one. Returns the port.

        Raises:
            PortInUse, LinkError.
        """
        try:
            self._plain.bind(_endpoint(host, port) if port else _endpoint(host, 0))
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise PortInUse(
                    f"port {port} on {host} is in use by another program.",
                    action=PortInUse.default_action(),
                ) from error
            raise LinkError(
                f"cannot listen on {host}:{port}: {error.strerror}.",
                action="Set `[federation] listen` to an address of this machine.",
            ) from error
        last = self._plain.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(last.rstrip("\0").rsplit(":", 1)[1])

    def _heard(self, event: int, value: int) -> None:  # monitor's thread
        if event == zmq.EVENT_DISCONNECTED:
            with contextlib.suppress(RuntimeError):  # the loop may be closing
                self._loop.call_soon_threadsafe(self._departed, value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused_handshakes += 1

    def _departed(self, fd: int) -> None:
        left = self._by_fd.pop(fd, None)
        if left is not None:
            self._spawn(self._queue.put(Incoming(left.route, left.conn, left.key)))

    async def _pump(self) -> None:
        received = 0
        while True:
            frames: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
            await self._queue.put(self._incoming(frames))
            received += 1
            if received % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def recv(self) -> Incoming:
        """Wait for the next message, or for the departure of a peer that had spoken."""
        return await self._queue.get()

    def _incoming(self, frames: list[zmq.Frame]) -> Incoming:
        first = frames[-1]
        peer = Incoming(
            route=frames[0].bytes,
            conn=int(str(first.get("X-Conn"))),
            key=bytes.fromhex(str(first.get("User-Id"))),
        )
        self._by_fd[int(first.get(zmq.SRCFD))] = peer
        return Incoming(peer.route, peer.conn, peer.key, tuple(f.bytes for f in frames[1:]))

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if the peer is gone or does not read."""
        try:
            self._plain.send_multipart([route, *frames], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def cut(self, conn: int) -> None:
        """Shut the TCP connection of one peer down at once."""
        for fd, peer in list(self._by_fd.items()):
            if peer.conn == conn:
                # libzmq owns the descriptor: work on a duplicate, so that a number that was
                # reused meanwhile is never closed under somebody else.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as twin:
                    twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and end the threads."""
        for task in list(self._tasks):
            task.cancel()
        self._plain.disable_monitor()
        self._monitor.join(timeout=5)
        self._socket.close(0)
        self._context.destroy(0)


class Dealer:
    """The client's DEALER socket to one server address at a time.

    Args:
        server_key: the server's 32-byte CURVE key, pinned at enrolment.
        retry_s: pause before a refused connection is tried again; libzmq itself retries
            lost ones, but never one that the gate refused.
    """

    def __init__(
        self,
        *,
        curve_secret: bytes,
        curve_public: bytes,
        server_key: bytes,
        heartbeat_s: float = 10.0,
        retry_s: float = 5.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._keys = (curve_secret, curve_public, server_key)
        self._heartbeat_ms = int(heartbeat_s * 1000)
        self._retry_s = retry_s
        self._queue: asyncio.Queue[LinkNews | tuple[bytes, ...]] = asyncio.Queue(QUEUE)
        self._endpoint = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = self._context.socket(zmq.DEALER)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        _common_options(self._plain, self._heartbeat_ms)
        self._plain.setsockopt(zmq.IMMEDIATE, 1)
        self._plain.setsockopt(zmq.RECONNECT_IVL, 200)
        self._plain.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        self._plain.setsockopt(zmq.CURVE_SECRETKEY, curve_secret)
        self._plain.setsockopt(zmq.CURVE_PUBLICKEY, curve_public)
        self._plain.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        mask = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        mask |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        mask |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_CLOSED
        self._monitor = _Monitor(self._plain, mask, self._heard)
        self._monitor.start()
        self._up = False
        self._spawn(self._pump())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, state: str, reason: str = "") -> None:
        self._spawn(self._queue.put(LinkNews(state, reason)))

    async def _pump(self) -> None:
        received = 0
        while True:
            frames = await self._socket.recv_multipart()
            await self._queue.put(tuple(frames))
            received += 1
            if received % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def connect(self, host: str, port: int) -> None:
        """Start connecting; `recv` tells when the link is up."""
        self._endpoint = _endpoint(host, port)
        self._plain.connect(self._endpoint)

    def _heard(self, event: int, _value: int) -> None:  # monitor's thread
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._link_event, event)

    def _link_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up = True
            self._tell("up")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._tell("refused", "unknown_client")
            self._loop.call_later(self._retry_s, self._connect_again)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._tell("refused", "wrong_server_key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._tell("refused", "not_fcil")
            self._loop.call_later(self._retry_s, self._connect_again)
        elif event == zmq.EVENT_DISCONNECTED and self._up:
            self._up = False
            self._tell("down")
        elif event == zmq.EVENT_CONNECT_RETRIED and not self._up:
            self._tell("down", "unreachable")

    def _connect_again(self) -> None:
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.ZMQError):
            self._plain.disconnect(self._endpoint)
        with contextlib.suppress(zmq.ZMQError):
            self._plain.connect(self._endpoint)

    async def recv(self) -> LinkNews | tuple[bytes, ...]:
        """Wait for the next message, or for news of the link itself."""
        return await self._queue.get()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message without waiting; False if there is no live connection."""
        try:
            self._plain.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """End the link; what was not sent is lost here, never in the outbox."""
        for task in list(self._tasks):
            task.cancel()
        self._plain.disable_monitor()
        self._monitor.join(timeout=5)
        self._socket.close(0)
        self._context.destroy(0)
