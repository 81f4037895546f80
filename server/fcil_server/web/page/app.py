"""The dashboard's routes: access to them, and their answers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from fcil_protocol.errors import FcilError, NotNow, TrustError, UsageError
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.charts import assets
from fcil_server.reports.charts.render import template
from fcil_server.reports.sections.params import Params
from fcil_server.reports.sections.sections import SECTIONS
from fcil_server.web.errors import Faults, status_of
from fcil_server.web.event_stream import EventStream
from fcil_server.web.page import pictures
from fcil_server.web.page.access.guard import (
    DEFECT,
    HEADERS,
    defect,
    error_response,
    number_of,
    parameters,
    problem_page,
    run_of,
    too_long,
)
from fcil_server.web.page.access.sessions import (
    GET_A_LINK,
    BrowserSession,
    KeyedSessions,
    set_cookie,
)
from fcil_server.web.page.client_view import client_html
from fcil_server.web.page.compare_view import Comparison
from fcil_server.web.page.event_stream import Hub
from fcil_server.web.page.watch import PageWatch
from fcil_server.web.requests import Guard, Pool, RefusedRequest

STREAM_S = 3600.0  # lifetime of a stream; then the dashboard opens the next
_FOREVER = "public, max-age=31536000, immutable"  # an asset's address has its digest
_FOR_SCRIPTS = ("/part/", "/stream")  # their errors are JSON, like those of all POSTs
_WORDS = {
    404: "There is nothing here.",
    405: "This address does not support that method.",
    413: "The request is too long.",
}

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class PageSite:
    """Subject of the dashboard, and its settings.

    Attributes:
        directory: of the federation.
        beside: directories of other federations or runs, for the comparison.
        read_only: the dashboard has no actions.
        secure: the listener speaks TLS.
    """

    directory: Path
    beside: Sequence[Path] = ()
    read_only: bool = False
    secure: bool = False


class Pages:
    """Answers the dashboard's GET requests.

    Args:
        site: its subject and settings.
        watch: its content.
        hub: of the open dashboards.
        keyed: the sessions.
    """

    def __init__(self, site: PageSite, watch: PageWatch, hub: Hub, keyed: KeyedSessions) -> None:
        self._site = site
        self._watch = watch
        self._hub = hub
        self._keyed = keyed
        self._aside = Pool("aside", threads=2)
        self._comparison = Comparison(site.directory, site.beside)
        self._version = version("fcil")

    def routes(self) -> list[BaseRoute]:
        """Return the routes of all GET requests."""
        get = {
            "/": self.page,
            "/enter": self.enter,
            "/assets/{name:path}": self.asset,
            "/pictures/{run}/{name}": self._inside(self.picture),
            "/part/client": self._inside(self.client),
            "/part/compare": self._inside(self.compare),
            "/part/{name}": self._inside(self.part),
        }
        found: list[BaseRoute] = [Route(path, handle) for path, handle in get.items()]
        return [*found, Route("/stream", self._inside(self.stream))]

    # --- access -------------------------------------------------------------------------------

    def _inside(self, handle: Callable[[Request, BrowserSession], Awaitable[Response]]) -> Handler:
        """Require a session."""

        async def answer(request: Request) -> Response:
            session = self._keyed.of(request.cookies)
            if session is None:
                refusal = TrustError("you are not signed in, or no longer are.", action=GET_A_LINK)
                return _refused(request, refusal, 401)
            response = await handle(request, session)
            if isinstance(response, Response):
                response.headers.update(self._renewal(session))
            return response

        return answer

    def _renewal(self, session: BrowserSession) -> dict[str, str]:
        """Return the header that extends a session in use."""
        if session.renewal is None:
            return {}
        secure = self._site.secure
        return {"set-cookie": set_cookie(self._keyed.current(), session.renewal, secure=secure)}

    async def enter(self, request: Request) -> Response:
        """Show the form for a link's token."""
        parameters(request)
        return self._door(200)

    def _door(self, status: int) -> Response:
        return HTMLResponse(template("enter.html", version=self._version), status)

    # --- content ------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """Show the complete dashboard as of now; without a session, the sign-in form."""
        session = self._keyed.of(request.cookies)
        if session is None:
            return self._door(401)
        wanted = run_of(parameters(request, "run"))
        board = await (self._watch.board() if wanted is None else self._watch.board_of(wanted))
        newest = self._watch.is_newest_run(board)
        trouble = self._watch.stale_reason if newest else ""
        runs = board.history.runs if board.history else ()
        named = board.history.federation if board.history else ""
        html = template(
            "page.html",
            title=named or self._site.directory.resolve().name,
            sections={name: piece.html for name, piece in board.pieces.items()},
            csrf=session.csrf,
            read_only=self._site.read_only,
            running=newest and self._watch.live,
            earlier=not newest,
            runs=[{"id": r.run, "method": r.method, "status": r.status} for r in runs],
            run=board.run,
            version=self._version,
            newest=board.newest,
            trouble=trouble,
            pictures=await asyncio.to_thread(pictures.names, self._site.directory, board.run),
        )
        return HTMLResponse(html, headers=self._renewal(session))

    async def part(self, request: Request, _: BrowserSession) -> Response:
        """Show one section with the visitor's parameters."""
        name = request.path_params["name"]
        if name not in SECTIONS:
            raise HTTPException(404)
        given = parameters(request, "run", "last", "page", "find")
        return HTMLResponse(await self._watch.part(name, run_of(given), Params.parse(given)))

    async def client(self, request: Request, _: BrowserSession) -> Response:
        """Show one client in detail."""
        given = parameters(request, "run", "id")
        history, live = await self._watch.history(run_of(given))
        acts = not self._site.read_only and live is not None
        ledger = self._site.directory / LEDGER_NAME
        work = functools.partial(client_html, history, live, ledger, given.get("id", ""), acts=acts)
        html = await self._aside.do(work)
        if html is None:
            known = UsageError("there is no such client here.", action="Choose one from the list.")
            return _refused(request, known, 404)
        return HTMLResponse(html)

    async def compare(self, request: Request, _: BrowserSession) -> Response:
        """Show a comparison of runs."""
        parameters(request, many="run")
        wanted = request.query_params.getlist("run")
        return HTMLResponse(await self._aside.do(self._comparison.html, wanted))

    async def picture(self, request: Request, _: BrowserSession) -> Response:
        """Show a picture of a run's directory."""
        parameters(request)
        run, name = request.path_params["run"], request.path_params["name"]
        try:
            known = run_of({"run": run})
            assert known is not None, "the address has one"
            await self._watch.history(known)
        except UsageError:
            raise HTTPException(404) from None
        found = await asyncio.to_thread(pictures.load, self._site.directory, run, name)
        if found is None:
            raise HTTPException(404)
        # An SVG that is opened on its own is a document: it may draw, and nothing else.
        policy = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
        return Response(found[0], headers={"content-security-policy": policy}, media_type=found[1])

    async def asset(self, request: Request) -> Response:
        """Send a style sheet or a script."""
        parameters(request, "v")
        try:
            content, kind = assets.load(request.path_params["name"])
        except KeyError:
            raise HTTPException(404) from None
        return Response(content, headers={"cache-control": _FOREVER}, media_type=kind)

    async def stream(self, request: Request, session: BrowserSession) -> Any:
        """Send a dashboard the news as long as it is open."""
        given = parameters(request, "run", "since")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        last = request.headers.get("last-event-id", "")
        seen = number_of({"since": last} if last else given, "since")
        stream = await self._watch.open(session.csrf, run_of(given), seen)
        if stream is None:
            many = NotNow(f"{len(self._hub)} dashboards are open.", action="Close some of them.")
            return _refused(request, many, 503)
        return EventStream(
            stream,
            self._allowed(request),
            self._renewal(session),
            functools.partial(self._hub.close, stream),
        )

    def _allowed(self, request: Request) -> Callable[[], bool]:
        """Return a check that a stream may continue; a new stream renews the session."""
        cookies = dict(request.cookies)
        ends = time.monotonic() + STREAM_S
        return lambda: time.monotonic() < ends and self._keyed.of(cookies) is not None


def make_app(
    pages: Pages, posts: Sequence[BaseRoute], extra: Sequence[BaseRoute], faults: Faults
) -> Guard:
    """Return the dashboard as an ASGI app.

    Args:
        pages: the GET routes.
        posts: the routes of actions and sessions.
        extra: routes without a session.
        faults: logs our own defects.
    """

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, RefusedRequest):
            return _refused(request, error.error, error.status)
        assert isinstance(error, FcilError)
        return _refused(request, error, status_of(error))

    async def wrong(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = _WORDS.get(error.status_code, "The request cannot be answered.")
        response = _refused(request, UsageError(words), error.status_code)
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        faults.tell(error, f"{request.method} {request.url.path}")
        if _by_script(request):
            return defect()
        return problem_page(500, DEFECT)

    app = Starlette(
        routes=[*pages.routes(), *posts, *extra],
        middleware=[Middleware(GZipMiddleware, minimum_size=1024)],
        exception_handlers={
            FcilError: refused,
            RefusedRequest: refused,
            HTTPException: wrong,
            Exception: failed,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, HEADERS, too_long)


def _refused(request: Request, error: FcilError, status: int) -> Response:
    return (
        error_response(error, status) if _by_script(request) else problem_page(status, str(error))
    )


def _by_script(request: Request) -> bool:
    return request.method == "POST" or request.url.path.startswith(_FOR_SCRIPTS)
