"""Endpoints for monitoring: ``/metrics``, and the federation's health."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fcil_protocol.errors import FcilError
from fcil_server.web.child import Fresh
from fcil_server.web.metrics.exposition import Snapshot, render
from fcil_server.web.metrics.health import PLAIN, Health, away
from fcil_server.web.metrics.source import MetricsSource
from fcil_server.web.metrics.totals import Totals


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
