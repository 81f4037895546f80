"""A connection that says nothing is cut; one whose message waits to be read has said something."""

from __future__ import annotations

import asyncio

import pytest

from fcil_protocol.link import descriptors
from fcil_protocol.link.descriptors import Silent


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "AGAIN_S", 0.0)


def test_it_is_cut_after_its_time():
    async def story() -> None:
        cut = asyncio.Queue()
        Silent(0.0, cut.put_nowait).began(7)
        assert await cut.get() == 7

    asyncio.run(story())


def test_who_speaks_is_not():
    async def story() -> None:
        cut = asyncio.Queue()
        silent = Silent(0.0, cut.put_nowait)
        silent.began(7)
        silent.began(8)
        silent.spoke(7)
        assert await cut.get() == 8
        assert cut.empty()

    asyncio.run(story())


def test_while_messages_wait_to_be_read_nobody_is_known_to_be_silent():
    async def story() -> None:
        cut, looks = asyncio.Queue(), []

        def unread() -> bool:
            looks.append(1)
            if len(looks) == 3:
                silent.spoke(7)  # its message is read
            return len(looks) < 6

        silent = Silent(0.0, cut.put_nowait, unread)
        silent.began(7)
        silent.began(8)
        assert await cut.get() == 8
        assert cut.empty()
        assert len(looks) >= 6

    asyncio.run(story())


def test_a_connection_that_ends_while_messages_wait_leaves_no_timer():
    async def story() -> None:
        cut = asyncio.Queue()
        silent = Silent(0.0, cut.put_nowait, lambda: True)
        silent.began(7)
        await asyncio.sleep(0)
        silent.spoke(7)
        assert not silent._timers
        silent.close()

    asyncio.run(story())
