"""The local control socket of a daemon: a 0600 Unix socket for the same user's commands.

One JSON line in, one JSON line out, then closed. The kernel names the caller (peer credentials);
another user is refused. None of this crosses a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fcil_protocol.errors import (
    FcilError,
    InternalError,
    Starting,
    Timeout,
    TrustError,
    Unreachable,
    UsageError,
    WireError,
    from_code,
)
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.storage.lock_holder import LOOK_S, holder_of

MAX_LINE_BYTES = 4 << 20  # of a request
MAX_ANSWER_BYTES = 64 << 20  # a status names every client
MAX_UNIX_PATH = 100  # sun_path has 108 bytes on Linux, 104 on macOS

Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


def socket_path(directory: Path) -> Path:
    """Return the path of the control socket for a daemon's directory.

    A path that is too long for a Unix socket is replaced by a short one, in a directory of this
    user alone, that depends on the directory only, so both sides find it.
    """
    path = directory.resolve() / "control.sock"
    if len(os.fsencode(path)) <= MAX_UNIX_PATH:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"fcil-{os.getuid()}" / f"{name}.sock"


async def serve(directory: Path, handler: Handler) -> asyncio.AbstractServer:
    """Listen on the directory's socket and answer with ``handler(op, fields)``.

    Raises:
        DiskFull, StorageError: the socket cannot be created.
    """
    path = socket_path(directory)
    with storage_errors("make the control socket", path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_place(path, directory)
    with storage_errors("make the control socket", path):
        path.unlink(missing_ok=True)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await _reply(reader, writer, handler)
            line = await asyncio.to_thread(json.dumps, reply)  # with very many clients: megabytes
            writer.write(line.encode() + b"\n")
            await writer.drain()
        except (ConnectionError, asyncio.LimitOverrunError, ValueError):
            pass  # the command went away or sent no line: there is no receiver
        except asyncio.CancelledError:
            pass  # the daemon ends; waiting commands see the connection close

    answers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own: asyncio logs a traceback of one that is cancelled before it begins.
        task = asyncio.get_running_loop().create_task(answer(reader, writer))
        answers.add(task)
        task.add_done_callback(answers.discard)
        task.add_done_callback(lambda _: writer.close())  # also of one that never began

    return await asyncio.start_unix_server(accept, sock=_bound(path), limit=MAX_LINE_BYTES)


def remover(directory: Path) -> Callable[[], None]:
    """Return what removes the socket that is there now, unless another daemon's replaces it.

    A daemon on another host may take over a directory while this one hangs.
    """
    path = socket_path(directory)
    inode = path.stat().st_ino

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()

    return remove


def _bound(path: Path) -> socket.socket:
    """Return a bound socket for this user alone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # It is created 0600. The mask is the whole process's: no other task runs meanwhile.
    mask = os.umask(0o177)
    try:
        with storage_errors("make the control socket", path):
            sock.bind(str(path))
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
    return sock


def _check_place(path: Path, directory: Path) -> None:
    """Refuse a directory in which another user could create a socket of the same name."""
    try:
        status = path.parent.lstat()  # a link could lead elsewhere a moment later
    except FileNotFoundError:
        return
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise TrustError(
            f"{path.parent} belongs to another user, or is no folder.",
            action="Remove it or set TMPDIR.",
        )
    if path.parent != directory.resolve() and status.st_mode & 0o022:
        raise TrustError(
            f"other users can write to {path.parent}.", action=f"Run: chmod 700 {path.parent}"
        )


async def _reply(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
) -> dict[str, Any]:
    try:
        uid = _check_peer(writer.get_extra_info("socket"))
        request = _parse(await _line(reader))
        request["uid"] = uid  # never from the request itself
        return {"data": await handler(request.pop("op"), request)}
    except FcilError as error:
        return {"error": error.code, "message": error.message, "action": error.action}
    except Exception as error:
        return {"error": InternalError.code, "message": f"{type(error).__name__}: {error}"}


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as error:
        raise UsageError(f"a request has at most {MAX_LINE_BYTES} bytes.") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        raise UsageError("a request is one line with a JSON object that has an 'op'.")
    return request


def _check_peer(peer: socket.socket) -> int:
    """Return the user id of the caller."""
    uid = _user_of(peer)
    if uid not in (os.getuid(), 0):
        raise TrustError(f"user {uid} may not control this daemon.")
    return uid


def _check_daemon(peer: socket.socket, directory: Path) -> None:
    """Refuse a listener of another user: it may have put its socket in the daemon's place."""
    uid = _user_of(peer)
    if uid not in (os.getuid(), 0, directory.stat().st_uid):
        raise TrustError(
            f"user {uid} listens in the place of the daemon of {directory}.",
            action="Set TMPDIR to a folder that other users cannot write to.",
        )


def _user_of(peer: socket.socket) -> int:
    if not hasattr(socket, "SO_PEERCRED"):
        return os.getuid()  # macOS: the 0600 mode of the socket is the gate
    size = struct.calcsize("3i")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def ask(
    directory: Path, op: str, timeout_s: float = 10.0, *, wait: bool = True, **fields: Any
) -> dict[str, Any]:
    """Send one request to the daemon of a directory and return its data.

    If a process works in the directory and does not listen yet, wait for it, unless ``wait`` is
    false.

    Raises:
        Unreachable: no daemon runs there.
        Starting: it does not listen within ``timeout_s``.
        Timeout: it does not answer.
        TrustError: another user could have put a socket in its place.
        FcilError: the error that the daemon answered.
    """
    path = socket_path(directory)
    if path.parent != directory.resolve():
        _check_place(path, directory)
    question = json.dumps({"op": op, **fields}).encode() + b"\n"  # invalid fields fail first
    try:
        with _connected(directory, path, timeout_s, wait=wait) as sock:
            _check_daemon(sock, directory)
            sock.sendall(question)
            with sock.makefile("rb") as stream:
                line = stream.readline(MAX_ANSWER_BYTES)
    except TimeoutError as error:
        raise Timeout(
            f"the daemon at {directory} runs, but did not answer within {timeout_s:.0f} s.",
            action="It may be suspended (kill -CONT) or waiting for a disk; see its log.",
        ) from error
    except OSError as error:
        raise Unreachable(
            f"no daemon runs at {directory}.",
            action="Start a server with fcil-server serve, a client with fcil-client join.",
        ) from error
    if not line:
        raise Unreachable(f"the daemon at {directory} closed the connection.")
    return _answer(line)


def _connected(directory: Path, path: Path, timeout_s: float, *, wait: bool) -> socket.socket:
    ends = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
        except TimeoutError:
            sock.close()
            raise
        except OSError:
            sock.close()
            holder = holder_of(directory) if wait else None
            if holder is None:
                raise
            if time.monotonic() >= ends:
                raise Starting(
                    f"{holder} is using {directory} and accepts no commands: it is starting or "
                    "stopping, or is itself a command.",
                    action="Try again in a moment.",
                ) from None
        else:
            return sock
        time.sleep(LOOK_S)


def _answer(line: bytes) -> dict[str, Any]:
    """Return the data of a daemon's answer, or raise the error in it."""
    try:
        reply = json.loads(line)
        if "error" in reply:
            texts = (reply["error"], reply["message"], reply.get("action", ""))
            raise from_code(*(str(text) for text in texts))
        data = reply["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise WireError(
            f"the daemon's answer of {len(line)} bytes is not what a command expects.",
            action="Use the same fcil version for the daemon and the command.",
        )
    return data
