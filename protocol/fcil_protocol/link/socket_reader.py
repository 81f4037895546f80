"""Reader of a libzmq socket in an event loop: it misses no message and starves no other task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

QUEUE = 64  # messages read ahead; the rest is in libzmq, bounded in bytes (`backlog`)
QUEUE_BYTES = 8 << 20  # of them together, except the last one
YIELD_EVERY = 16  # messages read before timers and other tasks have their turn
MAX_FRAMES = 10  # of a message: a route, the heads of three lanes, and six
MAX_SUM_BYTES = 3 << 20  # of all frames of a message: the largest, a body and the small ones
_FRAMES_AT_ONCE = 256  # of an overlong message that is discarded
_T = TypeVar("_T")


class SocketReader(Generic[_T]):
    """Reads a socket next to the event loop: a few messages at a time, `QUEUE` ahead at most.

    Their bytes are limited too (`QUEUE_BYTES`): messages differ in size by a factor of 10,000.

    libzmq's descriptor signals a change, not a waiting message, and every call on the socket may
    swallow that signal. So it is read until it is empty, and `wake` is called after every other
    call on the socket; otherwise a message could stay there unnoticed until the next one arrives.

    Args:
        take: turns the frames of a message into an item, or None to drop it.
        empty: called when all arrived messages have been taken.
        too_long: receives a frame of a message that has too many frames or bytes; such a message is
            read to its end and discarded.

    Attributes:
        drained: every message that has arrived was taken.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        take: Callable[[list[zmq.Frame]], _T | None],
        empty: Callable[[], None],
        too_long: Callable[[zmq.Frame], None] = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._take = take
        self._empty = empty
        self._too_long = too_long
        self._frames: list[zmq.Frame] = []  # of the message that is being read
        self._dropping = False  # the rest of it
        self._queue: asyncio.Queue[tuple[_T, int]] = asyncio.Queue()
        self._bytes = 0  # in the queue
        self._fd = int(sock.getsockopt(zmq.FD))
        self._due: asyncio.Handle | None = None
        self._full = False
        self.drained = False
        self._loop.add_reader(self._fd, self.wake)
        self.wake()

    def wake(self) -> None:
        """Schedule a read of the socket."""
        if self._due is None and not self._full and not self._sock.closed:
            self._due = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._due = None
        self.drained = False
        for _ in range(YIELD_EVERY):
            if self._queue.qsize() >= QUEUE or self._bytes >= QUEUE_BYTES:
                self._full = True
                self._loop.remove_reader(self._fd)  # it would signal the same messages again
                return
            try:
                frames = self._next()
            except zmq.Again:
                self.drained = True
                self._empty()
                return
            if frames is None:
                continue
            size = sum(map(len, frames))
            if size > MAX_SUM_BYTES:
                self._too_long(frames[-1])
                continue
            item = self._take(frames)
            if item is not None:
                self._bytes += size
                self._queue.put_nowait((item, size))
        self.wake()

    def _next(self) -> list[zmq.Frame] | None:
        """Read a message; None if it is discarded, or not read to its end yet.

        Frame by frame: a message of a million would keep the loop for seconds.
        """
        for _ in range(_FRAMES_AT_ONCE):
            frame = self._sock.recv(zmq.NOBLOCK, copy=False)
            if not self._dropping:
                self._frames.append(frame)
                if len(self._frames) > MAX_FRAMES:
                    self._dropping = True
                    self._frames.clear()
                    self._too_long(frame)
            if not frame.more:
                frames, self._frames = self._frames, []
                dropped, self._dropping = self._dropping, False
                return None if dropped else frames
        return None

    @property
    def is_between(self) -> bool:
        """True unless a message is half read."""
        return not self._frames and not self._dropping

    def tell(self, item: _T) -> None:
        """Queue an item that did not arrive as a message."""
        self._queue.put_nowait((item, 0))

    async def get(self) -> _T:
        """Wait for the next item."""
        item, size = await self._queue.get()
        self._bytes -= size
        if self._full and self._has_room() and not self._sock.closed:
            self._full = False
            self._loop.add_reader(self._fd, self.wake)
            self.wake()
        return item

    def _has_room(self) -> bool:
        """Return True if half of the queue is free: to watch the descriptor again takes time."""
        return self._queue.qsize() <= QUEUE // 2 and self._bytes <= QUEUE_BYTES // 2

    def close(self) -> None:
        """Stop reading; the socket is closed by its owner afterwards."""
        self._loop.remove_reader(self._fd)
        if self._due is not None:
            self._due.cancel()
