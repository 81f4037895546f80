"""The dashboard's POSTs: sign-in, sign-out, and actions, each proven to be its own.

A foreign page in the same browser can send requests here, but not with our ``Origin``, our content
type and a token that it cannot read; a request without one of them is refused.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fcil_protocol.errors import FcilError, Timeout, TrustError, Unreachable, UsageError
from fcil_server.web.page.access.guard import error_response
from fcil_server.web.page.access.sessions import (
    GET_A_LINK,
    BrowserSession,
    KeyedSessions,
    forget_cookies,
    set_cookie,
)
from fcil_server.web.page.actions.actions import Ask, PageActions
from fcil_server.web.requests import RefusedRequest, in_thread, one_of, read_json

MAX_BODY_BYTES = 4096
MAX_TOKEN = 256  # characters
TRIES = 4  # links that are sent to the server at the same time
PAUSE_S = 1.0  # before a wrong link is answered
SLOT_WAIT_S = 5.0  # for a free place
ORDERS = 2  # actions that are sent to the server at the same time
ORDER_WAIT_S = 1.0  # for a turn: an action must not happen after its request was given up
CSRF_HEADER = "x-fcil-csrf"
_LATER = "Try the link again when it runs."


class ActionRoutes:
    """Answers the POSTs.

    Args:
        keyed: the sessions.
        ask: asks the server, in a thread: ``ask(op, **fields)``.
        acts: the allowed actions; None: none.
        secure: the listener speaks TLS.
        pause: waits some seconds.
    """

    def __init__(
        self,
        keyed: KeyedSessions,
        ask: Ask,
        acts: PageActions | None,
        *,
        secure: bool,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._keyed = keyed
        self._ask = ask
        self._acts = acts
        self._secure = secure
        self._pause = pause
        self._places = asyncio.Semaphore(TRIES)
        # A separate pool: sign-in attempts must not occupy the threads of actions or others.
        self._knocks = ThreadPoolExecutor(max_workers=TRIES, thread_name_prefix="enter")
        self._turns = asyncio.Semaphore(ORDERS)
        self._orders = ThreadPoolExecutor(max_workers=ORDERS, thread_name_prefix="act")

    async def enter(self, request: Request) -> Response:
        """Admit a browser that has a link's token, once for each token."""
        self._check_sender(request)
        fields = await read_json(request, MAX_BODY_BYTES)
        token = fields.get("token")
        if set(fields) != {"token"} or not isinstance(token, str) or len(token) > MAX_TOKEN:
            raise RefusedRequest(
                400, UsageError("to sign in, give the token of a link.", action=GET_A_LINK)
            )
        sessions = self._keyed.current()  # without a key, a token would be wasted
        await self._try_token(token, request.client.host if request.client else "")
        answer = JSONResponse({"ok": True, "says": "You are signed in."})
        value = sessions.begin()
        headers = forget_cookies(request.cookies, sessions.cookie, secure=self._secure)
        for header in [*headers, set_cookie(sessions, value, secure=self._secure)]:
            answer.headers.append("set-cookie", header)
        return answer

    async def _try_token(self, token: str, sender: str) -> None:
        order = functools.partial(self._ask, "page_enter", token=token, **{"from": sender})
        try:
            async with one_of(self._places, SLOT_WAIT_S, "too many try to sign in."):
                await in_thread(self._knocks, order)
        except (Unreachable, Timeout) as error:  # their own messages name the server's directory
            raise RefusedRequest(
                503, type(error)("the server does not answer.", action=_LATER)
            ) from error
        except TrustError as error:
            # After the place is free: many wrong links must not delay the right one.
            await self._pause(PAUSE_S)
            raise RefusedRequest(403, error) from error

    async def leave(self, request: Request) -> Response:
        """End the session, in this process and in the browser."""
        session = self._check(request)
        sessions = self._keyed.current()
        sessions.leave(session)
        answer = JSONResponse(
            {"ok": True, "says": "You are signed out. A new link signs you in again."}
        )
        answer.headers.append("set-cookie", set_cookie(sessions, "", secure=self._secure))
        return answer

    async def prepare(self, request: Request) -> Response:
        """Describe an action's effect."""
        return await self._order(request, lambda acts: acts.prepare)

    async def carry_out(self, request: Request) -> Response:
        """Carry out a confirmed action."""
        return await self._order(request, lambda acts: acts.carry_out)

    async def _order(
        self,
        request: Request,
        step: Callable[
            [PageActions], Callable[[BrowserSession, Mapping[str, Any]], dict[str, Any]]
        ],
    ) -> Response:
        assert self._acts is not None, "a page that is for reading has no such route"
        session = self._check(request)
        fields = await read_json(request, MAX_BODY_BYTES)
        do = functools.partial(step(self._acts), session, fields)
        many = "the server has not answered other actions yet; nothing was done."
        async with one_of(self._turns, ORDER_WAIT_S, many):
            return JSONResponse(await in_thread(self._orders, do))

    def _check(self, request: Request) -> BrowserSession:
        """Return the session of a request that our own page sent.

        Raises:
            Refusal: it has none, or another page sent it.
        """
        self._check_sender(request)
        session = self._keyed.of(request.cookies)
        if session is None:
            raise RefusedRequest(
                401, TrustError("you are not signed in, or no longer are.", action=GET_A_LINK)
            )
        word = request.headers.get(CSRF_HEADER, "").encode("latin-1")
        if not hmac.compare_digest(word, session.csrf.encode("ascii")):
            raise RefusedRequest(
                403,
                TrustError(
                    "this request does not come from the dashboard.", action="Reload the dashboard."
                ),
            )
        return session

    def _check_sender(self, request: Request) -> None:
        """Refuse requests that a browser sends for a page of another origin.

        Raises:
            Refusal: it came from there, or does not name its origin.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedRequest(415, UsageError("expected a body of type application/json."))
        scheme = "https" if self._secure else "http"
        own = f"{scheme}://{request.headers.get('host', '')}"
        site = request.headers.get("sec-fetch-site", "same-origin")
        if request.headers.get("origin", "").lower() != own.lower() or site != "same-origin":
            raise RefusedRequest(
                403, TrustError("this request comes from another site.", action=GET_A_LINK)
            )


def _answering(handle: Callable[[Request], Awaitable[Response]]) -> Any:
    """Answer a handler's refusals with their sentence."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except RefusedRequest as refusal:
            return error_response(refusal.error, refusal.status)
        except FcilError as error:
            return error_response(error)

    return answer


def routes(
    keyed: KeyedSessions,
    ask: Ask,
    acts: PageActions | None,
    *,
    secure: bool,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Route]:
    """Return the routes of all POSTs; without those of actions if ``acts`` is None."""
    posts = ActionRoutes(keyed, ask, acts, secure=secure, pause=pause)
    found = {"/enter": posts.enter, "/leave": posts.leave}
    if acts is not None:
        found |= {"/act/prepare": posts.prepare, "/act/carry-out": posts.carry_out}
    return [Route(path, _answering(one), methods=["POST"]) for path, one in found.items()]
