"""How a libzmq socket is read from an event loop: nothing is missed, and nobody is starved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

QUEUE = 64  # messages read ahead of the daemon; TCP holds the rest back
YIELD_EVERY = 16  # messages read before timers and other tasks have their turn
_T = TypeVar("_T")


class SocketReader(Generic[_T]):
    """Reads a socket beside the event loop: a few messages at a time, `QUEUE` ahead at most.

    libzmq's descriptor tells that something changed, not that something is there, and every
    call on the socket may swallow that signal. So it is read until it is empty, and `wake`
    is called after whatever else was done with the socket; otherwise a message could lie
    there unseen until the next one comes.

    Args:
        take: turns the frames of a message into an item, or None to drop it.
        empty: called when everything that had come has been taken.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        take: Callable[[list[zmq.Frame]], _T | None],
        empty: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._take = take
        self._empty = empty
        self._queue: asyncio.Queue[_T] = asyncio.Queue()
        self._fd = int(sock.getsockopt(zmq.FD))
        self._due: asyncio.Handle | None = None
        self._full = False
        self._loop.add_reader(self._fd, self.wake)
        self.wake()

    def wake(self) -> None:
        """Look at the socket soon."""
        if self._due is None and not self._full and not self._sock.closed:
            self._due = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._due = None
        for _ in range(YIELD_EVERY):
            if self._queue.qsize() >= QUEUE:
                self._full = True
                self._loop.remove_reader(self._fd)  # it would only say again that there is more
                return
            try:
                frames = self._sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._empty()
                return
            item = self._take(frames)
            if item is not None:
                self._queue.put_nowait(item)
        self.wake()

    def tell(self, item: _T) -> None:
        """Put something into the queue that did not come as a message."""
        self._queue.put_nowait(item)

    async def get(self) -> _T:
        """Wait for the next item."""
        item = await self._queue.get()
        if self._full and not self._sock.closed:
            self._full = False
            self._loop.add_reader(self._fd, self.wake)
            self.wake()
        return item

    def close(self) -> None:
        """Stop reading; the socket is closed by its owner afterwards."""
        self._loop.remove_reader(self._fd)
        if self._due is not None:
            self._due.cancel()
