"""Acts on the page: said before they happen, done once, by who was let in, and as confirmed."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import page_kit
from fcil_protocol.errors import NotNow, Timeout, TrustError, Unreachable, UsageError
from fcil_server.federation import operator_text
from fcil_server.federation.page_key import KEY_NAME
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.web.page.access.sessions import BrowserSession, KeyedSessions
from fcil_server.web.page.actions import routes as act_routes
from fcil_server.web.page.actions.actions import PageActions, qr_svg
from fcil_server.web.page.actions.confirmations import (
    GOOD_S,
    MAX_ALL,
    MAX_OPEN,
    Confirmations,
    PlannedAct,
)
from fcil_server.web.page.actions.routes import MAX_BODY_BYTES, routes
from fcil_server.web.page.server import LIMITS, ORDER_S
from sample_run import ALICE, BOB

ME, OTHER = (BrowserSession(id=i, csrf="") for i in ("me", "other"))
TICKET = "FCIL1-ABCDEFGHIJKLMNOP"


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Answers what the running server would, and remembers what it was told to do."""

    def __init__(self) -> None:
        self.live = page_kit.live()
        self.done: list[tuple[str, dict[str, Any]]] = []
        self.fails: BaseException | None = None
        self.answers: dict[str, dict[str, Any]] = {
            "enrol": {
                "ticket": TICKET,
                "expires": 1_767_400_000,
                "addresses": ["127.0.0.1:7733"],
                "fingerprint": "1234-5678",
            },
            "revoke": {"client": ALICE, "name": "alice"},
            "pause": {"mode": "paused", "round_open": True},
            "resume": {"mode": "running", "round_open": True},
            "drain": {"mode": "draining", "round_open": True},
            "close_round": {},
            "page_enter": {"ok": True},
        }

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        if op == "live":
            if isinstance(self.fails, Unreachable):
                raise self.fails
            return self.live
        self.done.append((op, fields))
        if self.fails is not None:
            raise self.fails
        return self.answers[op]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("federation")
    with page_kit.small(place / LEDGER_NAME) as ledger:
        ledger.tickets.add("guest", curve=b"g" * 32, signing=b"s", expires_at=4e9)
    return place


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def acts(directory: Path, server: Server) -> PageActions:
    return PageActions(directory, server.ask, Confirmations(Clock()))


def confirm(acts: PageActions, session: BrowserSession = ME, /, **fields: Any) -> dict[str, Any]:
    word = acts.prepare(session, fields)["confirm"]
    return acts.carry_out(session, {"confirm": word})


# --- what is said before ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"act": "pause"}, "task 3, train 0) continues to its end; then no round opens"),
        ({"act": "resume"}, "running already"),
        ({"act": "drain"}, "task 3, train 0) is over"),
        ({"act": "close_round"}, "1 of 3 have answered; the server does not wait for the others"),
        ({"act": "close_round", "rest_of_task": True}, "remaining rounds of its task close too"),
        ({"act": "enrol", "name": "new", "lasts": "24h"}, "join as 'new', once, within 24h"),
        ({"act": "enrol", "name": "guest", "lasts": "7d"}, "open ticket of this name becomes"),
        ({"act": "revoke", "name": "guest"}, "Withdraws the open ticket for 'guest'"),
        ({"act": "revoke", "name": "alice"}, f"'alice' (id {ALICE[:8]}, counted in 12 rounds)"),
        ({"act": "revoke", "client": BOB}, "to the round under way (task 3, train 0) is excluded"),
        ({"act": "revoke", "name": "bob", "keep_update": True}, "still counts"),
        (
            {"act": "revoke", "name": "bob", "why": "it was sold"},
            "Reason given to it: 'it was sold'",
        ),
    ],
)
def test_it_is_said_what_will_happen_and_nothing_happens(acts, server, fields, words) -> None:
    assert words in acts.prepare(ME, fields)["says"]
    assert server.done == []


def test_between_rounds_it_is_said_that_no_round_is_touched(acts, server) -> None:
    server.live = {**server.live, "round": None}
    assert acts.prepare(ME, {"act": "pause"})["says"].startswith("From now on no round opens")
    assert "Stops the server now" in acts.prepare(ME, {"act": "drain"})["says"]
    assert "No round is under way" in acts.prepare(ME, {"act": "revoke", "name": "bob"})["says"]
    with pytest.raises(UsageError, match="no round is under way"):
        acts.prepare(ME, {"act": "close_round"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "there is no action"),
        ({"act": "erase"}, "there is no action 'erase'; known are enrol"),
        ({"act": ["pause"]}, "there is no action"),
        ({"act": "pause", "uid": 0}, "takes no field; got 'uid'"),
        ({"act": "revoke", "keep": True}, "got 'keep'"),
        ({"act": "revoke", "name": "nobody"}, "no client is called 'nobody'"),
        ({"act": "revoke", "name": ""}, "no client is called"),
        ({"act": "revoke", "name": "bob", "keep_update": 1}, "true or false"),
        ({"act": "revoke", "name": None}, "is a text"),
        ({"act": "revoke", "name": "bob", "why": "\ud800"}, "is a text"),
        ({"act": "enrol", "name": "alice", "lasts": "24h"}, "'alice' is enrolled"),
        ({"act": "enrol", "name": "", "lasts": "24h"}, "1 to 128 printable"),
        ({"act": "enrol", "name": "a\nb", "lasts": "24h"}, "1 to 128 printable"),
        ({"act": "enrol", "name": "new", "lasts": "soon"}, "a duration such as"),
        ({"act": "enrol", "name": "new", "lasts": "1h", "via": "x"}, "no client is called 'x'"),
        ({"act": "enrol", "name": "new", "lasts": "0m"}, "1 minute to 90 days"),
        ({"act": "enrol", "name": "new", "lasts": "91d"}, "1 minute to 90 days"),
    ],
)
def test_what_the_command_refuses_is_refused_with_its_sentence(acts, fields, words) -> None:
    with pytest.raises(UsageError, match=words):
        acts.prepare(ME, fields)


def test_without_a_running_server_nothing_is_offered(acts, server) -> None:
    server.fails = Unreachable("no daemon runs there.")
    with pytest.raises(Unreachable):
        acts.prepare(ME, {"act": "enrol", "name": "new", "lasts": "24h"})


# --- what is done -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "order", "words"),
    [
        (
            {"act": "pause"},
            ("pause", {}),
            "The round under way continues to its end; then no round",
        ),
        ({"act": "resume"}, ("resume", {}), "Rounds continue."),
        ({"act": "drain"}, ("drain", {}), "stops when the round under way is over"),
        (
            {"act": "close_round", "rest_of_task": True},
            (
                "close_round",
                {"rest_of_task": True, "only": {"task": 3, "kind": "train", "round": 0}},
            ),
            "The round closes.",
        ),
        (
            {"act": "revoke", "name": "alice", "why": "w" * 300},
            ("revoke", {"name": ALICE, "why": "w" * 200, "keep": False}),
            "alice: the membership is revoked.",
        ),
        (
            {"act": "revoke", "name": "guest"},
            ("revoke", {"name": "guest", "ticket": True}),
            "alice",
        ),
        (
            {"act": "enrol", "name": "new", "lasts": "2h", "relay": True},
            ("enrol", {"name": "new", "lasts_s": 7200.0, "relay": True}),
            "The ticket for 'new'",
        ),
    ],
)
def test_an_act_is_the_same_call_as_its_command(acts, server, fields, order, words) -> None:
    told = confirm(acts, **fields)
    op, given = order
    assert server.done == [(op, {**given, "by": "page"})]
    assert words in told["says"]


def test_a_new_ticket_is_shown_with_picture_addresses_and_warning(acts) -> None:
    told = confirm(acts, act="enrol", name="new", lasts="24h")
    assert told["ticket"] == TICKET
    assert told["qr"].startswith("<svg")
    assert told["addresses"] == ["127.0.0.1:7733"]
    assert told["warning"].startswith("The ticket names only this machine's own address")
    assert told["run_this"] == "fcil-client join --data FOLDER --ticket FILE"


def test_a_ticket_that_can_be_used_elsewhere_has_no_warning(acts, server) -> None:
    server.answers["enrol"]["addresses"] = ["127.0.0.1:7733", "192.0.2.7:7733"]
    assert confirm(acts, act="enrol", name="new", lasts="24h")["warning"] == ""


def test_the_picture_needs_no_style_that_the_page_forbids() -> None:
    picture = qr_svg(TICKET)
    assert "style" not in picture
    assert "<script" not in picture
    assert 'class="qr"' in picture
    assert picture != qr_svg(TICKET + "A")


def test_what_the_server_refuses_is_told(acts, server) -> None:
    word = acts.prepare(ME, {"act": "pause"})["confirm"]
    server.fails = UsageError("not now.")
    with pytest.raises(UsageError, match=r"not now\."):
        acts.carry_out(ME, {"confirm": word})


def test_an_act_that_may_still_happen_is_told_to_be_one(acts, server) -> None:
    word = acts.prepare(ME, {"act": "pause"})["confirm"]
    server.fails = Timeout("it does not answer.")
    with pytest.raises(Timeout, match=r"it does not answer\. What you confirmed may still happen"):
        acts.carry_out(ME, {"confirm": word})


# --- the word ---------------------------------------------------------------------------------


def test_a_word_is_good_once(acts, server) -> None:
    word = acts.prepare(ME, {"act": "pause"})["confirm"]
    acts.carry_out(ME, {"confirm": word})
    with pytest.raises(UsageError, match="no longer valid"):
        acts.carry_out(ME, {"confirm": word})
    assert len(server.done) == 1


def test_a_word_is_of_no_use_to_another_session_and_burnt_by_its_try(acts, server) -> None:
    word = acts.prepare(ME, {"act": "pause"})["confirm"]
    for session in (OTHER, ME):
        with pytest.raises(UsageError, match="no longer valid"):
            acts.carry_out(session, {"confirm": word})
    assert server.done == []


def test_a_stale_word_does_nothing(directory, server) -> None:
    clock = Clock()
    acts = PageActions(directory, server.ask, Confirmations(clock))
    word = acts.prepare(ME, {"act": "pause"})["confirm"]
    clock.now = GOOD_S
    with pytest.raises(UsageError, match="no longer valid"):
        acts.carry_out(ME, {"confirm": word})
    assert server.done == []


@pytest.mark.parametrize(
    "more", [{"act": "drain"}, {"name": "bob"}, {"confirm": ["x"]}, {"confirm": None}]
)
def test_what_was_confirmed_cannot_be_changed(acts, server, more) -> None:
    word = acts.prepare(ME, {"act": "revoke", "name": "alice"})["confirm"]
    with pytest.raises(UsageError, match="nothing else"):
        acts.carry_out(ME, {"confirm": word, **more})
    assert server.done == []


def test_a_round_that_closed_meanwhile_does_not_close_the_next_one(acts, server) -> None:
    word = acts.prepare(ME, {"act": "close_round"})["confirm"]
    server.live = {**server.live, "round": {**server.live["round"], "round": 1}}
    with pytest.raises(NotNow, match="no longer what you confirmed"):
        acts.carry_out(ME, {"confirm": word})
    assert server.done == []


def test_a_ticket_that_was_used_meanwhile_does_not_revoke_its_client(tmp_path, server) -> None:
    with page_kit.small(tmp_path / LEDGER_NAME) as ledger:
        ledger.tickets.add("guest", curve=b"g" * 32, signing=b"s", expires_at=4e9)
        acts = PageActions(tmp_path, server.ask)
        word = acts.prepare(ME, {"act": "revoke", "name": "guest"})["confirm"]
        ledger.clients.add("c" * 32, "guest", curve=b"c" * 32, signing=b"s", sealing=b"e")
    with pytest.raises(NotNow, match="Revokes 'guest'"):
        acts.carry_out(ME, {"confirm": word})
    assert server.done == []


def plan() -> PlannedAct:
    return PlannedAct("pause", "pause", {}, (), "")


def test_only_the_newest_words_of_a_session_are_kept() -> None:
    waiting = Confirmations(Clock())
    mine = [waiting.add("me", {}, plan()) for _ in range(MAX_OPEN)]
    theirs = waiting.add("other", {}, plan())
    waiting.add("me", {}, plan())
    with pytest.raises(UsageError):
        waiting.redeem("me", mine[0])
    waiting.redeem("me", mine[1])
    waiting.redeem("other", theirs)


def test_words_of_all_sessions_are_bounded_and_in_no_representation() -> None:
    waiting = Confirmations(Clock())
    words = [waiting.add(f"session {i}", {}, plan()) for i in range(MAX_ALL + 1)]
    with pytest.raises(UsageError):
        waiting.redeem("session 0", words[0])
    waiting.redeem("session 1", words[1])
    assert words[-1] not in repr(waiting)


# --- the door ---------------------------------------------------------------------------------


class Page:
    """A browser's page: sends what it would send, unless told otherwise."""

    def __init__(self, directory: Path, server: Server, *, read_only: bool = False) -> None:
        (directory / KEY_NAME).write_bytes(b"k" * 32)
        (directory / KEY_NAME).chmod(0o600)
        self.keyed = KeyedSessions(directory)
        self.paused: list[float] = []

        async def pause(seconds: float) -> None:
            self.paused.append(seconds)

        self.acts = None if read_only else PageActions(directory, server.ask)
        self.routes = routes(self.keyed, server.ask, self.acts, secure=False, pause=pause)
        self.cookie = ""

    def enter(self) -> Page:
        sessions = self.keyed.current()
        self.cookie = f"{sessions.cookie}={sessions.begin()}"
        return self

    @property
    def csrf(self) -> str:
        name, _, value = self.cookie.partition("=")
        session = self.keyed.of({name: value})
        return session.csrf if session else ""

    def post(self, path: str, body: Any = None, **headers: str | None):
        """Return (status, JSON, headers); a header that is None is left out."""
        return asyncio.run(self._post(path, body, headers))

    async def _post(self, path: str, body: Any, changed: dict[str, str | None]):
        headers: dict[str, str | None] = {
            "host": "127.0.0.1:7780",
            "origin": "http://127.0.0.1:7780",
            "content-type": "application/json",
            "cookie": self.cookie,
            "x-fcil-csrf": self.csrf,
            "sec-fetch-site": "same-origin",
        }
        headers |= {name.replace("_", "-"): value for name, value in changed.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[dict[str, Any]] = []
        received = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return received.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "client": ("127.0.0.1", 5),
            "headers": [
                (name.encode(), value.encode("latin-1"))
                for name, value in headers.items()
                if value is not None
            ],
        }
        for route in self.routes:
            if route.path == path:
                await route.app(scope, receive, send)
        if not sent:
            return 404, {}, {}
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        told = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return sent[0]["status"], json.loads(answer), told


@pytest.fixture
def page(directory: Path, server: Server) -> Page:
    return Page(directory, server).enter()


def test_a_link_lets_a_browser_in(directory, server) -> None:
    page = Page(directory, server)
    status, told, headers = page.post("/enter", {"token": "t0k3n"})
    assert (status, told["ok"]) == (200, True)
    assert server.done == [("page_enter", {"token": "t0k3n", "from": "127.0.0.1"})]
    page.cookie = headers["set-cookie"].partition(";")[0]
    assert page.csrf
    assert page.post("/act/prepare", {"act": "pause"})[0] == 200


def test_a_wrong_link_is_refused_after_a_pause_and_sets_no_cookie(directory, server) -> None:
    page = Page(directory, server)
    server.fails = TrustError("this link is used or too old.")
    status, told, headers = page.post("/enter", {"token": "wrong"})
    assert (status, told["error"]["says"]) == (403, "This link is used or too old.")
    assert "set-cookie" not in headers
    assert len(page.paused) == 1


@pytest.mark.parametrize("gone", [Unreachable("no /srv/a."), Timeout("slow is /srv/a.")])
def test_nobody_enters_while_the_server_is_away(directory, server, gone) -> None:
    server.fails = gone
    status, told, headers = Page(directory, server).post("/enter", {"token": "t"})
    assert (status, told["error"]["code"]) == (503, gone.code)
    assert "/srv" not in str(told)
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"[" * 4000, {}, {"token": 1}, {"token": "t" * 300}, {"token": "t", "x": 1}],
)
def test_what_is_no_token_is_refused_before_the_server_is_asked(page, server, body) -> None:
    status, told, _ = page.post("/enter", body)
    assert (status, told["error"]["code"]) == (400, "usage")
    assert server.done == []


def test_an_act_takes_two_posts_of_its_own_page(page, server) -> None:
    status, told, _ = page.post("/act/prepare", {"act": "pause"})
    assert status == 200
    status, done, _ = page.post("/act/carry-out", {"confirm": told["confirm"]})
    assert status == 200
    assert "no round opens" in done["says"]
    assert [op for op, _ in server.done] == ["pause"]
    assert page.post("/act/carry-out", {"confirm": told["confirm"]})[0] == 400


OTHERS = [
    ({"cookie": None}, 401),
    ({"cookie": "fcil_page=1"}, 401),
    ({"x_fcil_csrf": None}, 403),
    ({"x_fcil_csrf": "wrong"}, 403),
    ({"x_fcil_csrf": "é"}, 403),
    ({"origin": None}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "http://127.0.0.1:7781"}, 403),
    ({"origin": "https://127.0.0.1:7780"}, 403),
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"sec_fetch_site": "same-site"}, 403),
    ({"content_type": "text/plain"}, 415),
    ({"content_type": None}, 415),
    ({"content_type": "application/x-www-form-urlencoded"}, 415),
]


@pytest.mark.parametrize(("headers", "expected"), OTHERS)
@pytest.mark.parametrize("path", ["/act/prepare", "/act/carry-out", "/leave"])
def test_what_the_page_itself_did_not_send_is_refused(page, server, path, headers, expected):
    word = page.post("/act/prepare", {"act": "pause"})[1]["confirm"]
    body = {"/act/prepare": {"act": "pause"}, "/act/carry-out": {"confirm": word}}.get(path, {})
    status, told, answered = page.post(path, body, **headers)
    assert (status, set(told), set(told["error"])) == (
        expected,
        {"error"},
        {"code", "says", "action"},
    )
    assert "set-cookie" not in answered
    assert server.done == []
    assert page.post("/act/carry-out", {"confirm": word})[0] == 200  # and the word is not burnt


@pytest.mark.parametrize(("headers", "expected"), OTHERS[5:])
def test_another_page_cannot_let_a_browser_in(page, server, headers, expected) -> None:
    assert page.post("/enter", {"token": "theirs"}, **headers)[0] == expected
    assert server.done == []


def test_a_body_is_read_to_its_limit_and_no_further(page, server) -> None:
    largest = json.dumps({"act": "pause"}).encode().ljust(MAX_BODY_BYTES)
    assert page.post("/act/prepare", largest)[0] == 200
    assert page.post("/act/prepare", largest + b" ")[0] == 413


def test_who_left_can_do_nothing_any_more(page, server) -> None:
    csrf = page.csrf
    status, _, headers = page.post("/leave", {})
    assert status == 200
    assert "Max-Age=0" in headers["set-cookie"]
    assert page.post("/act/prepare", {"act": "pause"}, x_fcil_csrf=csrf)[0] == 401


def test_a_page_for_reading_has_no_acts(directory, server) -> None:
    page = Page(directory, server, read_only=True).enter()
    assert [route.path for route in page.routes] == ["/enter", "/leave"]
    assert page.post("/act/prepare", {"act": "pause"})[0] == 404


def test_a_defect_is_not_swallowed(page, server) -> None:
    word = page.post("/act/prepare", {"act": "pause"})[1]["confirm"]
    server.fails = RuntimeError("a defect")
    with pytest.raises(RuntimeError):  # whoever serves the page writes it down and answers
        page.post("/act/carry-out", {"confirm": word})


def test_wrong_links_without_end_keep_no_right_one_waiting(directory, server) -> None:
    wrong = act_routes.TRIES + 3

    async def work() -> list[int]:
        page = Page(directory, server)
        free, paused = asyncio.Event(), asyncio.Semaphore(0)

        async def pause(_seconds: float) -> None:
            paused.release()
            await free.wait()

        page.routes = routes(page.keyed, server.ask, page.acts, secure=False, pause=pause)
        server.fails = TrustError("no.")
        tries = [
            asyncio.create_task(page._post("/enter", {"token": "x"}, {})) for _ in range(wrong)
        ]
        for _ in tries:
            await paused.acquire()
        server.fails = None
        right = await page._post("/enter", {"token": "y"}, {})
        free.set()
        return [right[0], *(answer[0] for answer in await asyncio.gather(*tries))]

    assert asyncio.run(asyncio.wait_for(work(), 60)) == [200, *([403] * wrong)]


def test_no_more_links_are_tried_at_once_than_there_are_places(
    directory, server, monkeypatch
) -> None:
    monkeypatch.setattr(act_routes, "SLOT_WAIT_S", 0.05)
    goes_on = threading.Event()

    def stopped(op: str, **fields: Any) -> dict[str, Any]:
        goes_on.wait(60)
        return server.ask(op, **fields)

    async def work() -> list[int]:
        page = Page(directory, server)
        page.routes = routes(page.keyed, stopped, PageActions(directory, stopped), secure=False)
        tries = [
            asyncio.create_task(page._post("/enter", {"token": "x"}, {}))
            for _ in range(act_routes.TRIES + 1)
        ]
        last = await tries[-1]
        goes_on.set()
        return [last[0], *(answer[0] for answer in await asyncio.gather(*tries[:-1]))]

    assert asyncio.run(work()) == [429, *([200] * act_routes.TRIES)]


def test_an_act_that_gets_no_turn_is_not_carried_out_later(directory, server, monkeypatch) -> None:
    monkeypatch.setattr(act_routes, "ORDER_WAIT_S", 0.05)
    goes_on = threading.Event()

    def stopped(op: str, **fields: Any) -> dict[str, Any]:
        goes_on.wait(60)
        return server.ask(op, **fields)

    page = Page(directory, server)
    page.routes = routes(page.keyed, stopped, PageActions(directory, stopped), secure=False)
    page.enter()

    async def work() -> list[int]:
        posts = [
            asyncio.create_task(page._post("/act/prepare", {"act": "pause"}, {}))
            for _ in range(act_routes.ORDERS + 1)
        ]
        last = await posts[-1]
        goes_on.set()
        return [last[0], *[answer[0] for answer in await asyncio.gather(*posts[:-1])]]

    assert asyncio.run(work()) == [429, *[200] * act_routes.ORDERS]


def test_all_that_an_act_waits_for_ends_before_its_request_is_cut() -> None:
    asked = 2 * ORDER_S  # how things are, and then for the act itself
    assert act_routes.ORDER_WAIT_S + asked < LIMITS.request_s
    assert LIMITS.request_s > act_routes.SLOT_WAIT_S + ORDER_S


def test_who_goes_away_in_the_middle_of_a_body_is_no_defect(page) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = {"host": "h", "origin": "http://h", "content-type": "application/json"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/enter", "headers": raw}
    asyncio.run(page.routes[0].app(scope, receive, send))
    assert sent[0]["status"] == 400


def test_commands_and_page_say_the_same_of_loopback_addresses() -> None:
    assert operator_text.local_only_warning(["[::1]:7733", "localhost:1"])
    assert not operator_text.local_only_warning(["example.org:7733"])
