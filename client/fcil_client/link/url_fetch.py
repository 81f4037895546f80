"""Fetch the missing chunks of a part from an object store, over HTTP.

The bytes are the sealed body, chunk after chunk, and every chunk is checked against the signed
header like one from the link: the store can withhold them, and change nothing. One that is slow is
given up: the link has them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from fcil_protocol.envelopes.header import Header
from fcil_protocol.errors import LinkError

SILENCE_S = 10.0  # of the store, before the link is used
LEAST_BYTES = 16 << 10  # in so many seconds: less is silence too
BLOCK_BYTES = 1 << 20  # that are read before they are stored
_GONE = (http.client.NOT_FOUND, http.client.GONE)
_T = TypeVar("_T")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A part is where the server says, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""
        return


_OPENER = urllib.request.build_opener(_NoRedirects)


async def fetch_chunks(
    url: str, header: Header, missing: Iterable[int], take: Callable[[int, bytes], None]
) -> bool:
    """Read these chunks of a part, in order, and pass them on as they come.

    Args:
        url: of the whole body.
        header: the part's.
        missing: numbers of chunks, ascending.
        take: called with the number of the first of some consecutive chunks, and their bytes.

    Returns:
        False if the store has no such part.

    Raises:
        LinkError: the store does not give them.
        Others: those of ``take``.
    """
    for chunks in _runs(missing):
        if not await _fetch_run(url, header, chunks, take):
            return False
    return True


async def _fetch_run(
    url: str, header: Header, chunks: range, take: Callable[[int, bytes], None]
) -> bool:
    start = header.extent(chunks).start
    end = min(header.extent(chunks).stop, header.sealed_bytes) - 1
    asked = {"Range": f"bytes={start}-{end}", "Accept-Encoding": "identity"}
    answer = await _opened(url, asked)
    if answer is None:
        return False
    try:
        if start and answer.status != http.client.PARTIAL_CONTENT:
            raise LinkError("it knows no ranges, and would send everything again.")
        each = max(1, BLOCK_BYTES // header.chunk_bytes)
        for first in range(chunks.start, chunks.stop, each):
            some = range(first, min(first + each, chunks.stop))
            size = sum(map(header.chunk_size, some))
            data, fault = await _in_thread(partial(_read, answer, size))
            whole = len(data) if len(data) == size else len(data) - len(data) % header.chunk_bytes
            if whole:
                take(first, data[:whole])
            if fault is not None:
                raise fault
    finally:
        _cut(answer)
        answer.close()
    return True


async def _opened(url: str, headers: dict[str, str]) -> http.client.HTTPResponse | None:
    opening = asyncio.ensure_future(_in_thread(partial(_open, url, headers)))
    try:
        return await asyncio.wait_for(asyncio.shield(opening), 2 * SILENCE_S)
    except (asyncio.CancelledError, TimeoutError) as error:
        opening.add_done_callback(_close)  # its thread may still bring something
        if isinstance(error, TimeoutError):
            raise LinkError("it is silent.") from error
        raise


def _close(opening: asyncio.Future[http.client.HTTPResponse | None]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        answer = opening.result()
        if answer is not None:
            answer.close()


def _cut(answer: http.client.HTTPResponse) -> None:
    """End a read that another thread is waiting in: to close the answer would wait for it."""
    if answer.isclosed():  # by itself, at its end
        return
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(fileno=os.dup(answer.fileno())) as line,
    ):
        line.shutdown(socket.SHUT_RDWR)


# --- in threads -------------------------------------------------------------------------------


async def _in_thread(call: Callable[[], _T]) -> _T:
    """Return what a call returns in a thread of its own, which holds up no others, nor an exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(error: BaseException | None, value: Any) -> None:
        if done.cancelled():
            if isinstance(value, http.client.HTTPResponse):
                value.close()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)

    def run() -> None:
        error, value = None, None
        try:
            value = call()
        except Exception as caught:  # of which only a sentence is of use
            error = caught if isinstance(caught, LinkError) else LinkError(_sentence(caught))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, error, value)

    threading.Thread(target=run, daemon=True, name="object store").start()
    return await done


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse | None:
    """Return the answer; None: the store has no such part."""
    try:
        answer = _OPENER.open(urllib.request.Request(url, headers=headers), timeout=SILENCE_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _GONE:
                return None
            raise LinkError(f"HTTP status {error.code}.") from error
    assert isinstance(answer, http.client.HTTPResponse)
    return answer


def _read(answer: http.client.HTTPResponse, size: int) -> tuple[bytes, LinkError | None]:
    """Return the next bytes of an answer, and why they are not ``size`` bytes, if so."""
    data = bytearray()
    since, before = time.monotonic(), 0
    try:
        while len(data) < size:
            some = answer.read1(size - len(data))
            if not some:
                return bytes(data), LinkError("the answer ends early.")
            data += some
            if time.monotonic() - since >= SILENCE_S:
                if len(data) - before < LEAST_BYTES:
                    return bytes(data), LinkError("it is too slow.")
                since, before = time.monotonic(), len(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return bytes(data), LinkError(_sentence(error))
    return bytes(data), None


def _sentence(error: Exception) -> str:
    """Return an error in few words: the libraries' own may hold the address, which is secret."""
    reason = getattr(error, "reason", error)
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else None
    return f"{text or type(reason).__name__}."[:200]


def _runs(indices: Iterable[int]) -> list[range]:
    """Return ascending numbers as runs of consecutive ones."""
    runs: list[range] = []
    for index in indices:
        if runs and index == runs[-1].stop:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
