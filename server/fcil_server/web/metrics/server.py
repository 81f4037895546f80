"""``python -m fcil_server.web.metrics.server``: serves the metrics, in a separate process.

So it never delays a round, and may be killed at any time (`web.child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fcil_protocol.errors import FcilError
from fcil_protocol.process.child import limit
from fcil_server.federation.addresses import TlsFiles
from fcil_server.web import child as web_child
from fcil_server.web.child import PLAIN, Fresh, Health, away
from fcil_server.web.http_server import make_server
from fcil_server.web.metrics.exposition import Snapshot, render
from fcil_server.web.metrics.source import MetricsSource
from fcil_server.web.metrics.totals import Totals

MAX_FILES = 256


class Figures:
    """Content of the two endpoints.

    Args:
        source: gathers the metrics.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._live: Fresh[dict[str, Any]] = Fresh(source.ask)
        self._totals: Fresh[Totals] = Fresh(source.totals)
        self.health = Health(self._live).answer

    async def metrics(self, request: Request) -> Response:
        """Answer with all metrics, without the server's while it does not answer."""
        try:
            snapshot = await self._snapshot()
        except FcilError as error:
            return away(error)
        accept = request.headers.get("accept", "")
        body, content_type = render(snapshot, accept)
        return Response(body, headers={**PLAIN, "Content-Type": content_type})

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
        """Read a long ledger before the first request: the first time takes longest."""
        with contextlib.suppress(FcilError):  # requests get the error
            await self._totals.get()


def make_app(figures: Figures) -> Starlette:
    """Return the two endpoints as an ASGI app."""
    routes = [Route("/metrics", figures.metrics), Route("/healthz", figures.health)]
    return Starlette(routes=routes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after the server's end."""
    args = web_child.parser("fcil_server.web.metrics.server").parse_args(arguments)
    limit(MAX_FILES)
    figures = Figures(MetricsSource(args.dir, clients=args.clients))

    async def serve() -> None:
        server = make_server(make_app(figures), TlsFiles(args.cert, args.key))
        warming = asyncio.get_running_loop().create_task(figures.warm_up())
        await web_child.serve_socket(server, args.fd)
        warming.cancel()

    return web_child.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
