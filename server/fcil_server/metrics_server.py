"""``python -m fcil_server.metrics_server``: serves the figures, in a process of its own.

So it never delays a round, and may be killed at any time. The server starts it with a
listening socket and the end of a pipe: when the pipe closes, the server is gone, however it
ended, and this process ends too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fcil_protocol.errors import FcilError
from fcil_server.addresses import Certificate
from fcil_server.exposition import Snapshot, render
from fcil_server.ledger_totals import Totals
from fcil_server.metrics_source import MetricsSource
from fcil_server.web_door import make_server

FRESH_S = 1.0  # figures are gathered at most this often, however many ask
MEMORY_BYTES = 512 << 20  # beyond it this process ends, and is started again
MAX_FILES = 256
NICE = 5  # a round comes first
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

T = TypeVar("T")


class Fresh(Generic[T]):
    """A value that is made at most once in `FRESH_S`, by one thread, for all who want it.

    Args:
        make: makes it; what it raises is raised to whoever waits for it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._making: asyncio.Future[T] | None = None
        self._ends = 0.0

    async def get(self) -> T:
        """Return the value, made by now or within the last second."""
        if self._making is None or (self._making.done() and time.monotonic() > self._ends):
            loop = asyncio.get_running_loop()
            self._making = loop.run_in_executor(self._thread, self._make)
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def _made(self, made: asyncio.Future[T]) -> None:
        self._ends = time.monotonic() + FRESH_S
        if not made.cancelled():
            made.exception()  # told to whoever asked; nobody else is to hear of it


class Figures:
    """What the two pages show.

    Args:
        source: where the figures come from.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._live: Fresh[dict[str, Any]] = Fresh(source.ask)
        self._totals: Fresh[Totals] = Fresh(source.totals)

    async def metrics(self, request: Request) -> Response:
        """Show all figures; those of the server are missing while it does not answer."""
        try:
            snapshot = await self._snapshot()
        except FcilError as error:
            return _text(f"{error.code}: {error}", 503)
        accept = request.headers.get("accept", "")
        body, content_type = render(snapshot, accept)
        return Response(body, headers={**_HEADERS, "Content-Type": content_type})

    async def _snapshot(self) -> Snapshot:
        began = time.monotonic()
        totals, live = await asyncio.gather(
            self._totals.get(), self._live.get(), return_exceptions=True
        )
        if isinstance(totals, BaseException):
            raise totals
        if isinstance(live, BaseException):
            if not isinstance(live, FcilError):
                raise live
            live = None
        return self._source.snapshot(totals, live, began)

    async def warm_up(self) -> None:
        """Read a long ledger before somebody waits for it: the first time takes longest."""
        with contextlib.suppress(FcilError):  # whoever asks is told
            await self._totals.get()

    async def health(self, _request: Request) -> Response:
        """Say whether the server answers, and what it does."""
        try:
            live = await self._live.get()
        except FcilError as error:
            return _text(f"{error.code}: {error}", 503)
        waits = f"; waits for {live['waiting_for']}" if live["waiting_for"] else ""
        return _text(f"ok: {live['phase']}, {live['ready']} clients ready{waits}", 200)


def _text(line: str, code: int) -> Response:
    return PlainTextResponse(f"{line}\n", code, headers=_HEADERS)


def make_app(figures: Figures) -> Starlette:
    """Return the two pages as an ASGI app."""
    routes = [Route("/metrics", figures.metrics), Route("/healthz", figures.health)]
    return Starlette(routes=routes)


async def _serve(figures: Figures, certificate: Certificate, fd: int, parent: int) -> None:
    """Serve until the server's end of the pipe closes."""
    server = make_server(make_app(figures), certificate)
    loop = asyncio.get_running_loop()
    warming = loop.create_task(figures.warm_up())

    def gone() -> None:
        loop.remove_reader(parent)
        server.should_exit = True

    loop.add_reader(parent, gone)
    await server.serve(sockets=[socket.socket(fileno=fd)])
    warming.cancel()


def _limit() -> None:
    """Bound what this process may take from the server's machine."""
    os.nice(NICE)
    for what, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_NOFILE, MAX_FILES)):
        _, hard = resource.getrlimit(what)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, limit))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after the server's end."""
    parser = argparse.ArgumentParser(prog="fcil_server.metrics_server")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--fd", type=int, required=True, help="a listening socket")
    parser.add_argument("--parent", type=int, required=True, help="a pipe's end to read from")
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--cert", default="")
    parser.add_argument("--key", default="")
    args = parser.parse_args(arguments)
    _limit()
    figures = Figures(MetricsSource(args.dir, clients=args.clients))
    try:
        asyncio.run(_serve(figures, Certificate(args.cert, args.key), args.fd, args.parent))
    except FcilError as error:
        print(f"{error.code}: {error}", file=sys.stderr)  # noqa: T201 - the server's log
        return error.exit_code
    os._exit(0)  # a thread may still wait for a server that is gone


if __name__ == "__main__":
    raise SystemExit(main())
