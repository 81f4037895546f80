"""``python -m fcil_server.web.metrics.server``: serves the metrics, in a separate process.

So it never delays a round, and may be killed at any time (`web.child`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import Route

from fcil_protocol.process.child import limit
from fcil_server.federation.addresses import TlsFiles
from fcil_server.web import child as web_child
from fcil_server.web.http_server import make_server
from fcil_server.web.metrics.endpoints import Figures
from fcil_server.web.metrics.source import MetricsSource

MAX_FILES = 256


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
