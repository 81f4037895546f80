"""The API's routes: every request is checked in one order, token first, and answered as JSON."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fcil_protocol.errors import FcilError, NotNow, StorageError, TrustError, UsageError
from fcil_protocol.formats import with_iso_times
from fcil_protocol.process.terminal import SCHEMA_VERSION
from fcil_server.federation.api_tokens import ApiToken, TokenRole, find_token, read_tokens
from fcil_server.web.api import inputs, problems
from fcil_server.web.api.acts import Acts
from fcil_server.web.api.endpoints import EVENTS, Asked, Endpoint, FindFile
from fcil_server.web.api.feed import Feeds
from fcil_server.web.api.file_answer import OpenFileAnswer
from fcil_server.web.api.openapi import KEY_HEADER, document
from fcil_server.web.api.readings import Readings, missing
from fcil_server.web.errors import Faults
from fcil_server.web.requests import Guard, RefusedRequest, read_json

MAX_BODY_BYTES = 256 << 10  # `inputs.MOST_NAMES` names fit
MAX_DOWNLOADS = 32  # files that are sent at the same time
MAX_PATH_VALUE = 300  # characters of a variable in an address
MAX_FAULTS = 5  # of an input that are named
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; sandbox",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_GET_ONE = "Make one on the server's machine: fcil-server token new NAME"
_WORDS = {
    404: "there is nothing here; the addresses of this API begin with /v1 (GET /v1/openapi.json).",
    405: "this address does not support that method.",
}

M = TypeVar("M", bound=BaseModel)


class ApiApp:
    """Answers the API's requests.

    Args:
        directory: of the federation.
        endpoints: the table.
        readings: reads the federation.
        acts: carries out acts.
        feeds: the streams of events.
        faults: logs our own defects, and a file of tokens that cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        endpoints: Sequence[Endpoint],
        readings: Readings,
        acts: Acts,
        feeds: Feeds,
        faults: Faults,
    ) -> None:
        self._directory = directory
        self._endpoints = endpoints
        self._readings = readings
        self._acts = acts
        self._feeds = feeds
        self._faults = faults
        self._document = document(endpoints)
        self._downloads: weakref.WeakSet[OpenFileAnswer] = weakref.WeakSet()

    def routes(self) -> list[BaseRoute]:
        """Return one route for each address, with all of its methods."""
        by_path: dict[str, dict[str, Endpoint]] = {}
        for one in self._endpoints:
            by_path.setdefault(one.path, {})[one.method] = one
        return [
            Route(path, functools.partial(self._answer, methods), methods=list(methods))
            for path, methods in by_path.items()
        ]

    async def _answer(self, methods: dict[str, Endpoint], request: Request) -> Any:
        one = methods["GET" if request.method == "HEAD" else request.method]
        token = None if one.role is None else self._token(request, one.role)
        asked = Asked(token, _path(request), _query(one, request), await _body(one, request))
        if one.act is not None:
            return await self._act(one, asked, request)
        if one.read is not None:
            return _data(one, await one.read(asked))
        if not one.enveloped:
            return JSONResponse(self._document)
        if one.file is not None:
            return await self._file(one.file, asked)
        return await self._stream(asked, request)

    async def _file(self, find: FindFile, asked: Asked) -> Response:
        file, kind = await find(asked)
        # After the wait, so that requests of the same moment count each other.
        if sum(not answer.is_over for answer in self._downloads) >= MAX_DOWNLOADS:
            file.close()
            many = NotNow(f"{MAX_DOWNLOADS} files are being read.", action="Try again later.")
            raise RefusedRequest(503, many)
        answer = OpenFileAnswer(file, kind)
        self._downloads.add(answer)
        return answer

    def _token(self, request: Request, needed: TokenRole) -> ApiToken:
        """Return the token of a request.

        Raises:
            RefusedRequest: it has none, the token lacks the role, or none can be checked.
        """
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not text.strip():
            needs = TrustError(
                "this address needs a token: Authorization: Bearer TOKEN.", action=_GET_ONE
            )
            raise RefusedRequest(401, needs)
        try:
            tokens = read_tokens(self._directory)
        except FcilError as error:  # its text is for the operator, not for a stranger
            self._faults.tell(error, "the reading of its tokens")
            shut = StorageError("no token can be checked now.", action="The server's log says why.")
            raise RefusedRequest(503, shut) from error
        token = find_token(tokens, text.strip(), time.time())
        if token is None:
            wrong = TrustError("this token is unknown, expired or revoked.", action=_GET_ONE)
            raise RefusedRequest(401, wrong)
        if not token.role.allows(needed):
            weak = TrustError(
                f"the token {token.name} has the role {token.role.value}; this needs "
                f"{needed.value}.",
                action=f"Use another: fcil-server token new NAME --role {needed.value}",
            )
            raise RefusedRequest(403, weak)
        return token

    def _still(self, asked: Asked) -> Callable[[], bool]:
        """Return a check that the token of a stream is still valid."""

        def valid() -> bool:
            try:
                tokens = read_tokens(self._directory)
            except FcilError:
                return False
            return any(t == asked.token and t.is_valid(time.time()) for t in tokens)

        return valid

    async def _act(self, one: Endpoint, asked: Asked, request: Request) -> Response:
        assert one.act is not None, "the caller checks it"
        assert asked.token is not None, "every act needs one"
        keys = request.headers.getlist(KEY_HEADER)
        if len(keys) > 1:
            raise UsageError(f"{KEY_HEADER} may be given once.", action="Send one.")
        status, content = await self._acts.carry_out(
            one.act(asked),
            asked.token,
            place=(request.method, request.url.path),
            body=asked.body.model_dump(exclude={"schema_version"}),
            key=keys[0] if keys else None,
            status=int(one.status),
        )
        self._readings.expire()
        return _data(one, content, status)

    async def _stream(self, asked: Asked, request: Request) -> Any:
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        start = asked.query
        assert isinstance(start, inputs.StreamStart), "the table says so"
        return await self._feeds.open(start.last, request, self._still(asked))


def _data(one: Endpoint, data: dict[str, Any], status: int | None = None) -> Response:
    """Return data as an answer, by the endpoint's model."""
    assert one.answer is not None, "an endpoint with data has a model"
    checked = one.answer.model_validate(with_iso_times(data))
    told = checked.model_dump(mode="json", exclude_unset=True)
    content = {"schema_version": SCHEMA_VERSION, "status": "ok", "data": told}
    return JSONResponse(content, one.status if status is None else status)


def _path(request: Request) -> dict[str, str]:
    found = {name: str(value) for name, value in request.path_params.items()}
    for name, value in found.items():
        if len(value) > MAX_PATH_VALUE or not value.isprintable():
            few = f"{name} in the address has at most {MAX_PATH_VALUE} printable characters."
            raise missing(few)
    return found


def _query(one: Endpoint, request: Request) -> inputs.InputModel:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise UsageError(f"parameter {name[:40]!r} may be given once.")
        given[name] = value
    return _checked(one.query, given, "parameter")


async def _body(one: Endpoint, request: Request) -> inputs.ActBody:
    if one.body is None:
        if request.headers.get("content-length", "0") != "0":
            raise UsageError("this address takes no body.", action="Leave it out.")
        return inputs.EmptyBody()
    fields: dict[str, Any] = {}
    if request.headers.get("content-length", "0") != "0":
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedRequest(415, UsageError("expected a body of type application/json."))
        fields = await read_json(request, MAX_BODY_BYTES)
    return _checked(one.body, fields, "field", strict=True)


def _checked(model: type[M], given: Any, what: str, *, strict: bool = False) -> M:
    try:
        return model.model_validate(given, strict=strict)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        listed = ", ".join(model.model_fields) or "none"
        faults = [_fault(dict(one), what, listed) for one in found[:MAX_FAULTS]]
        more = f" and {len(found) - MAX_FAULTS} more" if len(found) > MAX_FAULTS else ""
        raise UsageError(f"{'; '.join(faults)}{more}.") from error


def _fault(error: dict[str, Any], what: str, listed: str) -> str:
    where = ".".join(ascii(part)[:40].strip("'") for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown {what} {where}; known here: {listed}"
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"{what} {where}: {said[:1].lower()}{said[1:]}" if where else said


def make_app(api: ApiApp, faults: Faults, extra: Sequence[BaseRoute] = ()) -> Guard:
    """Return the API as an ASGI app.

    Args:
        api: its routes.
        faults: logs our own defects.
        extra: routes without a token.
    """

    async def refused(_: Request, error: Exception) -> Response:
        if isinstance(error, RefusedRequest):
            return problems.problem(error.error, error.status)
        assert isinstance(error, FcilError)
        return problems.problem(error)

    async def wrong(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = _WORDS.get(error.status_code, "the request cannot be answered.")
        response = problems.problem(UsageError(words), error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        faults.tell(error, f"{request.method} {request.url.path}")
        return problems.defect()

    app = Starlette(
        routes=[*api.routes(), *extra],
        exception_handlers={
            FcilError: refused,
            RefusedRequest: refused,
            HTTPException: wrong,
            Exception: failed,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, HEADERS, lambda sentence: problems.refusal(sentence, 414))
