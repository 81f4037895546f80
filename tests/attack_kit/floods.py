"""Floods of bytes against a server's or a relay's port, each bounded in bytes and in time.

Whoever floods has keys that pass the gate (a ticket's, a former member's, a member's) and obeys
nothing else: plain libzmq, no credit, no answer read. All functions block until the flood was
taken whole, its connection was cut, or `limit_s` is over; from an event loop call them with
`asyncio.to_thread`. Loopback only: they take what bandwidth there is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

import fcil_protocol
from fcil_protocol.errors import CutOff
from fcil_protocol.link.gate import MONITOR_EVENT
from fcil_protocol.link.tcp_info import Probe, open_probe
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Hello, Nack, Update, Welcome
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

QUIET_S = 1.0  # nothing more is taken for so long: the flood is over, or stuck


@dataclass(frozen=True)
class Taken:
    """How a flood ended.

    Attributes:
        sent: TCP payload that the other end confirmed, in bytes.
        cut: the other end closed the connection.
    """

    sent: int
    cut: bool


class Flooder:
    """One connection of somebody who sends what it likes.

    Args:
        address: HOST:PORT of a server or a relay.
        server_key: its 32-byte CURVE key.
        keys: whose CURVE key passes its gate.
        limit_s: longest that the connection is used.

    Raises:
        ConnectionRefusedError: the gate did not let this key in (now).
    """

    def __init__(
        self, address: str, server_key: bytes, keys: PrivateKeys, *, limit_s: float = 30.0
    ) -> None:
        self._ends = time.monotonic() + limit_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)  # without a limit: nobody is there any more
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.curve_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.curve)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        self._probe: Probe | None = None
        self._refused = False
        self.cut = False
        self._socket.connect(f"tcp://{address}")
        while self._event() != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self.cut or self._refused or time.monotonic() > self._ends:
                self.close()
                raise ConnectionRefusedError("the gate did not let this key in.")

    def _event(self, wait_ms: int = 50) -> int:
        if not self._monitor.poll(wait_ms):
            return 0
        event, value = MONITOR_EVENT.unpack(self._monitor.recv_multipart()[0])
        if event == zmq.EVENT_CONNECTED:
            self._probe = open_probe(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self.cut = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refused = True
        return int(event)

    @property
    def sent(self) -> int:
        """TCP payload that the other end confirmed so far, in bytes."""
        counts = self._probe.read() if self._probe else None
        return counts.acked if counts else (self._probe.last.acked if self._probe else 0)

    def say(self, frames: Sequence[bytes]) -> bool:
        """Queue one message; return whether there is somebody to send it to."""
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again:
            return False
        return True

    def say_one(self, frame: bytes, count: int) -> None:
        """Queue one message that has the same frame so many times."""
        copy = len(frame) < 4096  # larger ones are not copied, and cost this side nothing
        with contextlib.suppress(zmq.Again):  # it was cut meanwhile
            for _ in range(count - 1):
                self._socket.send(frame, zmq.SNDMORE, copy=copy)
            self._socket.send(frame, copy=copy)

    def hear(self) -> list[bytes]:
        """Return the next answer.

        Raises:
            TimeoutError: none came in time.
        """
        if not self._socket.poll(max(0, int((self._ends - time.monotonic()) * 1000))):
            raise TimeoutError("no answer came.")
        return self._socket.recv_multipart()

    def wait(self) -> Taken:
        """Wait until what was queued is taken, or the connection is cut; then close."""
        last, since = -1, time.monotonic()
        while not self.cut and time.monotonic() < self._ends:
            self._event()
            if self.sent != last:
                last, since = self.sent, time.monotonic()
            elif time.monotonic() - since > QUIET_S:
                break
        taken = Taken(self.sent, self.cut)
        self.close()
        return taken

    def close(self) -> None:
        """End the connection."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        if self._probe is not None:
            self._probe.close()
        self._context.term()


@contextlib.contextmanager
def flooder(
    address: str, server_key: bytes, keys: PrivateKeys, *, limit_s: float
) -> Iterator[Flooder]:
    """Connect, and close whatever happens."""
    made = Flooder(address, server_key, keys, limit_s=limit_s)
    try:
        yield made
    finally:
        with contextlib.suppress(zmq.ZMQError):
            made.close()


def one_message(
    address: str,
    server_key: bytes,
    keys: PrivateKeys,
    *,
    frames: int,
    size: int,
    limit_s: float = 30.0,
) -> Taken:
    """Send one message of many frames, of so many bytes each.

    Args:
        address: HOST:PORT of a server or a relay. server_key: its CURVE key.
        keys: a ticket's, a former member's or a member's.
        frames, size: together at most what the machine that sends has room for if the frames
            are small (64 bytes each); large ones are all the same piece of memory.
        limit_s: longest that it takes.
    """
    with flooder(address, server_key, keys, limit_s=limit_s) as made:
        made.say_one(bytes(size), frames)
        return made.wait()


def update_headers(
    address: str,
    server: PublicKeys,
    keys: PrivateKeys,
    *,
    federation: str,
    client: str,
    count: int,
    size: int,
    limit_s: float = 30.0,
    relay_key: bytes = b"",
) -> Taken:
    """Begin a member's session and announce updates whose headers have bad signatures.

    Args:
        address: HOST:PORT of the server, or of a relay with its ``relay_key``.
        server: the server's certified keys.
        keys, federation, client: the member.
        count, size: how many, each with one header of so many bytes.
        limit_s: longest that it takes.

    Raises:
        ConnectionRefusedError: the gate lets the member in no more, or the server has cut it off.
    """
    with flooder(address, relay_key or server.curve, keys, limit_s=limit_s) as made:
        channel = Channel(keys, server)
        made.say(channel.frames(_hello(channel, federation, client)))
        received = parse(made.hear())
        welcome = received.message
        if isinstance(welcome, Nack) and welcome.code == CutOff.code:
            raise ConnectionRefusedError(welcome.text)
        assert isinstance(welcome, Welcome), f"the server answered {welcome.type}"
        channel.peer_nonce = welcome.server_nonce
        header = bytes(size)
        for number in range(count):
            if not made.say(
                channel.frames(Update(digest=f"{number:064x}"), header, bytes(64), b"")
            ):
                break
        return made.wait()


def _hello(channel: Channel, federation: str, client: str) -> Hello:
    return Hello(
        nonce=channel.nonce,
        protocol=fcil_protocol.PROTOCOL_VERSION,
        oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
        package="0",
        federation=federation,
        client=client,
        methods=["running_mean==1"],
        takes_compact=True,
    )
