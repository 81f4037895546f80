"""``/healthz``: one line about the server's state, if it answers."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from fcil_protocol.errors import FcilError
from fcil_protocol.process.terminal import count_of
from fcil_server.web.child import Fresh

PLAIN = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Health:
    """Answers health checks.

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
