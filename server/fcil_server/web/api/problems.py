"""Errors as ``application/problem+json`` (RFC 9457), with the stable codes of fcil.

``type`` is the address of the code's meaning on this server, which is that of docs/errors.md.
"""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import Field
from starlette.responses import JSONResponse, Response

from fcil_protocol.errors import (
    FcilError,
    InternalError,
    NotYet,
    TooLarge,
    TrustError,
    UsageError,
    all_errors,
)
from fcil_server.web.api.answers import AnswerModel
from fcil_server.web.errors import action_of, begun, status_of

ERRORS_PATH = "/v1/errors"
PROBLEM = "application/problem+json"
DEFECT = "The API has a defect; the server's log has the details."
# Errors of the listener, which stands before the API.
_BY_STATUS: dict[int, type[FcilError]] = {
    404: UsageError,
    411: UsageError,
    413: TooLarge,
    421: TrustError,
    431: TooLarge,
}
_RETRY_S = "2"


class Problem(AnswerModel):
    """An error."""

    type: str = Field(description="address of the code's meaning")
    title: str = Field(description="what the code means")
    status: int
    detail: str = Field(description="what happened")
    code: str = Field(description="stable; docs/errors.md")
    action: str = Field(description="what to do")


def problem(error: FcilError, status: int | None = None) -> Response:
    """Return an error as an answer."""
    number = status or status_of(error)
    content = Problem(
        type=f"{ERRORS_PATH}/{error.code}",
        title=meaning_of(type(error)),
        status=number,
        detail=begun(error.message),
        code=error.code,
        action=action_of(error),
    )
    headers = {"content-type": PROBLEM}
    if number == 401:
        headers["www-authenticate"] = 'Bearer realm="fcil"'
    if number in (429, 503) or isinstance(error, NotYet):
        headers["retry-after"] = _RETRY_S
    return JSONResponse(content.model_dump(), number, headers)


def refusal(sentence: str, status: int) -> Response:
    """Return the answer to a request that the listener refuses."""
    kind = _BY_STATUS.get(status, UsageError)
    return problem(kind(sentence, action=_ADVICE.get(status, "")), status)


_ADVICE = {
    413: "Send less.",
    421: "Call it by the address that fcil-server status shows.",
    431: "Send fewer or shorter headers.",
}


def defect() -> Response:
    """Return our own defect as an answer."""
    return problem(InternalError(DEFECT))


def meaning_of(kind: type[FcilError]) -> str:
    """Return the first sentence about an error's class."""
    first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return " ".join(first.split()).replace("``", "`")


def error_rows() -> list[dict[str, Any]]:
    """Return every code of an error with its meaning."""
    return [
        {
            "code": kind.code,
            "meaning": meaning_of(kind),
            "action": kind.default_action(),
            "exit_code": kind.exit_code,
            "page": f"docs/errors.md#{kind.code}",
        }
        for kind in all_errors()
    ]
