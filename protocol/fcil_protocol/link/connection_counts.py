"""The kernel's counts of a server's connections, by connection number.

Connections begin and end in the gate's thread, messages are read in the loop's: both call this
module. A connection is identified by its descriptor first, and by its number after its first
message; all connections without a message are counted under `SILENT`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fcil_protocol.link.backlog import UnreadBytes
from fcil_protocol.link.tcp_info import Probe, TcpCounts, open_probe

STEP = 64  # connections that are read in one go: 1 ms
SILENT = 0  # number of all connections without a message so far
# Bytes of ZMTP's greeting and CURVE's HELLO (RFC 23, 26): a sender of more knows a key, as a rule.
_HELLO_BYTES = 64 + 202
_LOOKS = 16  # at most, for one that sent no more than that
_NOTHING = TcpCounts()


@dataclass
class _Watched:
    probe: Probe
    told: TcpCounts
    conn: int = SILENT
    unread: UnreadBytes = field(default_factory=UnreadBytes)
    cut: bool = False  # its end is pending

    def growth(self, now: TcpCounts) -> TcpCounts:
        grown, self.told = now - self.told, now
        return grown


@dataclass
class ConnectionCounts:
    """A probe for every live connection; `take` returns the counts since its last call.

    Attributes:
        most: connections that may be open at once.
    """

    most: int = sys.maxsize
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: dict[int, _Watched] = field(default_factory=dict)  # by descriptor
    _ended: dict[int, TcpCounts] = field(default_factory=dict)  # by connection number
    _before: dict[int, _Watched] = field(default_factory=dict)  # previous one of a descriptor
    _silent: dict[int, _Watched] = field(default_factory=dict)  # of `_live`, oldest first
    _cut: int = 0  # of `_live`, those whose end is pending

    def began(self, fd: int) -> bool:
        """Start counting a connection that was accepted on a descriptor.

        If there are too many, the one that has been silent for longest is cut: an admitted client
        speaks at once. One whose first message may wait to be read is spared.

        Returns:
            True if one was cut.
        """
        with self._lock:
            self._end(fd)
            probe = open_probe(fd)
            if probe is None:
                return False
            before = self._before.get(fd)
            # Late news of a closed connection may find its successor on the descriptor.
            same = before is not None and before.probe.cookie == probe.cookie != 0
            watched = _Watched(probe, before.told if before and same else _NOTHING)
            self._live[fd] = self._silent[fd] = watched
            if len(self._live) - self._cut <= self.most:
                return False
            self._shut_down(self._longest_silent())
            return True

    def ended(self, fd: int) -> None:
        """Release the connection of a descriptor that its owner has closed."""
        with self._lock:
            self._end(fd)

    def spoke(self, fd: int, conn: int, allowed: int) -> None:
        """Give a connection its number with its first message, and its limit of unread bytes."""
        with self._lock:
            watched = self._live.get(fd)
            if watched is not None:
                watched.conn = conn
                watched.unread.allowed = allowed
                self._silent.pop(fd, None)

    def delivered(self, fd: int, frames: Sequence[int]) -> None:
        """Count a message that was read, by the bytes of its frames on the wire."""
        watched = self._live.get(fd)
        if watched is not None:
            watched.unread.read(frames)

    def cut_floods(self, now: float) -> list[tuple[int, int]]:
        """Cut every connection with more unread bytes than allowed.

        Returns:
            Connection number and unread bytes of each.
        """
        found = []
        with self._lock:
            for fd, watched in self._live.items():
                if watched.cut:
                    continue
                if watched.unread.is_over(watched.probe.received, now):
                    self._shut_down(fd)
                    found.append((watched.conn, watched.unread.ahead))
        return found

    def __len__(self) -> int:
        return len(self._live)

    def take(self) -> Iterator[Mapping[int, TcpCounts]]:
        """Yield connection number -> growth since the last call, without unchanged ones.

        A few connections at a time: to read thousands takes longer than a loop may be late. A
        number may come twice.

        Bytes before a connection's first message count under its number too; one that ends without
        any message is counted at its end, under `SILENT`.
        """
        with self._lock:
            ended, self._ended = self._ended, {}
            live = list(self._live.values())
        yield {conn: counts for conn, counts in ended.items() if counts != _NOTHING}
        for start in range(0, len(live), STEP):
            yield self._growth_of(live[start : start + STEP])

    def _growth_of(self, some: Sequence[_Watched]) -> Mapping[int, TcpCounts]:
        grown: dict[int, TcpCounts] = {}
        with self._lock:
            for watched in some:
                now = None if watched.conn == SILENT else watched.probe.read()
                if now is not None and now != watched.told:
                    grown[watched.conn] = grown.get(watched.conn, _NOTHING) + watched.growth(now)
        return grown

    def close(self) -> None:
        """Close all probes."""
        with self._lock:
            for fd in list(self._live):
                self._end(fd)

    def _longest_silent(self) -> int:
        """Return the descriptor to cut.

        Strangers can send as many bytes as members. If the oldest ones all did, age decides alone.
        """
        oldest = list(itertools.islice(self._silent, _LOOKS))
        for fd in oldest:
            if self._silent[fd].probe.received() <= _HELLO_BYTES:
                return fd
        return oldest[0]

    def _shut_down(self, fd: int) -> None:
        """Cut a connection; its owner closes it then."""
        watched = self._live[fd]
        watched.cut = True
        self._cut += 1
        self._silent.pop(fd, None)
        watched.probe.shut_down()

    def _end(self, fd: int) -> None:
        watched = self._live.pop(fd, None)
        self._silent.pop(fd, None)
        if watched is not None:
            self._cut -= watched.cut
            self._before[fd] = watched
            growth = watched.growth(watched.probe.close())
            self._ended[watched.conn] = self._ended.get(watched.conn, _NOTHING) + growth
