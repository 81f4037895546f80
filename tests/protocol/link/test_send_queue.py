"""A queue for one socket: it keeps the order, and knows its size without a look at what waits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_protocol.link import send_queue
from fcil_protocol.link.send_queue import SendQueue

ROOM = st.integers(0, 5)  # for that many messages


async def until(true):
    """Let other tasks go on until something holds."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


class Socket:
    """Takes as many messages as there is room for."""

    def __init__(self):
        self.room, self.taken = 0, []

    def send(self, message):
        if self.room == 0:
            return False
        self.room -= 1
        self.taken.append(message)
        return True


@given(st.lists(ROOM | st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=60))
def test_everything_is_sent_in_order_and_its_size_is_that_of_what_waits(acts):
    async def story():
        socket, put = Socket(), []
        made = SendQueue(socket.send)
        for act in acts:
            if isinstance(act, int):
                socket.room = act
                made._flush()
            else:
                assert made.put(act)
                put.append(act)
            waiting = put[len(socket.taken) :]
            assert made.bytes == sum(len(frame) for frames in waiting for frame in frames)
            assert len(made) == len(waiting)
            assert socket.taken + waiting == put
        made.clear()
        assert (made.bytes, len(made), made._timer) == (0, 0, None)

    asyncio.run(story())


def test_what_waits_is_sent_by_itself_once_there_is_room(monkeypatch):
    monkeypatch.setattr(send_queue, "FLUSH_S", 0)

    async def story():
        socket = Socket()
        made = SendQueue(socket.send)
        for number in range(3):
            assert made.put([bytes([number])])
        socket.room = 2
        await until(lambda: len(socket.taken) == 2)
        socket.room = 9
        await until(lambda: not len(made))
        assert socket.taken == [[b"\0"], [b"\1"], [b"\2"]]
        assert made._timer is None

    asyncio.run(story())


@pytest.mark.parametrize(
    ("size", "count"), [(60, 2), (0, 3)], ids=["full of bytes", "full of messages"]
)
def test_it_is_full_of_bytes_or_of_messages(monkeypatch, size, count):
    monkeypatch.setattr(send_queue, "MAX_QUEUED_MESSAGES", 3)

    async def story():
        socket = Socket()
        made = SendQueue(socket.send, most_bytes=100)
        for _ in range(count):
            assert not made.full
            assert made.put([bytes(size)])
        assert made.full
        assert not made.put([b""])
        assert len(made) == count
        socket.room = 1
        made._flush()
        assert made.put([b""])
        made.clear()

    asyncio.run(story())


class Counted(bytes):
    """Bytes that count how often somebody asks how long they are."""

    asked = 0

    def __len__(self):
        Counted.asked += 1
        return super().__len__()


def test_what_waits_is_measured_once_when_it_comes_and_once_when_it_goes():
    async def story():
        Counted.asked = 0
        socket = Socket()
        made = SendQueue(socket.send)
        for _ in range(1000):
            assert made.put([Counted(b"frame")])
        socket.room = 1000
        made._flush()
        assert not len(made)
        assert Counted.asked == 2000

    asyncio.run(story())
