"""Errors of the dashboard, each answered with one sentence."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from http import HTTPStatus

from starlette.responses import HTMLResponse, JSONResponse, Response

from fcil_protocol.errors import (
    ConfigError,
    FcilError,
    InternalError,
    LinkError,
    NotNow,
    NotYet,
    StorageError,
    Timeout,
    TooLarge,
    TrustError,
    UsageError,
)
from fcil_server.reports.charts.render import template

QUIET_S = 600.0  # the same defect is logged at most this often
MAX_REMEMBERED = 50  # defects
MAX_FRAMES = 8  # of a traceback, the innermost
DEFECT = "The dashboard has a defect; the server's log has the details."

_STATUS: tuple[tuple[type[FcilError], int], ...] = (
    (UsageError, 400),
    (ConfigError, 400),
    (TrustError, 403),
    (NotNow, 409),
    (NotYet, 409),
    (TooLarge, 413),
    (LinkError, 503),
    (Timeout, 503),
    (StorageError, 503),
)


def status_of(error: FcilError) -> int:
    """Return the HTTP status that stands for an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_response(error: FcilError, status: int | None = None) -> Response:
    """Return an error in the form for scripts."""
    # The general advice of UsageError is about commands.
    action = error.action or ("" if isinstance(error, UsageError) else error.default_action())
    content = {"error": {"code": error.code, "says": _begun(error.message), "action": action}}
    return JSONResponse(content, status or status_of(error))


def defect() -> Response:
    """Return our own defect in the form for scripts."""
    return error_response(InternalError(DEFECT))


def page(status: int, sentence: str) -> Response:
    """Return an HTML page with one sentence."""
    title = HTTPStatus(status).phrase
    return HTMLResponse(template("problem.html", title=title, says=_begun(sentence)), status)


def _begun(sentence: str) -> str:
    """Capitalise a sentence, since no ``error:`` precedes it on an HTML page."""
    return sentence[:1].upper() + sentence[1:]


class Faults:
    """Writes our own defects into the server's log, each once in a while.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, int], float] = {}

    def tell(self, error: BaseException, where: str) -> None:
        """Log a failure, unless the same was logged lately."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        key = (type(error).__name__, (last[0].lineno or 0) if last else 0)
        now = self._clock()
        if now - self._told.get(key, -QUIET_S) < QUIET_S:
            return
        while len(self._told) >= MAX_REMEMBERED:
            del self._told[next(iter(self._told))]
        self._told[key] = now
        lines = "".join(traceback.format_exception(error, limit=-MAX_FRAMES))
        text = f"internal: the dashboard failed at {where}\n{lines}"
        print(text, file=sys.stderr, end="")  # noqa: T201 - the server's log
