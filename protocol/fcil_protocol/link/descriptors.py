"""The current connection of each descriptor: the system reuses numbers, and news are late."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator

from fcil_protocol.link.interface import Incoming

AGAIN_S = 1.0  # between two looks at a silent connection while messages wait to be read


def allow_many_files() -> None:
    """Let this process open as many files as the system permits: each client takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Descriptors:
    """The connections of a server that have sent a message, by descriptor."""

    def __init__(self) -> None:
        self._by_fd: dict[int, Incoming] = {}  # the last sender
        self._fd_of: dict[int, int] = {}  # of its connection
        # News of ends, oldest first: the descriptor, and the newest connection's number then. Each
        # connection on that descriptor with that number or a smaller one is over.
        self._ended: dict[int, int] = {}
        self._over: dict[int, int] = {}  # the same news, once `departures` has told of them

    def end(self, fd: int, newest: int) -> None:
        """Record that a descriptor's connection has ended, up to this number."""
        self._ended[fd] = max(newest, self._ended.get(fd, 0))

    def departures(self) -> Iterator[Incoming]:
        """Yield closed connections; only when no message is left to read: messages come first."""
        while self._ended:
            fd = next(iter(self._ended))
            self._over[fd] = newest = self._ended.pop(fd)
            if fd in self._by_fd and self._by_fd[fd].conn <= newest:
                gone = self._by_fd.pop(fd)
                del self._fd_of[gone.conn]
                yield gone

    def is_left_behind(self, fd: int, conn: int) -> bool:
        """Return True if a connection was reported as closed, so that its messages are dropped."""
        known = self._by_fd.get(fd)
        return conn <= self._over.get(fd, 0) or (known is not None and known.conn > conn)

    def is_over(self, fd: int, conn: int) -> bool:
        """Return True if a descriptor may belong to another connection by now."""
        return conn <= self._ended.get(fd, 0) or self.is_left_behind(fd, conn)

    def spoke(self, fd: int, peer: Incoming) -> Incoming | None:
        """Record the sender on a descriptor; return its predecessor if its end was not reported."""
        known = self._by_fd.get(fd)
        if known is not None:
            del self._fd_of[known.conn]
        self._by_fd[fd], self._fd_of[peer.conn] = peer, fd
        return known

    def is_new(self, fd: int, conn: int) -> bool:
        """Return True if this is a connection's first message."""
        known = self._by_fd.get(fd)
        return known is None or known.conn < conn

    def of(self, conn: int) -> tuple[int, Incoming] | None:
        """Return a live connection's descriptor and its peer."""
        fd = self._fd_of.get(conn)
        return None if fd is None or self.is_over(fd, conn) else (fd, self._by_fd[fd])


class Silent:
    """Connections without a message so far; each is cut after some time.

    Args:
        after_s: longest silence.
        cut: ends the connection of a descriptor.
        unread: returns True if messages wait to be read, of whichever connection. When thousands
            connect in a moment, that takes longer than the longest silence.
    """

    def __init__(
        self,
        after_s: float,
        cut: Callable[[int], None],
        unread: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._after_s = after_s
        self._cut = cut
        self._unread = unread
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def began(self, fd: int) -> None:
        """Start the timer of an accepted connection."""
        self.spoke(fd)
        self._timers[fd] = self._loop.call_later(self._after_s, self._over, fd)

    def spoke(self, fd: int) -> None:
        """Stop the timer: a message arrived, or the connection has ended."""
        timer = self._timers.pop(fd, None)
        if timer is not None:
            timer.cancel()

    def _over(self, fd: int) -> None:
        if self._unread():  # perhaps one of its own
            self._timers[fd] = self._loop.call_later(AGAIN_S, self._over, fd)
            return
        del self._timers[fd]
        self._cut(fd)

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
