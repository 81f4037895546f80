"""Which connection a descriptor is now: the system uses numbers again, and news come late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from fcil_protocol.link.interface import Incoming


class Descriptors:
    """The connections of a server that have spoken, by descriptor."""

    def __init__(self) -> None:
        self._by_fd: dict[int, Incoming] = {}  # who spoke last on it
        # News of ends: the descriptor, and the newest connection's number then. Whatever has
        # that number or a smaller one on that descriptor is over.
        self._ended: deque[tuple[int, int]] = deque()
        self._over: dict[int, int] = {}

    def end(self, fd: int, newest: int) -> None:
        """Note that a descriptor's connection has ended, up to this number."""
        self._ended.append((fd, newest))

    def departures(self) -> Iterator[Incoming]:
        """Yield who has gone; to be asked when nothing is left to read, as words come first."""
        while self._ended:
            fd, newest = self._ended.popleft()
            self._over[fd] = newest
            if fd in self._by_fd and self._by_fd[fd].conn <= newest:
                yield self._by_fd.pop(fd)

    def is_left_behind(self, fd: int, conn: int) -> bool:
        """Say whether a connection was reported as gone, so that nobody waits for its words."""
        known = self._by_fd.get(fd)
        return conn <= self._over.get(fd, 0) or (known is not None and known.conn > conn)

    def is_over(self, fd: int, conn: int) -> bool:
        """Say whether a descriptor may be another connection's by now."""
        ended = any(fd == other and conn <= newest for other, newest in self._ended)
        return ended or self.is_left_behind(fd, conn)

    def spoke(self, fd: int, peer: Incoming) -> Incoming | None:
        """Note whose a descriptor is; return who had it before, if nobody said that it went."""
        known = self._by_fd.get(fd)
        self._by_fd[fd] = peer
        return known

    def is_new(self, fd: int, conn: int) -> bool:
        """Say whether a connection speaks for the first time."""
        known = self._by_fd.get(fd)
        return known is None or known.conn < conn

    def of(self, conn: int) -> tuple[int, Incoming] | None:
        """Return the descriptor of a connection that lives, and whose it is."""
        for fd, peer in self._by_fd.items():
            if peer.conn == conn and not self.is_over(fd, conn):
                return fd, peer
        return None


class Silent:
    """The connections on which nobody has spoken yet; they end after some time.

    Args:
        after_s: how long they may be silent.
        cut: ends the connection of a descriptor.
    """

    def __init__(self, after_s: float, cut: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._after_s = after_s
        self._cut = cut
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def began(self, fd: int) -> None:
        """A connection was accepted."""
        self.spoke(fd)
        self._timers[fd] = self._loop.call_later(self._after_s, self._over, fd)

    def spoke(self, fd: int) -> None:
        """Somebody spoke on it, or it has ended."""
        timer = self._timers.pop(fd, None)
        if timer is not None:
            timer.cancel()

    def _over(self, fd: int) -> None:
        del self._timers[fd]
        self._cut(fd)

    def close(self) -> None:
        """Wait for nobody any more."""
        for timer in self._timers.values():
            timer.cancel()
