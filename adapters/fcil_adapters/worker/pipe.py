"""The pipe between a daemon and its worker: small messages, and payloads as memory files.

A message is ``length (4 bytes, little-endian) + msgpack {m: fields, s: [sizes]}``. The payloads of
a message follow each other in one anonymous, sealed memory file, whose descriptor travels with the
length (SCM_RIGHTS). So tensors are never in the clear in a file with a name, and never copied
through the socket. The receiver maps large payloads and copies small ones (`memory_files`).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from fcil_adapters.worker.memory_files import Blob, MemoryFile, Pieces, file_of, read_file, size_of
from fcil_protocol.errors import StorageError, TooLarge, WireError
from fcil_protocol.payloads.payload import Payload, pieces

MAX_MESSAGE_BYTES = 16 << 20  # 10,000 class names take less than 2 MB
MAX_PAYLOAD_BYTES = 16 << 30  # all payloads of a message; memory runs out before
MAX_PAYLOADS = 10_000  # as many as a broadcast has parts
_LENGTH = struct.Struct("<I")
_MAX_FDS = 4  # one is expected; more are received only to be closed

Fields = dict[str, Any]


Blobs = Sequence[Payload | Blob | MemoryFile]


class Pipe:
    """One blocking end; the worker's side. Several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def send(self, message: Fields, payloads: Blobs = ()) -> None:
        """Send one message.

        Raises:
            TooLarge: it exceeds a limit; nothing was sent.
            BrokenPipeError: the other side is gone.
        """
        head, body, file = _encode(message, payloads)
        try:
            with self._sending:
                _send_head(self._sock, head, file)
                self._sock.sendall(body)
        finally:
            _close(file)

    def recv(self) -> tuple[Fields, list[Blob]]:
        """Wait for the next message.

        Raises:
            EOFError: the other side closed the pipe.
            WireError: the bytes are not a message.
        """
        incoming = _Incoming()
        try:
            while not incoming.complete:
                incoming.feed(self._sock)
            return incoming.message()
        finally:
            incoming.close()

    def close(self) -> None:
        """Close this end; the other side reads an end of file."""
        self._sock.close()


class AsyncPipe:
    """One end in an event loop; the daemon's side. One send and one recv at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)

    async def send(self, message: Fields, payloads: Blobs = ()) -> None:
        """Send one message.

        Raises:
            TooLarge: it exceeds a limit; nothing was sent.
            BrokenPipeError, ConnectionResetError: the other side is gone.
        """
        if payloads:  # large ones: packing and copying must not block the loop
            work = asyncio.ensure_future(asyncio.to_thread(_encode, message, payloads))
            try:
                head, body, file = await asyncio.shield(work)
            except asyncio.CancelledError:
                work.add_done_callback(_close_unsent)  # the thread cannot be stopped
                raise
        else:
            head, body, file = _encode(message, payloads)
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    _send_head(self._sock, head, file)
                    break
                except BlockingIOError:
                    await self._ready(loop.add_writer, loop.remove_writer)
            await loop.sock_sendall(self._sock, body)
        finally:
            _close(file)

    async def recv(self) -> tuple[Fields, list[Blob]]:
        """Wait for the next message.

        Raises:
            EOFError: the other side closed the pipe.
            WireError: the bytes are not a message.
        """
        loop = asyncio.get_running_loop()
        incoming = _Incoming()
        try:
            while not incoming.complete:
                try:
                    incoming.feed(self._sock)
                except BlockingIOError:
                    await self._ready(loop.add_reader, loop.remove_reader)
            if incoming.has_file:
                return await asyncio.to_thread(incoming.message)
            return incoming.message()
        finally:
            incoming.close()

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        future = asyncio.get_running_loop().create_future()
        number = self._sock.fileno()
        if number < 0:
            raise EOFError("this side closed the worker's pipe.")

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        add(number, wake)
        try:
            await future
        finally:
            remove(number)

    def hang_up(self) -> None:
        """End the connection: both sides, also a waiting `recv` here, read an end of file."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end, once no send or recv is active."""
        self._sock.close()


class _Incoming:
    """A message that is arriving."""

    def __init__(self) -> None:
        self._head = b""
        self._body = bytearray()
        self._fds: list[int] = []

    @property
    def complete(self) -> bool:
        """True when every byte has arrived."""
        return len(self._head) == _LENGTH.size and len(self._body) == self._length

    @property
    def has_file(self) -> bool:
        """True when payloads came with the message."""
        return bool(self._fds)

    @property
    def _length(self) -> int:
        return int(_LENGTH.unpack(self._head)[0])

    def feed(self, sock: socket.socket) -> None:
        """Receive more bytes, but never beyond this message."""
        if len(self._head) < _LENGTH.size:
            wanted = _LENGTH.size - len(self._head)
            data, fds, flags, _address = socket.recv_fds(sock, wanted, _MAX_FDS)
            for fd in fds:
                os.set_inheritable(fd, False)
            self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC and len(fds) < _MAX_FDS:
                # The kernel drops files for which there is no descriptor.
                raise StorageError(
                    "payloads of a worker's message were lost, since too many files are open.",
                    action="Raise the limit of open files (ulimit -n).",
                )
            self._head += data
            if len(self._head) == _LENGTH.size and self._length > MAX_MESSAGE_BYTES:
                raise TooLarge(
                    f"a worker message of {self._length} bytes exceeds {MAX_MESSAGE_BYTES}."
                )
        else:
            data = sock.recv(min(self._length - len(self._body), 1 << 20))
            self._body += data
        if not data:
            raise EOFError("the other side closed the worker's pipe.")

    def message(self) -> tuple[Fields, list[Blob]]:
        """Decode the message and read its payloads; once.

        It owns the files from here on, so that a `close` meanwhile does no harm.
        """
        fds, self._fds = self._fds, []
        try:
            return _read_message(bytes(self._body), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the files that came with the message."""
        while self._fds:
            os.close(self._fds.pop())


def _read_message(body: bytes, fds: Sequence[int]) -> tuple[Fields, list[Blob]]:
    fields, sizes = _decode(body)
    if len(fds) != bool(sizes):
        raise WireError(f"a worker message of {len(sizes)} payloads came with {len(fds)} files.")
    if not sizes:
        return fields, []
    (fd,) = fds
    return fields, read_file(fd, sizes)


def _encode(message: Fields, payloads: Blobs) -> tuple[bytes, bytes, int | None]:
    if len(payloads) > MAX_PAYLOADS:
        raise TooLarge(f"{len(payloads)} payloads in a worker message exceed {MAX_PAYLOADS}.")
    ready = [_ready(payload) for payload in payloads]
    sizes = [size_of(payload) for payload in ready]
    if sum(sizes) > MAX_PAYLOAD_BYTES:
        raise TooLarge(f"payloads of {sum(sizes)} bytes exceed {MAX_PAYLOAD_BYTES}.")
    # Paths may hold bytes that are not UTF-8; Python keeps them as surrogates.
    body = msgpack.packb(
        {"m": message, "s": sizes}, use_bin_type=True, unicode_errors="surrogateescape"
    )
    if len(body) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a worker message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}.")
    return _LENGTH.pack(len(body)), body, file_of(ready) if ready else None


def _ready(payload: Payload | Blob | MemoryFile) -> Pieces | MemoryFile:
    if isinstance(payload, MemoryFile):
        return payload
    return pieces(payload) if isinstance(payload, Payload) else [payload]


def _decode(body: bytes) -> tuple[Fields, list[int]]:
    try:
        frame = msgpack.unpackb(
            body,
            raw=False,
            unicode_errors="surrogateescape",
            strict_map_key=True,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=1_000_000,
            max_map_len=100_000,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise WireError(f"a worker message is not msgpack: {str(error)[:100]}.") from error
    fields = frame.get("m") if isinstance(frame, dict) else None
    sizes = frame.get("s") if isinstance(frame, dict) else None
    if not isinstance(fields, dict) or not isinstance(sizes, list):
        raise WireError("a worker message is not {m: fields, s: sizes}.")
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise WireError("the sizes of a worker message's payloads are not numbers >= 0.")
    return fields, sizes


def _send_head(sock: socket.socket, head: bytes, file: int | None) -> None:
    fds = array.array("i", [] if file is None else [file])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
    # A local stream socket takes four bytes completely or not at all.
    sent = sock.sendmsg([head], ancillary)
    assert sent == len(head)


def _close(file: int | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            os.close(file)


def _close_unsent(work: asyncio.Future[tuple[bytes, bytes, int | None]]) -> None:
    if work.exception() is None:
        _close(work.result()[2])
