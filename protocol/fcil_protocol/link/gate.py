"""Admission of connections to a server's socket, and news of their ends.

libzmq asks over ZAP, once for each handshake. A CURVE socket without a ZAP handler admits every
key, so the gate runs before any socket is bound.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Callable

import zmq

from fcil_protocol.link.interface import ComeAgain

ZAP_DOMAIN = b"fcil"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MONITOR_EVENT = struct.Struct("=HI")  # of a monitor: event, and its descriptor or error number


class Gate(threading.Thread):
    """The server's gate thread: calls ``admit(key)`` for every handshake, hears every end.

    It also calls ``watch()``, which returns the milliseconds until its next call, or None: not
    before there is news. A thread of its own notices a flood while the event loop is busy.

    An undrained monitor lets strangers block libzmq. Both jobs share one thread to keep their
    order: every end before a handshake is reported before the new connection gets its number, so
    ``heard(event, fd, number)``, with the newest number assigned so far, tells which connections of
    a descriptor the event can concern. ``numbers`` returns the number of the next connection, which
    is larger than those before.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        admit: Callable[[bytes], bool],
        heard: Callable[[int, int, int], None],
        watch: Callable[[], int | None],
        numbers: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(name="fcil-gate", daemon=True)
        self._admit = admit
        self._heard = heard
        self._watch = watch
        self._numbers = numbers or itertools.count(1).__next__
        self._conn = 0
        # Bound here, in the caller's thread: no socket may listen before the gate runs.
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._monitor: zmq.Socket[bytes]

    def guard(self, sock: zmq.Socket[bytes], mask: int) -> None:
        """Start watching a server socket that does not listen yet."""
        self._monitor = sock.get_monitor_socket(mask)
        self.start()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):
            while True:
                ready = dict(poller.poll(self._watch()))
                request = self._socket.recv_multipart() if self._socket in ready else None
                self._listen()
                if request is not None:
                    self._socket.send_multipart(self._answer(request))
        self._monitor.close(0)
        self._socket.close(0)

    def _listen(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event, value = MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
                self._heard(event, value, self._conn)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id = request[0], request[1]
        mechanism, key = (request[5], request[6]) if len(request) > 6 else (b"", b"")
        curve = mechanism == b"CURVE" and len(key) == 32
        status = self._ask(key) if curve else b"400"
        if status != b"200":
            return [version, request_id, status, b"not now, or not on the allow-list", b"", b""]
        self._conn = self._numbers()
        name, value = b"X-Conn", str(self._conn).encode()
        metadata = bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        return [version, request_id, b"200", b"", key.hex().encode(), metadata]

    def _ask(self, key: bytes) -> bytes:
        """Return ZAP's status: 200, 400, or 500 for a key that may come again."""
        try:
            return b"200" if self._admit(key) else b"400"
        except ComeAgain:
            return b"500"
        except Exception:
            return b"400"  # a gate that cannot decide refuses
