"""``python -m fcil_server.web.api.server``: serves the HTTP API, in a separate process.

So it never delays a round, and may be killed at any time (`web.child`): its data is in the
federation's directory.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.routing import Route

from fcil_protocol.process import control_socket
from fcil_protocol.process.child import limit
from fcil_server.federation.addresses import TlsFiles
from fcil_server.web import child as web_child
from fcil_server.web.api.acts import ASK_S, Acts, Ask
from fcil_server.web.api.app import MAX_BODY_BYTES, ApiApp, make_app
from fcil_server.web.api.endpoints import all_endpoints
from fcil_server.web.api.feed import Feeds
from fcil_server.web.api.past_acts import PastActs
from fcil_server.web.api.problems import refusal
from fcil_server.web.api.readings import Readings
from fcil_server.web.errors import Faults
from fcil_server.web.http_server import HttpLimits, make_server

# A long run's results take seconds to read.
LIMITS = HttpLimits(connections=256, body_bytes=MAX_BODY_BYTES, request_s=30.0)
MAX_FILES = 512
STACK_BYTES = 1 << 20  # of a thread; all of them count as memory of the process
THREADS = 4  # for the reading of files


class Api:
    """All parts of the process.

    Args:
        directory: of the federation.
        ask: asks the running server: ``ask(op, wait_s, **fields)``, blocking.
    """

    def __init__(self, directory: Path, ask: Ask) -> None:
        faults = Faults(what="the API")
        readings = Readings(directory, ask)
        past = PastActs(directory)
        past.tidy()
        acts = Acts(ask, past)
        self._feeds = Feeds(directory, ask, faults)
        api = ApiApp(directory, all_endpoints(readings), readings, acts, self._feeds, faults)
        health = web_child.Health(web_child.Fresh(functools.partial(ask, "gauges")))
        self.app = make_app(api, faults, [Route("/healthz", health.answer)])

    async def work(self) -> None:
        """Look for news while a stream is open; until cancelled."""
        await self._feeds.run()

    def end(self) -> None:
        """End all streams."""
        self._feeds.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; 0 after the server's end."""
    args = web_child.parser("fcil_server.web.api.server").parse_args(arguments)
    limit(MAX_FILES)
    threading.stack_size(STACK_BYTES)

    def ask(op: str, wait_s: float = ASK_S, **fields: Any) -> dict[str, Any]:
        return control_socket.ask(args.dir, op, wait_s, **fields)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        api = Api(args.dir, ask)
        server = make_server(api.app, TlsFiles(args.cert, args.key), LIMITS, refusal)
        working = loop.create_task(api.work())
        await web_child.serve_socket(server, args.fd, api.end)
        working.cancel()

    return web_child.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
