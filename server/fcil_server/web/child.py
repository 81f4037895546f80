"""Common parts of the HTTP processes next to the server: they may fail, and it continues.

The server starts each with a listening socket (`web.supervisor`). When the pipe from the server
closes, the server is gone, however it ended, and the process ends too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fcil_protocol.errors import FcilError
from fcil_protocol.process.child import parent_pipe
from fcil_protocol.process.terminal import count_of

FRESH_S = 1.0  # between two gatherings of content, for any number of requests
PLAIN = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

T = TypeVar("T")


class Fresh(Generic[T]):
    """A value that one thread makes at most once in `FRESH_S`, for all callers.

    Args:
        make: makes it; its error is raised for every caller.
        thread: runs ``make``; default: a thread of its own.
    """

    def __init__(self, make: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> None:
        self._make = make
        self._thread = thread or ThreadPoolExecutor(max_workers=1)
        self._making: asyncio.Future[T] | None = None
        self._ends = 0.0

    async def get(self) -> T:
        """Return the value, made now or within the last second."""
        if self._making is None or (self._making.done() and time.monotonic() > self._ends):
            loop = asyncio.get_running_loop()
            self._making = loop.run_in_executor(self._thread, self._make)
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def expire(self) -> None:
        """Let the next caller get a value that is made from now on."""
        self._making = None

    def _made(self, made: asyncio.Future[T]) -> None:
        self._ends = time.monotonic() + FRESH_S
        if not made.cancelled():
            made.exception()  # callers get the error; asyncio must not report it again


class Health:
    """Answers ``/healthz``: one line about the server's state, if it answers.

    Args:
        live: the server's answer to ``gauges``.
    """

    def __init__(self, live: Fresh[dict[str, Any]]) -> None:
        self._live = live

    async def answer(self, _request: Request) -> Response:
        """Answer with the server's state, or that it does not answer.

        What the run waits for stays out: the phrase may name classes, and strangers ask.
        """
        try:
            live = await self._live.get()
        except FcilError as error:
            return away(error)
        return text(f"ok: {live['phase']}, {count_of(live['ready'], 'client')} ready", 200)


def text(line: str, code: int) -> Response:
    """Return a line as an answer."""
    return PlainTextResponse(f"{line}\n", code, headers=PLAIN)


def away(error: FcilError) -> Response:
    """Answer with an error's code only: its sentence names directories, and strangers ask."""
    return text(f"{error.code}: `fcil-server status` says more", 503)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return a parser of the options that the server passes to every such process."""
    made = argparse.ArgumentParser(prog=prog)
    made.add_argument("--dir", type=Path, required=True)
    made.add_argument("--fd", type=int, required=True, help="a listening socket")
    made.add_argument("--clients", type=int, default=0)
    made.add_argument("--cert", default="")
    made.add_argument("--key", default="")
    return made


async def serve_socket(server: Any, fd: int, at_end: Callable[[], None] = lambda: None) -> None:
    """Run a ``uvicorn.Server`` on a socket until the pipe from the parent closes.

    Args:
        server: of `http_server.make_server`.
        fd: a listening socket.
        at_end: called then, before connections end.
    """
    loop, parent = asyncio.get_running_loop(), parent_pipe()

    def gone() -> None:
        loop.remove_reader(parent)
        at_end()
        server.should_exit = True

    loop.add_reader(parent, gone)
    await server.serve(sockets=[socket.socket(fileno=fd)])


def run(serve: Callable[[], Awaitable[None]]) -> int:
    """Serve, and end the process after the server's end, even if its threads still wait.

    Returns:
        The exit code of an error that prevents serving.
    """

    async def work() -> None:
        await serve()

    try:
        asyncio.run(work())
    except FcilError as error:
        print(f"{error.code}: {error}", file=sys.stderr)  # noqa: T201 - the server's log
        return error.exit_code
    os._exit(0)  # a thread may still wait for a server that is gone
