"""A server that answers whoever greets it with more bytes than anybody asked for.

It holds the true server's keys, as a relay that lies holds its own: plain libzmq, no session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import zmq

from fcil_protocol.link.gate import MONITOR_EVENT
from fcil_protocol.trust.keys import PrivateKeys


class LyingServer:
    """Listens at a port of loopback.

    Attributes:
        cut: connections that the other end has closed.
    """

    def __init__(self, port: int, keys: PrivateKeys) -> None:
        self.cut = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.curve_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.curve)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(f"tcp://127.0.0.1:{port}")

    def flood(self, messages: Sequence[tuple[bytes, int]]) -> None:
        """Wait for a greeting, and answer with messages of the same frame so many times each.

        Returns once the connection is cut.
        """
        route, *_ = self._socket.recv_multipart()
        before = self.cut
        for frame, count in messages:
            with contextlib.suppress(zmq.ZMQError):  # it was cut meanwhile
                self._socket.send(route, zmq.SNDMORE)
                for number in range(1, count + 1):
                    more = zmq.SNDMORE if number < count else 0
                    self._socket.send(frame, more, copy=len(frame) < 4096)
        while self.cut == before:
            event, _ = MONITOR_EVENT.unpack(self._monitor.recv_multipart()[0])
            self.cut += event == zmq.EVENT_DISCONNECTED

    def close(self) -> None:
        """Stop listening."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
