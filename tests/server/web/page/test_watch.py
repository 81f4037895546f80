"""What is new reaches open pages, and nothing is asked while nobody looks."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

import page_kit
import sample_run
from fcil_protocol.errors import UsageError
from fcil_protocol.ids import RunId
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.sections.params import Params
from fcil_server.reports.sections.sections import SECTIONS
from fcil_server.web.child import Fresh
from fcil_server.web.errors import Faults
from fcil_server.web.page import board as board_module
from fcil_server.web.page import watch as watch_module
from fcil_server.web.page.board import Boards
from fcil_server.web.page.watch import PEERS_S, Questions
from sample_run import RUN, Clock
from server.page_door import Browser, Page, Server, browsing

OTHER = RunId("r20260201-000000-0002")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_S", 0.02)
    monkeypatch.setattr("fcil_server.web.child.FRESH_S", 0.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / LEDGER_NAME
    page_kit.small(path).close()
    return path


@pytest.fixture
def federation(written: Path, tmp_path: Path) -> Path:
    for found in written.parent.iterdir():
        shutil.copy(found, tmp_path / found.name)
    return tmp_path


def open_ledger(page: Page) -> Ledger:
    return Ledger(page.ledger, clock=Clock(page_kit.NOW + 200))


async def all_of(browser: Browser) -> dict[str, dict]:
    """Take the hello and every section once."""
    assert (await browser.next())[0] == "hello"
    told = [await browser.next() for _ in SECTIONS]
    return {data["name"]: data for name, data in told if name == "section"}


def looked_at(federation: Path, live, work) -> None:
    """Let a test talk to a page over its streams."""

    async def served() -> None:
        page = Page(federation, Server(live))
        async with page.served():
            await asyncio.wait_for(work(page), 60)

    asyncio.run(served())


def test_a_section_is_sent_when_the_ledger_changes_and_no_other(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            before = await all_of(browser)
            with open_ledger(page) as ledger:
                ledger.events.add("info", "walrus", "a walrus has joined", run=RUN)
            name, data = await browser.next()
            assert (name, data["name"]) == ("section", "events")
            assert "a walrus has joined" in data["html"]
            assert data["version"] > max(piece["version"] for piece in before.values())

    looked_at(federation, page_kit.live(), work)


def test_what_the_server_says_reaches_the_page(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            await all_of(browser)
            page.server.live["mode"] = page.server.live["round"]["mode"] = "paused"
            told = await browser.until("section", name="now")
            assert "paused" in told["html"]

    looked_at(federation, page_kit.live(), work)


def test_who_comes_again_is_sent_only_what_it_has_not_seen(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            seen = max(piece["version"] for piece in (await all_of(browser)).values())
        with open_ledger(page) as ledger:
            ledger.events.add("info", "walrus", "a walrus has joined", run=RUN)
        async with browsing(page, f"/stream?since={seen}") as browser:
            assert (await browser.next())[0] == "hello"
            assert (await browser.next())[1]["name"] == "events"
        async with browsing(page, Last_Event_ID=str(seen)) as browser:
            assert (await browser.next())[0] == "hello"
            assert (await browser.next())[1]["name"] == "events"

    looked_at(federation, page_kit.live(), work)


def test_nothing_is_asked_while_nobody_looks(federation: Path) -> None:
    async def work(page: Page) -> None:
        await page.get("/assets/page.css")
        assert page.server.asked == []
        async with browsing(page) as browser:
            await all_of(browser)
        while page.hub.followed.is_set():
            await page.get("/assets/page.css")
        asked = len(page.server.asked)
        for _ in range(40):
            await page.get("/assets/page.css")
        assert len(page.server.asked) <= asked + 1  # the look that was under way

    looked_at(federation, page_kit.live(), work)


def test_the_page_says_when_the_server_is_gone_and_greets_when_it_is_back(
    federation: Path,
) -> None:
    live = page_kit.live()

    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            await all_of(browser)
            page.server.live = None
            told = await browser.until("gone")
            assert told["says"].startswith("The server does not answer: no daemon runs")
            html = await page.get("/")
            assert "The server does not answer: no daemon runs" in html
            page.server.live = live
            assert (await browser.until("hello"))["live"] is True
            assert "The server does not answer" not in await page.get("/")

    looked_at(federation, live, work)


def test_pages_turn_to_a_run_that_begins_and_one_of_the_old_run_stays(federation: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as follower, browsing(page, f"/stream?run={RUN}") as pinned:
            await all_of(follower)
            await all_of(pinned)
            with open_ledger(page) as ledger:
                sample_run.add_run(ledger, OTHER)
            assert (await follower.until("hello"))["run"] == OTHER
            assert (await follower.until("section"))["run"] == OTHER
            over = await pinned.until("hello")
            assert (over["run"], over["live"]) == (RUN, False)
            assert pinned_stream(page).follows is False

    looked_at(federation, page_kit.live(), work)


def pinned_stream(page: Page):
    (found,) = [stream for stream in page.hub._streams if stream.pinned]
    return found


def test_an_older_run_is_shown_as_it_was_and_is_not_live(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME, clock=Clock(page_kit.NOW + 200)) as ledger:
        sample_run.add_run(ledger, OTHER)

    async def work(page: Page) -> None:
        async with browsing(page, f"/stream?run={RUN}") as browser:
            name, hello = await browser.next()
            assert (name, hello["run"], hello["live"]) == ("hello", RUN, False)
            told = [(await browser.next())[1] for _ in SECTIONS]
            assert {data["run"] for data in told} == {RUN}
        html = await page.get(f"/?run={RUN}")
        assert html.startswith("HTTP/1.1 200")
        assert "data-running" not in html.partition("<head>")[0]
        html += await page.get(f"/part/client?run={RUN}&id={sample_run.ALICE}")
        assert f'This run is not the newest, which is <a href="/?run={OTHER}">' in html
        assert "does not answer" not in html  # the server does
        assert "server stopped" not in html

    looked_at(federation, page_kit.live(), work)


def test_a_ledger_that_is_replaced_is_read_anew(federation: Path, tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            await all_of(browser)
            other = tmp_path / "other.sqlite"
            with page_kit.crowd(other, members=3) as ledger:
                name = ledger.clients.all()[0].name
            for suffix in ("-wal", "-shm"):
                page.ledger.with_name(f"{LEDGER_NAME}{suffix}").unlink(missing_ok=True)
            os.replace(other, page.ledger)
            told = await browser.until("section", name="clients")
            assert name.partition(">")[0].strip("<") in told["html"]

    looked_at(federation, None, work)


@pytest.mark.parametrize("damage", ["missing", "no ledger", "cut short"])
def test_a_damaged_ledger_is_one_sentence_and_the_page_goes_on_when_it_is_mended(
    federation: Path, damage: str
) -> None:
    whole = (federation / LEDGER_NAME).read_bytes()

    def spoil(path: Path) -> None:
        if damage == "missing":
            path.unlink()
        else:
            path.with_suffix(".new").write_bytes(
                b"words" * 1000 if damage == "no ledger" else whole[:5000]
            )
            path.with_suffix(".new").replace(path)

    async def work(page: Page) -> None:
        async with browsing(page) as browser:
            await all_of(browser)
            spoil(page.ledger)
            told = await browser.until("gone")
            assert told["says"].startswith("The ledger cannot be read: ")
            html = await page.get("/")
            assert html.startswith("HTTP/1.1 200")
            assert "The ledger cannot be read: " in html
            assert "Traceback" not in html
            part = await page.get("/part/events")
            assert part.startswith("HTTP/1.1 503")
            page.ledger.with_suffix(".new").write_bytes(whole)
            page.ledger.with_suffix(".new").replace(page.ledger)
            await browser.until("hello")

    looked_at(federation, page_kit.live(), work)


def test_without_a_ledger_the_page_says_so(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        html = await page.get("/")
        assert html.startswith("HTTP/1.1 200")
        assert "The ledger cannot be read: there is no ledger at" in html

    looked_at(tmp_path, None, work)


def test_a_defect_of_one_section_leaves_the_others_and_is_told_once(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = board_module.section

    def broken(name: str, *given, **more):
        if name == "bytes":
            raise ZeroDivisionError("secret words")
        return right(name, *given, **more)

    monkeypatch.setattr(board_module, "section", broken)
    boards = Boards(federation, Faults())
    for _ in range(3):
        boards.of(RUN)
        boards._older.clear()
    board = boards.of(RUN)
    boards.close()
    assert "the dashboard has a defect" in board.pieces["bytes"].html.lower()
    assert "secret" not in board.pieces["bytes"].html
    assert "a class" not in board.pieces["head"].html
    assert capsys.readouterr().err.count("internal: the dashboard failed at section bytes") == 1


def test_a_section_is_rendered_only_if_it_may_have_changed(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    right = board_module.section

    def recorded(name: str, *given, **more):
        rendered.append(name)
        return right(name, *given, **more)

    monkeypatch.setattr(board_module, "section", recorded)
    boards = Boards(federation, Faults())
    live = page_kit.live()
    first = boards.newest(live)
    assert sorted(rendered) == sorted(SECTIONS)
    rendered.clear()
    again = boards.newest(live)
    assert set(rendered) <= board_module.LIVE_SECTIONS
    assert again.newest == first.newest  # the same HTML is nothing new
    boards.close()


def test_versions_grow_over_restarts_too(federation: Path) -> None:
    newest = []
    for now in (1000.0, 1001.0, 500.0):
        boards = Boards(federation, Faults(), clock=lambda now=now: now)
        newest.append(boards.newest(None).newest)
        boards.close()
    assert newest[0] < newest[1]


def test_only_a_few_older_runs_are_remembered(federation: Path) -> None:
    with Ledger(federation / LEDGER_NAME, clock=Clock(page_kit.NOW + 200)) as ledger:
        runs = [RunId(f"r20260201-000000-{n:04d}") for n in range(6)]
        for run in runs:
            sample_run.add_run(ledger, run)
    boards = Boards(federation, Faults())
    for run in runs:
        boards.of(run)
    with pytest.raises(UsageError, match="no run"):
        boards.part("now", RunId("r20260301-000000-0009"), None, Params())
    assert list(boards._older) == runs[-board_module.KEPT_RUNS :]
    boards.close()


# --- asking the server ----------------------------------------------------------------------


def test_how_each_client_is_is_asked_now_and_then_and_when_one_comes_or_goes() -> None:
    now, server = Clock(0.0), Server(page_kit.live())
    asker = Questions(server, now)
    steps = [(0, 3, True), (1, 3, False), (1, 2, False), (1, 2, True), (1, 2, False)]
    for seconds, connected, peers in [*steps, (PEERS_S, 2, True)]:
        now.now += seconds
        server.live["connected"] = connected
        told = asker.look()
        assert server.asked[-1]["peers"] is peers
        assert told.live is not None
        assert "peers" in told.live


def test_a_client_at_work_is_told_alike_in_both_sections_between_two_questions() -> None:
    server = Server(page_kit.live())
    asker = Questions(server, Clock(0.0))
    asker.look()
    bob, alice, _ = server.live["round"]["clients"]
    bob["progress"], alice["progress"] = ["working", 20, 100], ["sending", 1, 1]
    del server.live["peers"]  # not asked for this time
    live = asker.look().live
    assert live is not None
    assert live["peers"][sample_run.BOB]["progress"] == ["working", 20, 100]
    assert live["peers"][sample_run.ALICE]["progress"] is None, "it has answered"


def test_a_deadline_stands_still_although_the_clock_runs() -> None:
    server = Server(page_kit.live())
    asker = Questions(server, Clock(0.0))
    told = []
    for passed, off in ((0.0, 0.4), (1.1, 0.6), (2.3, 0.3)):  # each around a half
        server.live["now"] = 1000.0 + passed
        server.live["round"]["remaining_s"] = 60.0 - passed + off
        told.append(asker.look().live["round"]["until"])
    assert told == [1060.0] * 3
    server.live["round"]["remaining_s"] = 600.0  # the round was given more time
    assert asker.look().live["round"]["until"] == 1602.0
    server.live["round"]["remaining_s"] = None
    assert asker.look().live["round"]["until"] is None


def test_what_nobody_expects_of_the_server_leaves_what_the_ledger_says(
    federation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(page: Page) -> None:
        html = await page.get("/")
        assert "The dashboard has a defect" in html
        assert 'id="events"' in html
        assert (
            capsys.readouterr().err.count("internal: the dashboard failed at what the server") == 1
        )

    looked_at(federation, {"round": "nonsense"}, work)


def test_a_server_that_hangs_does_not_keep_a_page_waiting(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "SERVER_WAIT_S", 0.01)

    async def served() -> None:
        page = Page(federation)
        forever = asyncio.get_running_loop().create_future()
        page.watch._asking = Fresh(lambda: None)
        page.watch._asking.get = lambda: asyncio.shield(forever)
        async with page.served():
            html = await asyncio.wait_for(page.get("/"), 60)
        assert "The server has not answered yet" in html

    asyncio.run(served())
