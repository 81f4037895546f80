"""Answers that are streams of server-sent events, to readers of any speed.

The listener cuts a reader that takes nothing (`web.http_server.mark_as_stream`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fcil_server.web.http_server import mark_as_stream

MAX_STREAMS = 100  # open streams of a process; one more is asked to come again later
TICK_S = 15.0  # without news: then an empty event is sent
PIECE_BYTES = 16 << 10  # of an event, sent at a time
TICK = b"event: tick\ndata: {}\n\n"


class EventSource(Protocol):
    """The events for one reader."""

    async def next(self) -> bytes | None:
        """Return the next event, within `TICK_S`; None: the stream is over."""

    def end(self) -> None:
        """End the stream."""


def event(name: str, data: Mapping[str, Any], number: int | str | None = None) -> bytes:
    """Return one event in its wire form.

    Args:
        name: of the event.
        data: its content.
        number: its id, which a browser names when it reconnects.
    """
    numbered = f"id: {number}\n" if number is not None else ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))  # no line breaks
    return f"event: {name}\n{numbered}data: {text}\n\n".encode()


class EventStream:
    """The answer to a request for a stream, as an ASGI app.

    Args:
        stream: the events.
        allowed: returns True while the reader may have them; called before each event.
        headers: of the answer, in addition to the common ones.
        close: called when the reader has gone.
    """

    def __init__(
        self,
        stream: EventSource,
        allowed: Callable[[], bool],
        headers: Mapping[str, str],
        close: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._close = close
        self._allowed = allowed
        given = {"content-type": "text/event-stream; charset=utf-8", **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in given.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send events until the reader, its right or this process ends."""
        mark_as_stream(scope)
        leaving = asyncio.create_task(self._until_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            while (told := await self._stream.next()) is not None and self._allowed():
                for start in range(0, len(told), PIECE_BYTES):
                    await _say(send, told[start : start + PIECE_BYTES])
                await _say(send, b"")  # the previous one is delivered: only now is the next chosen
            await _say(send, b"", last=True)
        finally:
            leaving.cancel()
            self._close()

    async def _until_left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.end()


async def _say(send: Any, piece: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
