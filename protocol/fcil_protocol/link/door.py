"""Descriptors for the process's own work: strangers cannot take the last ones.

libzmq accepts as many connections as the system lets the process open, and a server without a
descriptor can neither write its ledger nor start its worker. So there is a largest number of
connections, beyond which `ConnectionCounts` cuts silent ones. Many that come in a moment are in
before that is noticed: then the listening socket is closed to new connections until descriptors are
free. The kernel drops their packets, and their senders try again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import sys

from fcil_protocol.link.tcp_info import duplicate_socket

SPARE = 256  # descriptors that are not for connections, at least
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # at level SOL_SOCKET (asm-generic/socket.h)
# A packet filter of one instruction, "accept 0 bytes" (linux/filter.h: code, jt, jf, k). The buffer
# lasts: the kernel reads it when it is attached.
_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
_NO_VALUE = struct.pack("@i", 0)
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_NOTHING))


def spare_descriptors() -> int:
    """Return how many descriptors are not for connections: a sixteenth, at least `SPARE`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(SPARE, 0 if soft == resource.RLIM_INFINITY else soft // 16)


class Door:
    """A server's listening socket, shut while descriptors are short; used by the gate's thread.

    Args:
        spare: descriptors that are not for connections.

    Attributes:
        most: connections that the others are for. Each takes two: libzmq's, and a handle that
            counts its bytes (`tcp_info`).
        is_shut: new connections wait.
    """

    def __init__(self, spare: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        self.most = max(1, (limit - spare) // 2)
        self.is_shut = False
        self._shuts_at = max(1, limit - spare // 2)  # the lowest free one
        self._opens_at = max(1, limit - spare * 3 // 4)
        self._listener: socket.socket | None = None

    def guard(self, fd: int) -> None:
        """Guard the socket that listens on a descriptor."""
        self.close()
        self._listener = duplicate_socket(fd)
        if self._listener is not None:  # an earlier process may have shut it
            self._filter(_DETACH_FILTER, _NO_VALUE)

    def shut_if_crowded(self) -> None:
        """Shut the door if too few descriptors are free now."""
        if not self.is_shut and self._lowest_free() >= self._shuts_at:
            self.is_shut = self._filter(_ATTACH_FILTER, _PROGRAM)

    def open_if_room(self) -> None:
        """Let connections in again once there are descriptors for some."""
        if self.is_shut and self._lowest_free() < self._opens_at:
            self.is_shut = not self._filter(_DETACH_FILTER, _NO_VALUE)

    def _lowest_free(self) -> int:
        """Return the number that the next descriptor gets: the lowest that is free."""
        if self._listener is None:
            return 0
        try:
            number = os.dup(self._listener.fileno())
        except OSError:
            return sys.maxsize
        os.close(number)
        return number

    def _filter(self, option: int, value: bytes) -> bool:
        assert self._listener is not None, "a door without a listener is never crowded"
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError:  # the system has no such filters
            return False
        return True

    def close(self) -> None:
        """Release the listening socket, which its owner closes."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.close()
            self._listener = None
