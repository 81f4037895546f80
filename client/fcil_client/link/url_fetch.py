"""Fetch the missing chunks of a part from an object store, over HTTP.

The bytes are the sealed body, chunk after chunk, and every chunk is checked against the signed
header like one from the link: the store can withhold them, and change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

from fcil_protocol.envelopes.header import Header
from fcil_protocol.errors import LinkError

SILENCE_S = 10.0  # of the store, before the link is used
BLOCK_BYTES = 1 << 20  # that are read before they are stored


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A part is where the server says, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""
        return


_OPENER = urllib.request.build_opener(_NoRedirects)


async def fetch_chunks(
    url: str, header: Header, missing: Iterable[int], take: Callable[[int, bytes], None]
) -> None:
    """Read these chunks of a part, in order, and pass them on as they come.

    Args:
        url: of the whole body.
        header: the part's.
        missing: numbers of chunks, ascending.
        take: called with the number of the first of some consecutive chunks, and their bytes.

    Raises:
        LinkError: the store does not give them.
        Others: those of ``take``.
    """
    for chunks in _runs(missing):
        await _fetch_run(url, header, chunks, take)


async def _fetch_run(
    url: str, header: Header, chunks: range, take: Callable[[int, bytes], None]
) -> None:
    start = header.extent(chunks).start
    end = min(header.extent(chunks).stop, header.sealed_bytes) - 1
    asked = {"Range": f"bytes={start}-{end}", "Accept-Encoding": "identity"}
    answer = await _opened(urllib.request.Request(url, headers=asked))  # noqa: S310
    try:
        if start and answer.status != http.client.PARTIAL_CONTENT:
            raise LinkError("it knows no ranges, and would send everything again.")
        each = max(1, BLOCK_BYTES // header.chunk_bytes)
        for first in range(chunks.start, chunks.stop, each):
            some = range(first, min(first + each, chunks.stop))
            size = sum(map(header.chunk_size, some))
            data: bytes = await _in_thread(answer.read, size)
            if len(data) == size:
                take(first, data)
                continue
            if whole := len(data) - len(data) % header.chunk_bytes:
                take(first, data[:whole])
            raise LinkError("the answer ends early.")
    finally:
        _cut(answer)
        answer.close()


async def _opened(request: urllib.request.Request) -> http.client.HTTPResponse:
    opening = asyncio.ensure_future(_in_thread(_open, request))
    try:
        answer: http.client.HTTPResponse = await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread cannot be stopped: what it brings is not used
        opening.add_done_callback(lambda done: done.exception() or done.result().close())
        raise
    return answer


def _cut(answer: http.client.HTTPResponse) -> None:
    """End a read that another thread is waiting in: to close the answer would wait for it."""
    if answer.isclosed():  # by itself, at its end
        return
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(fileno=os.dup(answer.fileno())) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    try:
        answer = _OPENER.open(request, timeout=SILENCE_S)
    except urllib.error.HTTPError as error:
        with error:
            raise LinkError(f"HTTP status {error.code}.") from error
    assert isinstance(answer, http.client.HTTPResponse)
    return answer


async def _in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return await asyncio.to_thread(call, *arguments)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LinkError(f"{str(error) or type(error).__name__}.") from error


def _runs(indices: Iterable[int]) -> list[range]:
    """Return ascending numbers as runs of consecutive ones."""
    runs: list[range] = []
    for index in indices:
        if runs and index == runs[-1].stop:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
