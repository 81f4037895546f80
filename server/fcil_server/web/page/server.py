"""``python -m fcil_server.web.page.server``: serves the dashboard, in a separate process.

So it never delays a round, and may be killed at any time (`web.child`): its data is in the
federation's directory and in the browsers' cookies.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Route

from fcil_protocol.process import control_socket
from fcil_protocol.process.child import limit
from fcil_server.federation.addresses import TlsFiles
from fcil_server.web import child as web_child
from fcil_server.web.errors import Faults
from fcil_server.web.http_server import HttpLimits, make_server
from fcil_server.web.page.access.sessions import KeyedSessions
from fcil_server.web.page.actions import routes as act_routes
from fcil_server.web.page.actions.actions import PageActions
from fcil_server.web.page.app import Pages, PageSite, make_app
from fcil_server.web.page.board import Boards
from fcil_server.web.page.event_stream import Hub
from fcil_server.web.page.watch import PageWatch
from fcil_server.web.requests import Guard

# 100 streams, and room for new visitors, script requests, and refusals.
LIMITS = HttpLimits(connections=256, body_bytes=4096)
MAX_FILES = 512
STACK_BYTES = 1 << 20  # of a thread; all of them count as memory of the process
THREADS = 4  # for short file reads
ASK_S = 3.0  # for the server's status
ORDER_S = 4.0  # and for an action, which asks twice: less than the time limit of a request


class Page:
    """All parts of the process.

    Args:
        args: the options that the server passed (`parser`).
    """

    def __init__(self, args: argparse.Namespace) -> None:
        directory: Path = args.dir
        self.hub = Hub()
        faults = Faults()
        boards = Boards(directory, faults, acts=not args.read_only)
        greeting = {"read_only": args.read_only, "version": version("fcil")}

        def ask(op: str, **fields: Any) -> dict[str, Any]:
            return control_socket.ask(directory, op, ASK_S, **fields)

        def order(op: str, **fields: Any) -> dict[str, Any]:
            return control_socket.ask(directory, op, ORDER_S, **fields)

        self.watch = PageWatch(boards, ask, self.hub, greeting, faults)
        keyed = KeyedSessions(directory)
        secure = bool(args.cert)
        site = PageSite(directory, tuple(args.beside), read_only=args.read_only, secure=secure)
        acts = None if args.read_only else PageActions(directory, order)
        self.app: Guard = make_app(
            Pages(site, self.watch, self.hub, keyed),
            act_routes.routes(keyed, order, acts, secure=secure),
            _extra(args, functools.partial(ask, "gauges")),
            faults,
        )


def _extra(args: argparse.Namespace, gauges: Callable[[], dict[str, Any]]) -> list[BaseRoute]:
    """Return the routes that need no session, if they are enabled."""
    found: list[BaseRoute] = []
    if args.health:
        found.append(Route("/healthz", web_child.Health(web_child.Fresh(gauges)).answer))
    if args.metrics:
        from fcil_server.web.metrics.server import Figures
        from fcil_server.web.metrics.source import MetricsSource

        figures = Figures(MetricsSource(args.dir, clients=args.clients))
        found.append(Route("/metrics", figures.metrics))
    return found


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options that the server passes to this process."""
    made = web_child.parser("fcil_server.web.page.server")
    made.add_argument("--read-only", action="store_true")
    made.add_argument("--metrics", action="store_true")
    made.add_argument("--health", action="store_true")
    made.add_argument("--beside", type=Path, action="append", default=[])
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after the server's end."""
    args = parser().parse_args(arguments)
    limit(MAX_FILES)
    threading.stack_size(STACK_BYTES)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        page = Page(args)
        server = make_server(page.app, TlsFiles(args.cert, args.key), LIMITS)
        watching = loop.create_task(page.watch.run())
        warming = loop.create_task(page.watch.warm_up())
        await web_child.serve_socket(server, args.fd, page.hub.end)
        watching.cancel()
        warming.cancel()

    return web_child.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
