"""Server-sent events to many pages: what is new is written once, and each page gets the newest.

A page that reads slowly costs no more than one that does not: of each section only the newest
event is kept for it, as a reference to the same bytes for all, and the door cuts it when it
takes nothing (`web.http_server.endless`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fcil_server.web.http_server import endless

MAX_STREAMS = 100  # pages that are told what is new; one more is asked to come again later
TICK_S = 15.0  # without news: then a page is told that nothing happened
PIECE_BYTES = 16 << 10  # of an event that are on their way at a time
HELLO = "hello"
_TICK = b"event: tick\ndata: {}\n\n"


def event(name: str, data: Mapping[str, Any], number: int | None = None) -> bytes:
    """Return one event as it is sent.

    Args:
        name: of the event.
        data: what it says.
        number: by which a browser says, when it comes again, what it has seen.
    """
    numbered = f"id: {number}\n" if number is not None else ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))  # without a line break
    return f"event: {name}\n{numbered}data: {text}\n\n".encode()


class Stream:
    """What one page is still to be told; used in the loop's thread alone.

    Attributes:
        csrf: of the session that it belongs to.
        follows: whether it is told of what happens; a page of an older run is not.
        pinned: whether it stays with its run when another begins.
    """

    def __init__(self, csrf: str, *, follows: bool = True, pinned: bool = False) -> None:
        self.csrf = csrf
        self.follows = follows
        self.pinned = pinned
        self._waiting: dict[str, bytes] = {}  # slot -> event; the newest replaces an older one
        self._ended = False
        self._news = asyncio.Event()

    def put(self, slot: str, told: bytes) -> None:
        """Keep an event until the page takes it, instead of an older one of the same slot."""
        self._waiting.pop(slot, None)  # what is new comes after what was said meanwhile
        self._waiting[slot] = told
        self._news.set()

    def forget(self) -> None:
        """Drop all that still waits: it is about what is no longer shown."""
        self._waiting.clear()

    def end(self) -> None:
        """Let the stream end, without what still waits."""
        self._ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Return what the page is to be told next, within `TICK_S`; None: the stream is over."""
        if not self._waiting and not self._ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)
        if self._ended:
            return None
        if not self._waiting:
            return _TICK
        slot = next(iter(self._waiting))
        return self._waiting.pop(slot)


class Hub:
    """Tells all open pages what is new.

    Attributes:
        followed: set while a page follows what happens: only then is there a reason to look.
    """

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._most = most
        self._streams: set[Stream] = set()
        self.followed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream: Stream, first: Iterable[tuple[str, bytes]]) -> bool:
        """Take a new page's stream; False if there are too many.

        Args:
            stream: of the page.
            first: slots and events that it is told before all others.
        """
        if len(self._streams) >= self._most:
            return False
        for slot, told in first:
            stream.put(slot, told)
        self._streams.add(stream)
        self._look()
        return True

    def close(self, stream: Stream) -> None:
        """Forget a page that is gone."""
        self._streams.discard(stream)
        self._look()

    def publish(self, slot: str, told: bytes) -> None:
        """Tell all pages that follow."""
        for stream in self._following():
            stream.put(slot, told)

    def greet(self, greeting: Callable[[str], bytes]) -> None:
        """Greet all pages that follow, each with what belongs to its session.

        Args:
            greeting: makes the event from a session's CSRF token.
        """
        for stream in self._following():
            stream.put(HELLO, greeting(stream.csrf))

    def turn(self, ended: Callable[[str], bytes]) -> None:
        """Turn to another run: what still waits is no longer true, and some pages stay behind.

        Args:
            ended: makes what these are told from a session's CSRF token.
        """
        for stream in self._following():
            if stream.pinned:
                stream.follows = False
                stream.put(HELLO, ended(stream.csrf))
            else:
                stream.forget()
        self._look()

    def end(self) -> None:
        """End all streams: the process ends."""
        for stream in self._streams:
            stream.end()

    def _following(self) -> list[Stream]:
        return [stream for stream in self._streams if stream.follows]

    def _look(self) -> None:
        if any(stream.follows for stream in self._streams):
            self.followed.set()
        else:
            self.followed.clear()


class EventStream:
    """The answer to a page that asks for its stream, as an ASGI app.

    Args:
        hub: which the stream is of.
        stream: what to tell.
        allowed: says whether the page's session still holds; asked before each event.
        headers: of the answer, besides those that all have.
    """

    def __init__(
        self, hub: Hub, stream: Stream, allowed: Callable[[], bool], headers: Mapping[str, str]
    ) -> None:
        self._hub = hub
        self._stream = stream
        self._allowed = allowed
        given = {"content-type": "text/event-stream; charset=utf-8", **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in given.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Tell the page what is new until it, its session or this process ends."""
        endless(scope)
        leaving = asyncio.create_task(self._until_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            while (told := await self._stream.next()) is not None and self._allowed():
                for start in range(0, len(told), PIECE_BYTES):
                    await _say(send, told[start : start + PIECE_BYTES])
                await _say(send, b"")  # it has taken all: only now is the next chosen
            await _say(send, b"", last=True)
        finally:
            leaving.cancel()
            self._hub.close(self._stream)

    async def _until_left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.end()


async def _say(send: Any, piece: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": not last})
