"""News for open pages: the newest of each section, for as many as there is room for."""

from __future__ import annotations

import asyncio
import json

import pytest

from fcil_server.web.event_stream import EventStream, event
from fcil_server.web.page import event_stream as stream_module
from fcil_server.web.page.event_stream import HELLO, Hub, Stream
from server.web_kit import door, get


class Watched(Hub):
    """A hub that says when it has forgotten a page."""

    def __init__(self) -> None:
        super().__init__()
        self.forgot = asyncio.Event()

    def close(self, stream: Stream) -> None:
        super().close(stream)
        self.forgot.set()


def opened(hub: Hub, *first, **kind) -> Stream:
    stream = Stream("word", **kind)
    assert hub.open(stream, first)
    return stream


def taken(stream: Stream, count: int) -> list[bytes]:
    async def work() -> list[bytes]:
        return [await asyncio.wait_for(stream.next(), 60) for _ in range(count)]

    return asyncio.run(work())


def test_an_event_is_one_line_of_data_whatever_it_says() -> None:
    told = event("section", {"html": "a\n\ndata: b\r\n\u2028ü"}, 7)
    name, number, data, *rest = told.decode().split("\n")
    assert (name, number, rest) == ("event: section", "id: 7", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"html": "a\n\ndata: b\r\n\u2028ü"}


def test_a_page_that_does_not_read_keeps_only_the_newest_of_each_section() -> None:
    hub = Hub()
    stream = opened(hub, ("now", b"0"))
    for number in range(1000):
        hub.publish("now", b"now %d" % number)
        hub.publish("head", b"head %d" % number)
    assert len(stream._waiting) == 2
    assert taken(stream, 2) == [b"now 999", b"head 999"]


def test_news_comes_in_the_order_of_its_versions() -> None:
    hub = Hub()
    stream = opened(hub)
    for slot, told in (("now", b"1"), ("head", b"2"), ("now", b"3")):
        hub.publish(slot, told)
    assert taken(stream, 2) == [b"2", b"3"]


def test_what_is_published_is_kept_once_for_all_pages() -> None:
    hub = Hub()
    streams = [opened(hub) for _ in range(3)]
    told = b"x" * 1000
    hub.publish("now", told)
    assert all(stream._waiting["now"] is told for stream in streams)


def test_one_page_too_many_is_refused_until_another_is_closed() -> None:
    hub = Hub(most=2)
    first, _ = opened(hub), opened(hub)
    assert not hub.open(Stream("word"), ())
    hub.close(first)
    assert hub.open(Stream("word"), ())


def test_there_is_a_reason_to_look_only_while_a_page_follows() -> None:
    hub = Hub()
    assert not hub.followed.is_set()
    older = opened(hub, follows=False)
    assert not hub.followed.is_set()
    first, second = opened(hub), opened(hub)
    hub.close(first)
    assert hub.followed.is_set()
    hub.close(second)
    assert not hub.followed.is_set()
    hub.close(older)
    assert len(hub) == 0


def test_a_page_of_an_older_run_is_told_nothing_more() -> None:
    hub = Hub()
    stream = opened(hub, ("now", b"then"), follows=False)
    hub.publish("now", b"now")
    hub.greet(lambda word: b"hello")
    assert taken(stream, 1) == [b"then"]
    assert not stream._waiting


def test_when_another_run_begins_pages_turn_to_it_unless_they_are_of_the_old_one() -> None:
    hub = Hub()
    follower, pinned = opened(hub), opened(hub, pinned=True)
    hub.publish("now", b"old")
    hub.switch_run(lambda word: b"over for %s" % word.encode())
    hub.greet(lambda word: b"hello " + word.encode())
    hub.publish("now", b"new")
    assert taken(follower, 2) == [b"hello word", b"new"]
    assert taken(pinned, 2) == [b"old", b"over for word"]
    assert HELLO not in pinned._waiting


def test_silence_is_told_apart_from_a_dead_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "TICK_S", 0.01)
    assert taken(opened(Hub()), 2) == [b"event: tick\ndata: {}\n\n"] * 2


@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_ends_with_the_hub_and_with_its_session(allowed: bool) -> None:
    hub = Hub()
    stream = opened(hub, ("now", b"secret"))

    async def work() -> str:
        answer = EventStream(
            stream, lambda: allowed, {"set-cookie": "a=b"}, lambda: hub.close(stream)
        )
        async with door(answer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get().encode())
            got = await reader.readuntil(b"secret") if allowed else b""
            hub.end()
            got += await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return got.decode()

    answer = asyncio.run(work())
    assert answer.startswith("HTTP/1.1 200")
    assert "set-cookie: a=b" in answer
    assert ("secret" in answer) is allowed
    assert len(hub) == 0


def test_a_page_that_is_closed_is_forgotten() -> None:
    hub = Watched()
    stream = opened(hub, ("now", b"x" * 100_000))

    async def work() -> None:
        async with door(EventStream(stream, lambda: True, {}, lambda: hub.close(stream))) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get().encode())
            await reader.readexactly(1000)
            writer.close()
            await asyncio.wait_for(hub.forgot.wait(), 60)

    asyncio.run(work())


def test_a_page_that_takes_nothing_is_cut_and_others_do_not_notice() -> None:
    hub = Watched()
    event_of = b"x" * 4_000_000

    async def application(scope, receive, send) -> None:
        follower = Stream("word")
        assert hub.open(follower, [("now", event_of)])
        await EventStream(follower, lambda: True, {}, lambda: hub.close(follower))(
            scope, receive, send
        )

    async def work() -> None:
        async with door(application, stalled_s=0.3) as port:
            deaf, silent = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            silent.write(get().encode())
            await deaf.readexactly(10)
            deaf._transport.pause_reading()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get().encode())
            got = 0
            while got < len(event_of):
                got += len(await asyncio.wait_for(reader.read(1 << 20), 60))
            await asyncio.wait_for(hub.forgot.wait(), 60)
            assert len(hub) == 1
            hub.publish("head", b"still here")
            assert b"still here" in await asyncio.wait_for(reader.readuntil(b"here"), 60)
            hub.end()
            silent.close()
            writer.close()

    asyncio.run(work())
