"""A few threads for what requests wait for, and an end to their queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fcil_protocol.errors import NotNow

T = TypeVar("T")


class Pool:
    """Does work of requests beside the loop.

    Args:
        name: of its threads.
        threads: how many.
        most: that may be under way or wait.
    """

    def __init__(self, name: str, *, threads: int = 1, most: int = 50) -> None:
        self.threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._most = most
        self._under_way = 0

    async def do(self, work: Callable[..., T], *given: object) -> T:
        """Return what the work returns; raise what it raises.

        Raises:
            NotNow: too much waits already.
        """
        if self._under_way >= self._most:
            raise NotNow("the page has too much to do.", action="Try again in a few seconds.")
        loop = asyncio.get_running_loop()
        self._under_way += 1
        done = loop.run_in_executor(self.threads, work, *given)
        done.add_done_callback(self._done)  # it goes on when who waits for it is gone
        return await asyncio.shield(done)

    def _done(self, done: asyncio.Future[T]) -> None:
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # told to whoever waits; nobody else is to hear of it
