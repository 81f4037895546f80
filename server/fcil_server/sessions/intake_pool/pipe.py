"""The pipe between a server and one of its intake processes: records in order, both ways.

A record is a list whose first element is its kind; on the pipe it is a msgpack array. Both ends
are the same program of the same user, and the socket has no name, so records are not checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack

Record = list[Any]
READ_BYTES = 256 << 10  # at a time: more than the socket holds
MOST_WRITTEN = 64  # records in one system call
FRAMES_BYTES = 32 << 20  # of frames for many clients that both ends remember


class ProcessPipe:
    """One end of a pipe, in an event loop.

    Args:
        sock: a connected stream socket, owned from now on.
        take: takes each record.
        over: called once, when the other end is gone.

    Attributes:
        waiting_bytes: of records that the other end has not taken yet.
    """

    def __init__(
        self, sock: socket.socket, take: Callable[[Record], None], over: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._take = take
        self._over = over
        self._loop = asyncio.get_running_loop()
        # Frames of any size that the link permits, and lists of all members.
        self._unpacker = msgpack.Unpacker(
            raw=False, use_list=True, max_buffer_size=0, strict_map_key=False
        )
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._out: deque[memoryview] = deque()
        self._due: asyncio.Handle | None = None
        self._writes = False  # waits for room
        self._reads = True
        self._closed = False
        self._emptied = asyncio.Event()
        self.waiting_bytes = 0
        self._loop.add_reader(sock, self._read)

    # --- out --------------------------------------------------------------------------------

    def send(self, *record: Any) -> None:
        """Send a record; what the other end does not take yet, waits."""
        if self._closed:
            return
        packed = msgpack.packb(record, use_bin_type=True)
        self._out.append(memoryview(packed))
        self.waiting_bytes += len(packed)
        self._emptied.clear()
        if self._due is None and not self._writes:
            self._due = self._loop.call_soon(self._write)  # with what follows in this turn

    def _write(self) -> None:
        self._due = None
        try:
            while self._out:
                some = [self._out[i] for i in range(min(len(self._out), MOST_WRITTEN))]
                self._written(self._sock.sendmsg(some))
        except BlockingIOError:
            if not self._writes:
                self._writes = True
                self._loop.add_writer(self._sock, self._write)
            return
        except OSError:
            self._end()
            return
        if self._writes:
            self._writes = False
            self._loop.remove_writer(self._sock)
        self._emptied.set()

    def _written(self, size: int) -> None:
        self.waiting_bytes -= size
        while size:
            first = self._out[0]
            if size < len(first):
                self._out[0] = first[size:]
                return
            size -= len(first)
            self._out.popleft()

    async def emptied(self) -> None:
        """Wait until nothing waits to be sent."""
        if self.waiting_bytes and not self._closed:
            await self._emptied.wait()

    # --- in ---------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            size = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._end()
            return
        self._unpacker.feed(self._buffer[:size])
        try:
            for record in self._unpacker:
                self._take(record)
        except BaseException:  # the two ends may differ from here on
            self._end()
            raise

    def pause(self) -> None:
        """Read nothing more until `resume`; the other end's records wait there."""
        if self._reads and not self._closed:
            self._reads = False
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Read again."""
        if not self._reads and not self._closed:
            self._reads = True
            self._loop.add_reader(self._sock, self._read)

    # --- the end ----------------------------------------------------------------------------

    def _end(self) -> None:
        self.close()
        self._over()

    def close(self) -> None:
        """Close this end; what waits to be sent is lost."""
        if self._closed:
            return
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._emptied.set()
        with contextlib.suppress(OSError):
            self._sock.close()
