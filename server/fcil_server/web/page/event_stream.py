"""Server-sent events to many dashboards: news is written once, and each gets the newest.

A slow dashboard costs no more than a fast one: for each section only the newest event is kept for
it, as a reference to the same bytes for all, and the listener cuts it when it takes nothing
(`web.event_stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from fcil_server.web.event_stream import MAX_STREAMS, TICK, TICK_S

HELLO = "hello"


class Stream:
    """Events that wait for one dashboard; used only in the loop's thread.

    Attributes:
        csrf: of its session.
        follows: True if it receives news; a dashboard of an older run does not.
        pinned: True if it stays with its run when another begins.
    """

    def __init__(self, csrf: str, *, follows: bool = True, pinned: bool = False) -> None:
        self.csrf = csrf
        self.follows = follows
        self.pinned = pinned
        self._waiting: dict[str, bytes] = {}  # slot -> event; the newest replaces an older one
        self._ended = False
        self._news = asyncio.Event()

    def put(self, slot: str, told: bytes) -> None:
        """Keep an event until the dashboard takes it; it replaces an older one of the same slot."""
        self._waiting.pop(slot, None)  # new events come after those that were added meanwhile
        self._waiting[slot] = told
        self._news.set()

    def forget(self) -> None:
        """Drop all waiting events: they are about content that is no longer shown."""
        self._waiting.clear()

    def end(self) -> None:
        """End the stream, without its waiting events."""
        self._ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Return the next event for the dashboard, within `TICK_S`; None: the stream is over."""
        if not self._waiting and not self._ended:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)
        if self._ended:
            return None
        if not self._waiting:
            return TICK
        slot = next(iter(self._waiting))
        return self._waiting.pop(slot)


class Hub:
    """Sends news to all open dashboards.

    Attributes:
        followed: set while a dashboard follows the news: only then is there a reason to read.
    """

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._most = most
        self._streams: set[Stream] = set()
        self.followed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream: Stream, first: Iterable[tuple[str, bytes]]) -> bool:
        """Add a new dashboard's stream; False if there are too many.

        Args:
            stream: of the dashboard.
            first: slots and events that it receives before all others.
        """
        if len(self._streams) >= self._most:
            return False
        for slot, told in first:
            stream.put(slot, told)
        self._streams.add(stream)
        self._look()
        return True

    def close(self, stream: Stream) -> None:
        """Forget a closed dashboard."""
        self._streams.discard(stream)
        self._look()

    def publish(self, slot: str, told: bytes) -> None:
        """Send an event to all dashboards that follow."""
        for stream in self._following():
            stream.put(slot, told)

    def greet(self, greeting: Callable[[str], bytes]) -> None:
        """Greet all dashboards that follow, each with its session's token.

        Args:
            greeting: makes the event from a session's CSRF token.
        """
        for stream in self._following():
            stream.put(HELLO, greeting(stream.csrf))

    def switch_run(self, ended: Callable[[str], bytes]) -> None:
        """Switch to another run: waiting events become void, and pinned dashboards stay behind.

        Args:
            ended: makes the event for these from a session's CSRF token.
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
