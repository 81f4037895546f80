"""The page's addresses: open to who is let in, a sentence for everybody else and for bad requests."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
from pathlib import Path

import pytest

import page_kit
from fcil_protocol.errors import InternalError, NotNow, TrustError, Unreachable, UsageError
from fcil_server.federation.page_key import renew_key
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.charts import assets
from fcil_server.reports.sections.sections import SECTIONS
from fcil_server.web.errors import MAX_REMEMBERED, QUIET_S, Faults, status_of
from fcil_server.web.page import app as app_module
from fcil_server.web.page import pictures
from fcil_server.web.page.access.guard import HEADERS
from fcil_server.web.requests import Pool, RefusedRequest
from sample_run import RUN, Clock
from server.page_door import Page, Server, browsing
from server.web_kit import ask, get

SECRET_PATHS = [
    "/../page.key",
    "/page.key",
    "/..%2fpage.key",
    "/assets/../page.key",
    "/assets/..%2f..%2fsessions.py",
    "/assets/%2e%2e/sessions.py",
    "/assets/page.css%00.js",
    "/assets/",
    "/assets//etc/passwd",
    f"/pictures/{RUN}/summary.json",
    f"/pictures/{RUN}/..%2f..%2fpage.key",
    f"/pictures/{RUN}/%2e%2e",
    "/pictures/..%2f../page.key",
    "/pictures/r20990101-000000-0000/accuracy.png",
    "/pictures/nothing/accuracy.png",
    "/pictures/%00/accuracy.png",
    "/part/nothing",
    "/part/..%2f..%2fpage.key",
    "/part/",
    "/static/page.css",
    "//",
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    page_kit.small(folder / LEDGER_NAME).close()
    run = folder / "runs" / RUN
    run.mkdir(parents=True)
    (run / "accuracy.png").write_bytes(b"\x89PNG picture")
    (run / "accuracy.svg").write_bytes(b"<svg/>")
    (run / "summary.json").write_text("{}")
    (run / "bytes_per_round.png").symlink_to(folder / "page.key")
    return folder


def visited(federation: Path, work, **given):
    """Let a test visit a page; return what it returns."""

    async def served():
        page = Page(federation, Server(page_kit.live()), **given)
        async with page.served():
            return await asyncio.wait_for(work(page), 60)

    return asyncio.run(served())


def answers(federation: Path, *paths: str, **given) -> list[str]:
    async def work(page: Page) -> list[str]:
        return [await page.get(path) for path in paths]

    return visited(federation, work, **given)


def code(answer: str) -> int:
    return int(answer.split(" ", 2)[1])


def test_everything_is_on_the_page_at_once(federation: Path) -> None:
    (answer,) = answers(federation, "/")
    assert code(answer) == 200
    assert [f'<section id="{name}"' in answer for name in SECTIONS] == [True] * len(SECTIONS)
    assert "accuracy.png" in answer
    assert "summary.json" not in answer


def test_every_answer_says_the_same_to_the_browser(federation: Path) -> None:
    paths = [
        "/",
        "/enter",
        "/part/now",
        "/nothing",
        "/?x=1",
        "/part/now?x=1",
        f"/?run={'y' * 1200}",
    ]
    for answer in answers(federation, *paths):
        head = answer.partition("\r\n\r\n")[0].lower()
        assert {f"{n}: {v}".lower() for n, v in HEADERS.items()} <= set(head.split("\r\n"))


def test_a_stranger_sees_where_to_enter_and_nothing_else(federation: Path) -> None:
    forged = "fcil_page_00000000=1.0.0.0.0"

    async def work(page: Page) -> None:
        own = page.cookie[:-1] + ("a" if page.cookie[-1] != "a" else "b")
        for cookie in ("", "a=b", forged, own, page.cookie + "x", page.cookie.split("=")[0] + "="):
            answer = await ask(page.port, get("/", Cookie=cookie))
            assert code(answer) == 401
            assert "enter-token" in answer
            assert RUN not in answer
            for path in (
                "/part/now",
                "/stream",
                "/part/client?id=a",
                f"/pictures/{RUN}/accuracy.png",
            ):
                answer = await ask(page.port, get(path, Cookie=cookie))
                assert code(answer) == 401, path
                assert "You are not signed in" in answer
        for path in ("/enter", "/assets/page.css"):
            assert code(await ask(page.port, get(path))) == 200

    visited(federation, work)


def test_who_calls_the_page_by_a_foreign_name_is_sent_away(federation: Path) -> None:
    async def work(page: Page) -> str:
        return await ask(page.port, get("/", "evil.example", Cookie=page.cookie))

    assert code(visited(federation, work)) == 421


def test_what_is_outside_is_not_there(federation: Path) -> None:
    for path, answer in zip(SECRET_PATHS, answers(federation, *SECRET_PATHS), strict=True):
        assert code(answer) == 404, path
        assert "There is nothing here." in answer


def test_other_methods_are_refused_and_a_head_has_no_body(federation: Path) -> None:
    async def work(page: Page) -> None:
        for path in ("/", "/stream", "/part/now", "/assets/page.css"):
            head = await ask(page.port, get(path, method="HEAD", Cookie=page.cookie))
            assert code(head) == 200, path
            assert head.endswith("\r\n\r\n"), path
            for method in ("PUT", "DELETE", "OPTIONS", "PATCH"):
                answer = await ask(page.port, get(path, method=method, Cookie=page.cookie))
                assert code(answer) == 405, (method, path)
                assert "allow: " in answer.lower()
        assert len(page.hub) == 0

    visited(federation, work)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/?colour=red", 400, "Unknown parameter"),
        (f"/?run={RUN}&run={RUN}", 400, "may be given once"),
        ("/?run=../page.key", 400, "is not a run"),
        ("/?run=r20990101-000000-0000", 400, "There is no run"),
        (f"/?{'x' * 1200}", 414, "1024 bytes"),
        (f"/part/now?find={'x' * 300}", 400, "with at most 200 characters"),
        ("/part/rounds?last=9999999", 400, "Expected last to be one of"),
        ("/part/clients?page=-1", 400, "Expected page to be a number"),
        ("/part/clients?page=%EF%BC%91", 400, "Expected page to be a number"),
        ("/stream?since=1e9", 400, "Expected since to be a number"),
        ("/part/client?id=nobody", 404, "There is no such client"),
        ("/part/compare?run=%00", 400, ""),
    ],
)
def test_a_bad_request_is_told_in_a_sentence(
    federation: Path, path: str, status: int, words: str
) -> None:
    (answer,) = answers(federation, path)
    assert code(answer) == status
    assert words in answer
    assert "Traceback" not in answer
    if path.startswith(("/part", "/stream")):
        assert "application/json" in answer
    else:
        assert "text/html" in answer


def test_what_somebody_asks_for_is_escaped(federation: Path) -> None:
    bad = "%3Cscript%3Ealert(1)%3C/script%3E"
    for path in (f"/?{bad}=1", f"/?run={bad}", f"/part/clients?find={bad}"):
        (answer,) = answers(federation, path)
        assert "<script>alert" not in answer


def test_parts_are_shown_as_they_are_asked_for(federation: Path) -> None:
    all_clients, some, one = answers(
        federation, "/part/clients", "/part/clients?find=alice", f"/part/rounds?last=all&run={RUN}"
    )
    assert "bob" in all_clients
    assert "bob" not in some.partition('id="clients"')[2].replace("find", "")
    assert 'id="rounds"' in one


def test_a_picture_is_the_runs_own_and_no_link_is_followed(federation: Path) -> None:
    png, svg, link, none = answers(
        federation,
        *(
            f"/pictures/{RUN}/{name}"
            for name in (
                "accuracy.png",
                "accuracy.svg",
                "bytes_per_round.png",
                "accuracy_matrix.png",
            )
        ),
    )
    assert code(png) == code(svg) == 200
    assert "content-type: image/png" in png
    assert png.endswith("PNG picture")
    assert "sandbox" in svg
    assert [code(link), code(none)] == [404, 404]
    assert pictures.names(federation, RUN) == [
        "accuracy.png",
        "accuracy.svg",
        "bytes_per_round.png",
    ]


def test_a_pipe_in_a_pictures_place_holds_nobody_up(tmp_path: Path) -> None:
    place = tmp_path / "runs" / RUN
    place.mkdir(parents=True)
    os.mkfifo(place / "accuracy.png")
    waiting = threading.Thread(target=pictures.load, args=(tmp_path, RUN, "accuracy.png"))
    waiting.daemon = True  # where it waits, it does so for ever
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()


def test_assets_are_kept_by_browsers_and_come_packed(federation: Path) -> None:
    async def work(page: Page) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        url = assets.url("page.css")
        writer.write(get(url, Accept_Encoding="gzip").encode())
        found = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return found

    head, _, body = visited(federation, work).partition(b"\r\n\r\n")
    assert b"content-encoding: gzip" in head
    assert b"immutable" in head
    assert b"no-store" not in head
    assert gzip.decompress(body) == assets.load("page.css")[0]


def test_a_session_that_is_used_lasts_longer(federation: Path) -> None:
    async def work(page: Page) -> list[str]:
        now = Clock(1_000_000.0)
        page.keyed._clock = now
        page.keyed._sessions = None
        sessions = page.keyed.current()
        page.cookie = f"{sessions.cookie}={sessions.begin()}"
        fresh = await page.get("/")
        now.now += 3600
        used = [await page.get("/"), await page.get("/part/now")]
        async with browsing(page) as browser:
            used.append(browser.head)
        return [fresh, *used]

    fresh, *used = visited(federation, work)
    assert "set-cookie" not in fresh.lower()
    for answer in used:
        assert "HttpOnly; SameSite=Strict" in answer.partition("\r\n\r\n")[0]


def test_a_stream_ends_when_everybody_is_signed_out(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            await browser.until("hello")
            renew_key(page.directory)
            page.hub.publish("now", b"event: section\ndata: {}\n\n")
            with pytest.raises(EOFError):
                await browser.until("nothing")
        assert code(await page.get("/stream")) == 401

    visited(federation, work)


def test_a_stream_ends_after_a_while_so_that_the_next_renews_the_session(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAM_S", -1.0)

    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            with pytest.raises(EOFError):
                await browser.next()

    visited(federation, work)


def test_one_open_page_too_many_is_asked_to_come_later(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as first, browsing(page) as second:
            await first.until("hello")
            await second.until("hello")
            refused = await page.get("/stream")
            assert code(refused) == 503
            assert '"2 dashboards are open."' in refused
            assert code(await page.get("/")) == 200

    visited(federation, work, most=2)


def test_a_reader_too_many_is_asked_to_come_again(federation, monkeypatch) -> None:
    async def work(page: Page) -> str:
        with monkeypatch.context() as full:
            full.setattr(page.watch._ledger, "_most", 0)
            return await page.get(f"/part/rounds?run={RUN}")

    part = visited(federation, work)
    assert code(part) == 429
    assert "Too many requests are under way." in part


def test_for_reading_only_there_are_no_buttons(federation: Path) -> None:
    (mine,) = answers(federation, "/")
    (read,) = answers(federation, "/", read_only=True)
    assert "data-act" in mine
    assert "data-act" not in read


def test_a_defect_is_a_sentence_and_is_told_to_the_log_once(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_given, **_more):
        raise ZeroDivisionError("secret words")

    monkeypatch.setattr(app_module, "template", broken)
    monkeypatch.setattr(pictures, "load", broken)
    pages = answers(federation, "/", "/", "/enter", f"/pictures/{RUN}/accuracy.png")
    monkeypatch.setattr("fcil_server.reports.sections.params.Params.parse", broken)
    (part,) = answers(federation, "/part/now")
    for answer in (*pages, part):
        assert code(answer) == 500
        assert "the server" in answer
        assert "secret words" not in answer
        assert "content-security-policy" in answer
    assert "application/json" in part
    told = capsys.readouterr().err
    assert told.count("internal: the dashboard failed at GET /\n") == 1
    assert "secret words" in told


def test_defects_are_told_again_after_a_while_and_not_all_are_remembered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = Clock(0.0)
    faults = Faults(now)
    for seconds in (0.0, QUIET_S - 1, 1.0):
        now.now += seconds
        faults.tell(KeyError("x"), "here")
    assert capsys.readouterr().err.count("internal: ") == 2
    for number in range(MAX_REMEMBERED * 2):
        faults.tell(type(f"Error{number}", (Exception,), {})(), "there")
    assert len(faults._told) == MAX_REMEMBERED


def test_work_that_piles_up_is_refused() -> None:
    async def work() -> None:
        pool = Pool("test", most=2)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        release = threading.Event()

        def busy() -> int:
            loop.call_soon_threadsafe(started.set)
            release.wait(60)
            return 7

        doing = [asyncio.ensure_future(pool.do(busy)) for _ in range(2)]
        await started.wait()
        with pytest.raises(RefusedRequest, match="too many requests are under way") as told:
            await pool.do(busy)
        assert told.value.status == 429
        doing[0].cancel()  # who asked is gone, its work is not
        with pytest.raises(RefusedRequest, match="too many requests are under way") as told:
            await pool.do(busy)
        assert told.value.status == 429
        release.set()
        assert await doing[1] == 7
        assert await pool.do(busy) == 7

    asyncio.run(work())


def test_each_error_has_a_status() -> None:
    found = [status_of(error("x")) for error in (UsageError, TrustError, NotNow)]
    assert found == [400, 403, 409]
    assert [status_of(error("x")) for error in (Unreachable, InternalError)] == [503, 500]
