"""The kernel's counts of a server's connections, by connection number.

Connections are made and end in the gate's thread, messages are read in the loop's: both
sides call in here. A connection is known by its descriptor first, and by its number once it
has spoken; what nobody ever spoke on is counted under `SILENT`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fcil_protocol.link.backlog import UnreadBytes
from fcil_protocol.link.tcp_info import Probe, TcpCounts, open_probe

SILENT = 0  # the number of all connections on which nobody has spoken yet
_NOTHING = TcpCounts()


@dataclass
class _Watched:
    probe: Probe
    told: TcpCounts
    conn: int = SILENT
    unread: UnreadBytes = field(default_factory=UnreadBytes)
    cut: bool = False  # its end is on its way

    def growth(self, now: TcpCounts) -> TcpCounts:
        grown, self.told = now - self.told, now
        return grown


@dataclass
class ConnectionCounts:
    """Holds a probe for every live connection; `take` returns what has been counted since."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _live: dict[int, _Watched] = field(default_factory=dict)  # by descriptor
    _ended: dict[int, TcpCounts] = field(default_factory=dict)  # by connection number
    _before: dict[int, _Watched] = field(default_factory=dict)  # who had a descriptor last

    def began(self, fd: int) -> None:
        """A connection was accepted on a descriptor."""
        with self._lock:
            self._end(fd)
            probe = open_probe(fd)
            if probe is None:
                return
            before = self._before.get(fd)
            # Told late of a connection that is over, we may have found its successor already.
            same = before is not None and before.probe.cookie == probe.cookie != 0
            self._live[fd] = _Watched(probe, before.told if before and same else _NOTHING)

    def ended(self, fd: int) -> None:
        """The owner of a descriptor has closed it: let the connection end."""
        with self._lock:
            self._end(fd)

    def spoke(self, fd: int, conn: int, allowed: int) -> None:
        """A message came; its connection has a number now, and so many bytes may lie unread."""
        with self._lock:
            watched = self._live.get(fd)
            if watched is not None:
                watched.conn = conn
                watched.unread.allowed = allowed

    def delivered(self, fd: int, size: int) -> None:
        """A message of so many bytes on the wire was read."""
        watched = self._live.get(fd)
        if watched is not None:
            watched.unread.delivered += size

    def cut_floods(self, now: float) -> list[tuple[int, int]]:
        """End every connection of which more lies unread than may.

        Returns:
            Connection number and unread bytes of each.
        """
        found = []
        with self._lock:
            for watched in self._live.values():
                if watched.cut:
                    continue
                if watched.unread.is_over(watched.probe.received, now):
                    watched.cut = True
                    watched.probe.shut_down()
                    found.append((watched.conn, watched.unread.ahead))
        return found

    def __len__(self) -> int:
        return len(self._live)

    def take(self) -> Mapping[int, TcpCounts]:
        """Return connection number -> growth since the last call; what did not grow is left out.

        What a connection carried before its first message counts to its number too; one on
        which nobody ever speaks is told at its end, under `SILENT`.
        """
        with self._lock:
            grown: defaultdict[int, TcpCounts] = defaultdict(TcpCounts, self._ended)
            self._ended = {}
            for watched in self._live.values():
                now = watched.probe.read()
                if now is not None and watched.conn != SILENT:
                    grown[watched.conn] += watched.growth(now)
        return {conn: counts for conn, counts in grown.items() if counts != _NOTHING}

    def close(self) -> None:
        """Let all connections go."""
        with self._lock:
            for fd in list(self._live):
                self._end(fd)

    def _end(self, fd: int) -> None:
        watched = self._live.pop(fd, None)
        if watched is not None:
            self._before[fd] = watched
            growth = watched.growth(watched.probe.close())
            self._ended[watched.conn] = self._ended.get(watched.conn, _NOTHING) + growth
