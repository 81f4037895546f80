"""The events of one stream: none is lost that is told while the ledger is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fcil_protocol.errors import StorageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.results.news import NewsItem, NewsKind, NewsPosition, newest_position
from fcil_server.web.api import feed as feed_module
from fcil_server.web.api.feed import Feed
from fcil_server.web.event_stream import TICK

ITEM = NewsItem(NewsKind.NOTE, {"text": "here"}, NewsPosition(event=1), "event 1")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "TICK_S", 0.01)


def told_while_reading() -> list[bytes | None]:
    """Return two events of a stream whose first read finds nothing, and is told of news."""
    looks: list[NewsPosition] = []

    async def read(position: NewsPosition) -> list[NewsItem]:
        looks.append(position)
        if len(looks) > 1:
            return [ITEM] if position == NewsPosition() else []
        feed.tell(None, news=True)
        return []

    async def two() -> list[bytes | None]:
        return [await feed.next(), await feed.next()]

    feed = Feed(NewsPosition(), read)
    return asyncio.run(two())


def test_news_that_come_during_a_read_are_sent_at_once() -> None:
    first, second = told_while_reading()
    assert b"event: note" in (first or b"")
    assert second == TICK


def test_progress_that_comes_during_a_read_is_sent_at_once(monkeypatch) -> None:
    monkeypatch.setattr(feed_module, "TICK_S", None)  # it is not noticed by chance

    async def read(_: NewsPosition) -> list[NewsItem]:
        feed.tell(b"now", news=False)
        return []

    feed = Feed(NewsPosition(), read)
    assert asyncio.run(asyncio.wait_for(feed.next(), 10)) == b"now"


def test_a_read_that_fails_is_repeated() -> None:
    looks: list[NewsPosition] = []

    async def read(position: NewsPosition) -> list[NewsItem]:
        looks.append(position)
        if len(looks) == 1:
            raise StorageError("the ledger cannot be read.")
        return [ITEM] if position == NewsPosition() else []

    async def one() -> bytes | None:
        return await Feed(NewsPosition(), read).next()

    assert b"event: note" in (asyncio.run(one()) or b"")


def test_an_ended_stream_is_over() -> None:
    async def read(_: NewsPosition) -> list[NewsItem]:
        feed.end()
        return []

    async def two() -> list[bytes | None]:
        return [await feed.next(), await feed.next()]

    feed = Feed(NewsPosition(), read)
    assert asyncio.run(two()) == [None, None]


def test_a_stream_that_finishes_sends_what_the_ledger_has_and_ends() -> None:
    """It is told so while it reads, before the news are there."""
    kept: list[NewsItem] = []

    async def read(position: NewsPosition) -> list[NewsItem]:
        found = [item for item in kept if position == NewsPosition()]
        if not kept:
            kept.append(ITEM)
            feed.finish()
        return found

    async def three() -> list[bytes | None]:
        return [await feed.next(), await feed.next(), await feed.next()]

    feed = Feed(NewsPosition(), read)
    first, *rest = asyncio.run(three())
    assert b"event: note" in (first or b"")
    assert rest == [None, None]


def test_a_stream_that_finishes_does_not_wait_for_a_ledger_that_cannot_be_read() -> None:
    async def read(_: NewsPosition) -> list[NewsItem]:
        raise StorageError("the ledger cannot be read.")

    async def one() -> bytes | None:
        feed = Feed(NewsPosition(), read)
        feed.finish()
        return await feed.next()

    assert asyncio.run(one()) is None


def test_a_place_of_before_a_restore_is_the_newest_one() -> None:
    """The news from then on are numbered below it."""
    newest = NewsPosition(event=7, refusal=2, run="r20260101-000000-0001", seq=3)
    here = NewsPosition(event=5, refusal=2, run="r20260101-000000-0001", seq=9)
    assert here.within(newest) == here
    assert NewsPosition(event=8).within(newest) == newest
    assert NewsPosition(refusal=3).within(newest) == newest


def test_a_place_in_a_run_that_is_not_here_is_the_newest_one(tmp_path: Path) -> None:
    """It would be before the first run, and all closed rounds would come again."""
    run = RunId("r20260101-000000-0001")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.runs.add(
            run, method="fedncm", method_version="1", config="", hparams={}, backbone={},
            schema_digest="", seed=0, environment={},
        )  # fmt: skip
        here, elsewhere = NewsPosition(run=run, seq=0), NewsPosition(run="elsewhere", seq=3)
        assert here.known_in(ledger) == here
        assert elsewhere.known_in(ledger) == newest_position(ledger) == NewsPosition(run=run)
