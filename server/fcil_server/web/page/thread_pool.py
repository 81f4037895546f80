"""A few threads for the slow work of requests, with a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fcil_protocol.errors import NotNow

T = TypeVar("T")


class Pool:
    """Runs work of requests in threads.

    Args:
        name: of its threads.
        threads: their number.
        most: most pieces of work under way or waiting.
    """

    def __init__(self, name: str, *, threads: int = 1, most: int = 50) -> None:
        self.threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._most = most
        self._under_way = 0

    async def do(self, work: Callable[..., T], *given: object) -> T:
        """Return the result of the work, or raise its error.

        Raises:
            NotNow: the queue is full.
        """
        if self._under_way >= self._most:
            raise NotNow("the dashboard is overloaded.", action="Try again in a few seconds.")
        loop = asyncio.get_running_loop()
        self._under_way += 1
        done = loop.run_in_executor(self.threads, work, *given)
        done.add_done_callback(self._done)  # it continues when its caller is gone
        return await asyncio.shield(done)

    def _done(self, done: asyncio.Future[T]) -> None:
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # callers get the error; asyncio must not report it again
