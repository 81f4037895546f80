"""Requests to the processes that serve HTTP: bodies, turns, threads, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fcil_protocol.errors import FcilError, NotNow, TooLarge, UsageError

MAX_QUERY_BYTES = 1024

T = TypeVar("T")


class RefusedRequest(Exception):
    """A request that is answered with a sentence and not processed."""

    def __init__(self, status: int, error: FcilError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


@contextlib.asynccontextmanager
async def one_of(places: asyncio.Semaphore, patience_s: float, many: str) -> AsyncIterator[None]:
    """Hold a place; a request that gets none in time is asked to come again.

    Args:
        places: the places.
        patience_s: seconds to wait for one.
        many: the sentence for a request that gets none.

    Raises:
        RefusedRequest: there are too many.
    """
    try:
        async with asyncio.timeout(patience_s):
            await places.acquire()
    except TimeoutError as error:
        raise RefusedRequest(429, NotNow(many, action="Try again in a few seconds.")) from error
    try:
        yield
    finally:
        places.release()


async def in_thread(pool: ThreadPoolExecutor, do: Callable[[], T]) -> T:
    """Return the result of blocking work."""
    return await asyncio.get_running_loop().run_in_executor(pool, do)


async def read_json(request: Request, most: int) -> dict[str, Any]:
    """Return the body's JSON object; a body beyond the limit is not read to its end.

    Args:
        request: the request.
        most: bytes of its body.

    Raises:
        RefusedRequest: the body is too long, ends early, or is no JSON object.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                long = TooLarge(f"a body may be at most {most} bytes long.", action="Send less.")
                raise RefusedRequest(413, long)
    except ClientDisconnect as error:  # no client is left to answer
        raise RefusedRequest(400, UsageError("the request ended before its body did.")) from error
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(400, UsageError("expected a JSON object.")) from error
    if not isinstance(fields, dict):
        raise RefusedRequest(400, UsageError("expected a JSON object."))
    return fields


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
            RefusedRequest: the queue is full.
        """
        if self._under_way >= self._most:
            many = NotNow("too many requests are under way.", action="Try again in a few seconds.")
            raise RefusedRequest(429, many)
        loop = asyncio.get_running_loop()
        self._under_way += 1
        done = loop.run_in_executor(self.threads, work, *given)
        done.add_done_callback(self._done)  # it continues when its caller is gone
        return await asyncio.shield(done)

    def _done(self, done: asyncio.Future[T]) -> None:
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # callers get the error; asyncio must not report it again


class Guard:
    """Refuses a query that is too long, and adds headers to every answer.

    Args:
        app: answers the other requests.
        headers: for every answer that has no such header.
        too_long: makes the answer to a query that is too long, from a sentence.
    """

    def __init__(
        self, app: Any, headers: Mapping[str, str], too_long: Callable[[str], Response]
    ) -> None:
        self._app = app
        self._raw = {name.encode(): value.encode() for name, value in headers.items()}
        self._too_long = too_long

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [pair for pair in self._raw.items() if pair[0] not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if len(scope["query_string"]) > MAX_QUERY_BYTES:
            long = f"The query string may be at most {MAX_QUERY_BYTES} bytes long."
            await self._too_long(long)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)
