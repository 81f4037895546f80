"""How much is read ahead of a socket, and what becomes of messages that nobody may send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq

from fcil_protocol.link.socket_reader import MAX_FRAMES, MAX_SUM_BYTES, QUEUE_BYTES, SocketReader

MIB = 1 << 20


class Pipe:
    """Both ends of a socket without a limit, and the reader of one."""

    def __init__(self) -> None:
        self.taken: list[int] = []  # bytes of each message that was read
        self.refused: list[bytes] = []
        self._context = zmq.Context()
        self.near, self._far = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for sock in (self.near, self._far):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDHWM, 0)
            sock.setsockopt(zmq.RCVHWM, 0)
        self._far.bind("inproc://pipe")
        self.near.connect("inproc://pipe")
        self.reader: SocketReader[list[bytes]] = SocketReader(
            self._far, self._take, lambda: None, lambda frame: self.refused.append(frame.bytes)
        )

    def _take(self, frames: list[zmq.Frame]) -> list[bytes]:
        self.taken.append(sum(map(len, frames)))
        return [frame.bytes for frame in frames]

    async def get(self) -> list[bytes]:
        return await asyncio.wait_for(self.reader.get(), 60)

    def close(self) -> None:
        self.reader.close()
        for sock in (self.near, self._far):
            sock.close()
        self._context.term()


def run(test: Callable[[Pipe], Coroutine[Any, Any, None]]) -> None:
    async def opened() -> None:
        pipe = Pipe()
        try:
            await test(pipe)
        finally:
            pipe.close()

    asyncio.run(opened())


@pytest.mark.parametrize("count", [MAX_FRAMES + 1, 20_000])
def test_a_message_of_too_many_frames_is_thrown_away_and_told_once(count: int) -> None:
    async def test(pipe: Pipe) -> None:
        pipe.near.send_multipart([b"%d" % n for n in range(count)])
        pipe.near.send_multipart([b"x"] * MAX_FRAMES)
        assert await pipe.get() == [b"x"] * MAX_FRAMES
        assert pipe.refused == [b"%d" % MAX_FRAMES]
        assert pipe.taken == [MAX_FRAMES]

    run(test)


def test_a_message_of_too_many_bytes_is_thrown_away_and_told_once() -> None:
    async def test(pipe: Pipe) -> None:
        pipe.near.send_multipart([bytes(MAX_SUM_BYTES), b"!"])
        pipe.near.send_multipart([bytes(MAX_SUM_BYTES - 1), b"!"])
        assert len(await pipe.get()) == 2
        assert pipe.refused == [b"!"]
        assert pipe.taken == [MAX_SUM_BYTES]

    run(test)


def test_what_is_read_ahead_is_bounded_in_bytes_and_goes_on_when_there_is_room() -> None:
    async def test(pipe: Pipe) -> None:
        ahead = QUEUE_BYTES // MIB
        for _ in range(3 * ahead):
            pipe.near.send(bytes(MIB))
        while len(pipe.taken) < ahead:  # noqa: ASYNC110 - each turn may be one in which it reads
            await asyncio.sleep(0)
        for _ in range(1000):  # turns in which it could read on
            await asyncio.sleep(0)
        assert len(pipe.taken) == ahead
        assert not pipe.reader.drained, "the rest waits to be read"
        for _ in range(3 * ahead):
            assert await pipe.get() == [bytes(MIB)]
        while not pipe.reader.drained:  # noqa: ASYNC110 - it finds out in one of its turns
            await asyncio.sleep(0)

    run(test)


def test_a_long_message_that_is_thrown_away_leaves_others_their_turn() -> None:
    async def test(pipe: Pipe) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        pipe.near.send_multipart([b"x"] * 50_000)
        pipe.near.send(b"after it")
        task = asyncio.ensure_future(other())
        assert await pipe.get() == [b"after it"]
        task.cancel()
        assert turns >= 10

    run(test)
