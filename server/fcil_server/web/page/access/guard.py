"""Rules for every request to the dashboard, headers of every answer, and errors as answers."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from fcil_protocol.errors import FcilError, InternalError, UsageError
from fcil_protocol.ids import RunId, is_run_id
from fcil_server.reports.charts.render import template
from fcil_server.web.errors import action_of, begun, status_of

MAX_VALUE = 200  # characters of one parameter
DEFECT = "The dashboard has a defect; the server's log has the details."

# Nothing is loaded from, sent to or shown on other sites; the HTML has no inline script or style.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "cache-control": "no-store",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def too_long(sentence: str) -> Response:
    """Return the answer to a query that is too long."""
    return problem_page(414, sentence)


def parameters(request: Request, *known: str, many: str = "") -> Mapping[str, str]:
    """Return a request's parameters.

    Args:
        request: the request.
        known: names that it may have, once each.
        many: a name that it may repeat; read it with `request.query_params`.

    Raises:
        UsageError: it has an unknown one, one twice, or one that is too long.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known and name != many:
            listed = ", ".join(sorted({*known, *([many] if many else [])})) or "none"
            raise UsageError(f"unknown parameter {name[:40]!r}; known here: {listed}.")
        if (name in found and name != many) or len(value) > MAX_VALUE:
            raise UsageError(
                f"parameter {name} may be given once, with at most {MAX_VALUE} characters."
            )
        found[name] = value
    return found


def run_of(given: Mapping[str, str]) -> RunId | None:
    """Return the requested run; None: the newest.

    Raises:
        UsageError: it is no name of a run.
    """
    name = given.get("run", "")
    if not name:
        return None
    if not is_run_id(name):
        raise UsageError(f"{name[:40]!r} is not a run.", action="Choose one on the dashboard.")
    return RunId(name)


def number_of(given: Mapping[str, str], name: str) -> int:
    """Return a parameter that is a number; 0 if it is not given.

    Raises:
        UsageError: it is not a number.
    """
    text = given.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise UsageError(f"expected {name} to be a number, got {text[:20]!r}.")
    return int(text)


def error_response(error: FcilError, status: int | None = None) -> Response:
    """Return an error in the form for scripts."""
    says, action = begun(error.message), action_of(error)
    content = {"error": {"code": error.code, "says": says, "action": action}}
    return JSONResponse(content, status or status_of(error))


def defect() -> Response:
    """Return our own defect in the form for scripts."""
    return error_response(InternalError(DEFECT))


def problem_page(status: int, sentence: str) -> Response:
    """Return an HTML page with one sentence."""
    title = HTTPStatus(status).phrase
    return HTMLResponse(template("problem.html", title=title, says=begun(sentence)), status)
