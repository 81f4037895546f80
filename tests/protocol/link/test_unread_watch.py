"""Whose bytes are unread is cut as soon as the kernel has them, and only that connection."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from fcil_protocol.link.unread_watch import UnreadWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


async def moment(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Connect two sockets: of a sender, and of a receiver."""
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as door:
            sender = socket.create_connection(door.getsockname())
            receiver, _ = door.accept()
        made.extend((sender, receiver))
        return sender, receiver

    yield pair
    for one in made:
        one.close()


def test_the_one_that_floods_is_cut_once_and_the_other_stays(pairs) -> None:
    async def test() -> None:
        watch, told = UnreadWatch(), asyncio.Queue[str]()
        flooder, flooded = pairs()
        honest, heard = pairs()
        one = watch.begin(flooded.fileno(), 10_000, lambda: told.put_nowait("one"))
        other = watch.begin(heard.fileno(), 300_000, lambda: told.put_nowait("other"))
        assert one is not None
        assert other is not None
        honest.sendall(bytes(20_000))
        flooder.sendall(bytes(200_000))
        assert await told.get() == "one"
        flooded.setblocking(False)
        while flooded.recv(1 << 20):  # what had come, and then the end
            pass
        watch.end(one)
        watch.end(one)
        assert not other.is_cut
        assert told.empty()
        while told.empty():  # what is received and handed to nobody
            honest.sendall(bytes(10_000))
            heard.recv(1 << 20)
            await asyncio.sleep(0)
        assert await told.get() == "other"
        watch.end(other)

    run(test)


def test_what_came_in_a_pause_is_looked_at_after_it(pairs) -> None:
    async def test() -> None:
        watch, told = UnreadWatch(), asyncio.Queue[str]()
        sender, receiver = pairs()
        one = watch.begin(receiver.fileno(), 10_000, lambda: told.put_nowait("cut"))
        assert one is not None
        sender.sendall(b"x")
        await moment(lambda: watch._timer is not None)
        sender.sendall(bytes(200_000))
        receiver.recv(1 << 20)  # nothing is left to read, and nothing more will come
        assert await told.get() == "cut"
        watch.end(one)

    run(test)


def test_without_news_the_loop_sleeps(pairs) -> None:
    async def test() -> None:
        watch = UnreadWatch()
        sender, receiver = pairs()
        one = watch.begin(receiver.fileno(), 10_000, lambda: None)
        assert one is not None
        sender.sendall(b"x")
        await moment(lambda: watch._timer is not None)
        await moment(lambda: watch._timer is None)
        assert watch._receiving == set()
        watch.end(one)

    run(test)


def test_what_is_no_connection_is_not_watched() -> None:
    async def test() -> None:
        assert UnreadWatch().begin(0, 10_000, lambda: None) is None
        assert UnreadWatch().begin(-1, 10_000, lambda: None) is None

    run(test)
