"""Streams of server-sent events for programs: news of the ledger, and the server's progress.

Each news item has an id, so a program that reconnects gets all that it missed; progress has none,
since only the newest matters. However many streams are open, the server is asked once a second, and
each stream keeps no more than one page of news.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request

from fcil_protocol.errors import FcilError, NotNow
from fcil_protocol.formats import with_iso_times
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.news import NewsItem, NewsPosition, newest_position, news_after
from fcil_server.web.errors import Faults
from fcil_server.web.event_stream import MAX_STREAMS, TICK, TICK_S, EventStream, event
from fcil_server.web.requests import Pool, RefusedRequest

LOOK_S = 1.0  # between two looks, while a stream is open
PAGE = 100  # news that a stream reads at a time
PROGRESS = "progress"  # names of events without an id
GONE = "gone"
# Fields of the server's answer; without the time left, which always changes.
_FIELDS = (
    "run", "phase", "mode", "waiting_for", "task", "kind", "round", "asked", "answered",
    "connected", "ready",
)  # fmt: skip

Ask = Callable[[str], dict[str, Any]]
Reader = Callable[[NewsPosition], Awaitable[list[NewsItem]]]


class Feed:
    """The events for one program; used only in the loop's thread.

    Args:
        position: where it begins.
        read: reads the news after a position.
    """

    def __init__(self, position: NewsPosition, read: Reader) -> None:
        self._position = position
        self._read = read
        self._page: deque[NewsItem] = deque()
        self._progress: bytes | None = None
        self._wake = asyncio.Event()
        self._unread = True  # there may be news after the position
        self._ended = False
        self._finishing = False  # it ends once everything is read

    def tell(self, progress: bytes | None, *, news: bool) -> None:
        """Note progress, and that there is news."""
        self._progress = progress or self._progress
        self._unread = self._unread or news
        if progress or news:
            self._wake.set()

    def end(self) -> None:
        """End the stream: its reader has gone."""
        self._ended = True
        self._wake.set()

    def finish(self) -> None:
        """End the stream after the news that the ledger has now."""
        self._finishing = self._unread = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """Return the next event, within `TICK_S`; None: the stream is over."""
        if self._ended:
            return None
        self._wake.clear()  # before the read: what is told during it ends the wait after it
        if not await self._more() and self._progress is None:
            if not self._finishing:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_S if self._unread else TICK_S)
            if self._ended:
                return None
            if not await self._more() and self._progress is None:
                return None if self._finishing else TICK
        if self._page:  # before progress, which may be of later
            item = self._page.popleft()
            self._position = item.position
            return event(item.kind, with_iso_times(item.data), item.position.text())
        told, self._progress = self._progress, None
        return told

    async def _more(self) -> bool:
        """Read a page of news if there may be any; True: there is."""
        if not self._page and self._unread:
            self._unread = False  # before the read: it may miss what is told during it
            try:
                found = await self._read(self._position)
            except (FcilError, RefusedRequest):  # it cannot be read now; `next` tries again
                self._unread = True
                return False
            self._unread = self._unread or len(found) >= PAGE
            self._page.extend(found)
        return bool(self._page)


class Feeds:
    """All open streams of programs.

    Args:
        directory: of the federation.
        ask: asks the running server.
        faults: logs our own defects.
    """

    def __init__(self, directory: Path, ask: Ask, faults: Faults) -> None:
        self._ledger = directory / LEDGER_NAME
        self._ask = ask
        self._faults = faults
        self._pool = Pool("feed", threads=2, most=2 * MAX_STREAMS)
        self._open: set[Feed] = set()
        self._watched = asyncio.Event()
        self._last: dict[str, Any] = {}  # progress
        self._newest = NewsPosition()

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, last: str, request: Request, allowed: Callable[[], bool]) -> Any:
        """Return the answer to a request for a stream.

        Args:
            last: id of the last event that the program has; empty: from now on.
            request: the request; its ``Last-Event-ID`` comes before ``last``.
            allowed: returns True while its token is valid.

        Raises:
            UsageError: that is no id.
            RefusedRequest: too many are open.
        """
        given = request.headers.get("last-event-id", "") or last
        wanted = NewsPosition.parse(given) if given else None
        position = await self._pool.do(self._begin, wanted)
        if len(self._open) >= MAX_STREAMS:
            many = NotNow(f"{len(self._open)} streams are open.", action="Close some of them.")
            raise RefusedRequest(503, many)
        feed = Feed(position, functools.partial(self._pool.do, self._read))
        if self._last:
            feed.tell(event(PROGRESS, self._last), news=False)
        self._open.add(feed)
        self._watched.set()
        return EventStream(feed, allowed, {}, functools.partial(self._close, feed))

    def _close(self, feed: Feed) -> None:
        self._open.discard(feed)
        if not self._open:
            self._watched.clear()

    def end(self) -> None:
        """End all streams after the last news: the process ends."""
        for feed in self._open:
            feed.finish()

    async def run(self) -> None:
        """Look for news while a stream is open; until cancelled."""
        while True:
            await self._watched.wait()
            try:
                await self._look()
            except (FcilError, RefusedRequest):
                pass  # the ledger cannot be read now: the streams wait
            except Exception as error:  # a defect is logged once, and the next look may succeed
                self._faults.tell(error, "a look at what is new")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        newest, progress = await asyncio.gather(
            self._pool.do(self._end), self._pool.do(self._gauges)
        )
        told: bytes | None = None
        if progress is None and self._last:
            told = event(GONE, {"says": "The server does not answer."})
        elif progress is not None and progress != self._last:
            told = event(PROGRESS, progress)
        news = newest != self._newest
        self._last, self._newest = progress or {}, newest
        for feed in self._open:
            feed.tell(told, news=news)

    # --- in a thread ----------------------------------------------------------------------------

    def _end(self) -> NewsPosition:
        with Ledger(self._ledger, read_only=True) as ledger:
            return newest_position(ledger)

    def _begin(self, wanted: NewsPosition | None) -> NewsPosition:
        with Ledger(self._ledger, read_only=True) as ledger:
            return newest_position(ledger) if wanted is None else wanted.known_in(ledger)

    def _read(self, position: NewsPosition) -> list[NewsItem]:
        with Ledger(self._ledger, read_only=True) as ledger:
            return news_after(ledger, position, PAGE)

    def _gauges(self) -> dict[str, Any] | None:
        """Return the server's progress; None: it does not answer."""
        try:
            told = self._ask("gauges")
        except FcilError:
            return None
        return {name: told[name] for name in _FIELDS}
