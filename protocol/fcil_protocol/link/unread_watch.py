"""The client's side of the limits of unread bytes (`backlog`): detection without a timer.

A device that waits for its next round must not wake up forty times a second to look at a counter.
So the kernel says when bytes arrive, also those of a message that is never completed, and only then
is their number read. Where the kernel has no such counts (not Linux), nothing is watched.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fcil_protocol.link.backlog import UnreadBytes
from fcil_protocol.link.tcp_info import Probe, open_probe

PAUSE_S = 0.025  # between two looks at connections that receive: 25 MB at 1 GB/s


@dataclass
class WatchedConnection:
    """One connection of a link.

    Attributes:
        flooded: called when the connection is cut, once.
        unread: its unread bytes, and how many may be.
        is_cut: its end is pending.
    """

    probe: Probe
    flooded: Callable[[], None]
    unread: UnreadBytes = field(default_factory=UnreadBytes)
    is_cut: bool = False

    def check(self) -> None:
        """Cut the connection if more is unread than allowed."""
        if self.unread.is_over(self.probe.received, time.monotonic()):
            self.cut()

    def cut(self) -> None:
        """Cut the connection; its owner closes it then."""
        if not self.is_cut:
            self.is_cut = True
            self.probe.shut_down()
            self.flooded()


class UnreadWatch:
    """Cuts connections of this process whose peers send more than was requested.

    It takes one descriptor for all connections, and one for each.
    """

    def __init__(self) -> None:
        self._poll: select.epoll | None = None  # while there are connections
        self._loop: asyncio.AbstractEventLoop
        self._watched: dict[int, WatchedConnection] = {}  # by the probe's descriptor
        self._timer: asyncio.TimerHandle | None = None
        self._receiving: set[int] = set()  # descriptors that received before the pause

    def begin(self, fd: int, allowed: int, flooded: Callable[[], None]) -> WatchedConnection | None:
        """Watch the connection of a descriptor; None if the kernel does not count its bytes.

        Its owner calls `end` as soon as it is closed: until then it stays half open.
        """
        probe = open_probe(fd)
        if probe is None:
            return None
        if self._poll is None:
            self._poll, self._loop = select.epoll(), asyncio.get_running_loop()
            self._loop.add_reader(self._poll.fileno(), self._look)
        watched = WatchedConnection(probe, flooded, UnreadBytes(allowed))
        self._watched[probe.fileno()] = watched
        # Edges: bytes that libzmq has not read yet are no news a second time.
        self._poll.register(probe.fileno(), select.EPOLLIN | select.EPOLLET)
        return watched

    def end(self, watched: WatchedConnection) -> None:
        """Release a connection."""
        fd = watched.probe.fileno()
        if self._watched.pop(fd, None) is None or self._poll is None:
            return
        self._poll.unregister(fd)
        self._receiving.discard(fd)
        watched.probe.close()
        if not self._watched:
            self._stop()

    def _look(self) -> None:
        """Look at the connections that have received, and then pause."""
        assert self._poll is not None, "its descriptor called"
        self._timer = None
        again, self._receiving = self._receiving, {fd for fd, _ in self._poll.poll(0)}
        for fd in again | self._receiving:
            watched = self._watched.get(fd)
            if watched is not None and not watched.is_cut:
                watched.check()
        if self._receiving:
            self._loop.remove_reader(self._poll.fileno())
            self._timer = self._loop.call_later(PAUSE_S, self._look)
        else:
            self._loop.add_reader(self._poll.fileno(), self._look)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None
