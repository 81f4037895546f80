"""The kernel's counts of one TCP connection, read independently of its owner.

Linux keeps ``struct tcp_info`` for every socket (``linux/tcp.h``). A `Probe` holds a second handle
of the socket that libzmq made, so it can be read without libzmq's knowledge. Held handles keep a
connection from ending: a probe is closed as soon as libzmq has closed its own handle, and its last
counts stay known.

Other systems have no such counts: `open_probe` returns None, and only predictions are available.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from dataclasses import dataclass

_TCP_INFO = 11  # getsockopt at level IPPROTO_TCP
_SO_COOKIE = 57  # at level SOL_SOCKET: a number unique among sockets until the next boot
_SIZE = 232
# options u8 | bytes_acked, bytes_received u64 | segs_out, segs_in u32 | bytes_sent, retrans u64
_OPTIONS_AT, _BYTES_AT, _SEGMENTS_AT, _SENT_AT = 5, 120, 136, 200
_NEEDED = _SENT_AT + 16
_RECEIVED, _RECEIVED_AT = struct.Struct("=Q"), _BYTES_AT + 8
_TIMESTAMPS = 0x01  # in options: every segment carries 12 more bytes
_WRAP = 1 << 32
# The end of a stream (FIN) is numbered like a byte, and counted as one, in these states:
# TIME_WAIT 6, CLOSE_WAIT 8, LAST_ACK 9, CLOSING 11, and FIN_WAIT2 5, TIME_WAIT 6.
_HEARD_THE_END, _END_CONFIRMED = (6, 8, 9, 11), (5, 6)

# Ethernet 14, TCP 20, and the IP header: overhead of a segment.
_ETHERNET_AND_TCP = 14 + 20
_IPV4, _IPV6, _TIMESTAMP_BYTES = 20, 40, 12


@dataclass(frozen=True)
class TcpCounts:
    """Bytes of one connection, or their growth, seen from this end.

    Attributes:
        received: TCP payload that arrived, each byte once.
        acked: TCP payload that the other end confirmed.
        retransmitted: payload bytes sent again.
        link_up, link_down: bytes of Ethernet frames towards this end and away from it,
            repetitions included, if segments were not merged by the device.
    """

    received: int = 0
    acked: int = 0
    retransmitted: int = 0
    link_up: int = 0
    link_down: int = 0

    def __add__(self, other: TcpCounts) -> TcpCounts:
        return TcpCounts(
            self.received + other.received,
            self.acked + other.acked,
            self.retransmitted + other.retransmitted,
            self.link_up + other.link_up,
            self.link_down + other.link_down,
        )

    def __sub__(self, other: TcpCounts) -> TcpCounts:
        return TcpCounts(
            self.received - other.received,
            self.acked - other.acked,
            self.retransmitted - other.retransmitted,
            self.link_up - other.link_up,
            self.link_down - other.link_down,
        )


def duplicate_socket(fd: int) -> socket.socket | None:
    """Return a second handle of another owner's TCP socket; None if there is none.

    Its owner may close it at any moment, and the number may then belong to another file.
    """
    try:
        number = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=number)
    except OSError:  # the number belongs to a file meanwhile
        os.close(number)
        return None


def shut_down(fd: int) -> None:
    """Shut down a TCP connection; its owner then closes it."""
    handle = duplicate_socket(fd)
    if handle is not None:
        with handle, contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)


def open_probe(fd: int) -> Probe | None:
    """Return a probe of the TCP connection behind a descriptor; None if there is none.

    There is none if the descriptor is no TCP socket (any more), or the system keeps no counts.
    """
    handle = duplicate_socket(fd)
    if handle is None:
        return None
    probe = Probe(handle)
    if probe.read() is None:
        probe.close()
        return None
    return probe


class Probe:
    """Reads one connection's counts until it is closed.

    Args:
        handle: a handle of the socket; the probe closes it.

    Attributes:
        cookie: unique among all sockets since the machine started; 0 if unknown.
    """

    def __init__(self, handle: socket.socket) -> None:
        self._handle = handle
        self._header = _ETHERNET_AND_TCP + (_IPV6 if _is_ipv6(handle) else _IPV4)
        self._segments_out = _Wrapping()
        self._segments_in = _Wrapping()
        self._last = TcpCounts()
        self.cookie = _cookie(handle)

    def fileno(self) -> int:
        """Return the handle's descriptor; -1 once the probe is closed."""
        return self._handle.fileno()

    @property
    def last(self) -> TcpCounts:
        """The counts of the last `read`."""
        return self._last

    def read(self) -> TcpCounts | None:
        """Read the kernel's counts; None once the probe is closed, or if the system has none."""
        try:
            info = self._handle.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE)
        except (OSError, AttributeError):
            return None
        if len(info) < _NEEDED:
            return None  # a kernel before 4.19 does not report sent bytes
        acked, received = struct.unpack_from("=QQ", info, _BYTES_AT)
        out, into = struct.unpack_from("=II", info, _SEGMENTS_AT)
        sent, retransmitted = struct.unpack_from("=QQ", info, _SENT_AT)
        stamped = bool(info[_OPTIONS_AT] & _TIMESTAMPS)
        per_segment = self._header + (_TIMESTAMP_BYTES if stamped else 0)
        self._last = TcpCounts(
            received=received - (info[0] in _HEARD_THE_END),
            acked=acked - (info[0] in _END_CONFIRMED),
            retransmitted=retransmitted,
            link_up=received + self._segments_in.at(into) * per_segment,
            link_down=sent + self._segments_out.at(out) * per_segment,
        )
        return self._last

    def received(self) -> int:
        """Return only the bytes that arrived; 0 once the probe is closed."""
        try:
            info = self._handle.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE)
        except (OSError, AttributeError):
            return 0
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0]) if len(info) >= _NEEDED else 0

    def shut_down(self) -> None:
        """Shut down the connection; its owner closes it then."""
        with contextlib.suppress(OSError):
            self._handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> TcpCounts:
        """Read a last time, close the handle, and return the last counts."""
        self.read()
        with contextlib.suppress(OSError):
            self._handle.close()
        return self._last


class _Wrapping:
    """A 32-bit counter that continues beyond 32 bits, if it is read often enough."""

    def __init__(self) -> None:
        self._last = 0
        self._turns = 0

    def at(self, value: int) -> int:
        self._turns += value < self._last
        self._last = value
        return self._turns * _WRAP + value


def _cookie(handle: socket.socket) -> int:
    try:
        raw = handle.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
    except OSError:
        return 0
    return int.from_bytes(raw, sys.byteorder)


def _is_ipv6(handle: socket.socket) -> bool:
    """Return True if its packets are IPv6: a socket for both kinds carries mapped addresses."""
    if handle.family != socket.AF_INET6:
        return False
    try:
        return not str(handle.getpeername()[0]).startswith("::ffff:")
    except OSError:
        return False
