"""Files as answers: each as it was when it was opened, though the server goes on writing it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, BinaryIO

from starlette.responses import Response

from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.web.http_server import mark_as_stream

PIECE_BYTES = 64 << 10
LEAST_RATE = 16 << 10  # bytes per second of a reader, over the whole file
SPARE_S = 60.0  # for a short one


def is_plain(path: Path) -> bool:
    """Return True if there is such a file, which is no link and no device."""
    return path.is_file() and not path.is_symlink()


def open_plain(path: Path) -> BinaryIO | None:
    """Open a file; None: it is not plain (`is_plain`).

    Raises:
        StorageError: it cannot be read.
    """
    if not is_plain(path):
        return None
    with storage_errors("read", path):  # not one that has just become a link
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


class OpenFileAnswer(Response):
    """An open file as an answer; closes it. A reader that is too slow is cut.

    As many bytes are sent as it has now: lines that are added meanwhile belong to the next request.
    Parts of it (``Range``) are not served, since the next part would be of another file.

    Args:
        file: of `open_plain`.
        media_type: its type.
    """

    def __init__(self, file: BinaryIO, media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.headers["content-length"] = str(self._size)

    @property
    def is_over(self) -> bool:
        """True if it was sent, or its reader has gone."""
        return self._file.closed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it; its reader may be slow."""
        mark_as_stream(scope)
        sending = asyncio.create_task(self._send(send, 0 if scope["method"] == "HEAD" else None))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            longest = SPARE_S + self._size / LEAST_RATE
            await asyncio.wait(
                (sending, leaving), timeout=longest, return_when=asyncio.FIRST_COMPLETED
            )
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._file.close()

    async def _send(self, send: Any, most: int | None) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        left = self._size if most is None else most
        while left:
            piece = await asyncio.to_thread(self._file.read, min(PIECE_BYTES, left))
            if not piece:
                return  # it became shorter: the connection is cut, so nobody takes it for whole
            left -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
