"""What is shown of a federation to who watches it by machine: ``/metrics``, and its health."""

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
    """What the two pages show.

    Args:
        source: where the figures come from.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._live: Fresh[dict[str, Any]] = Fresh(source.ask)
        self._totals: Fresh[Totals] = Fresh(source.totals)
        self.health = Health(self._live).answer

    async def metrics(self, request: Request) -> Response:
        """Show all figures; those of the server are missing while it does not answer."""
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
        """Read a long ledger before somebody waits for it: the first time takes longest."""
        with contextlib.suppress(FcilError):  # whoever asks is told
            await self._totals.get()
