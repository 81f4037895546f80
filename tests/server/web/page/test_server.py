"""The page's process: of its own, bounded, and gone with the server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path

import pytest

import page_kit
from fcil_protocol.ids import RunId
from fcil_protocol.process import child
from fcil_server.federation.page_key import make_key
from fcil_server.federation.sections import FederationSection
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.charts.history import History
from fcil_server.web.errors import Faults
from fcil_server.web.page import board
from fcil_server.web.page import server as server_module
from fcil_server.web.page.access.sessions import KeyedSessions
from fcil_server.web.supervisor import WebProcess, page_site
from sample_run import RUN
from server.web_kit import ask, door, get


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    page_kit.small(tmp_path / LEDGER_NAME).close()
    make_key(tmp_path)
    return tmp_path


def cookie(federation: Path) -> str:
    sessions = KeyedSessions(federation).current()
    return f"{sessions.cookie}={sessions.begin()}"


def options(federation: Path, *words: str) -> argparse.Namespace:
    place = ["--dir", str(federation), "--fd", "0"]
    return server_module.parser().parse_args([*place, *words])


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ((), ["404", "404", "403"]),
        (("--health",), ["404", "503", "403"]),
        (("--metrics", "--health", "--read-only"), ["200", "503", "404"]),
    ],
)
def test_figures_health_and_acts_are_there_only_if_they_are_switched_on(
    federation: Path, words: tuple[str, ...], codes: list[str]
) -> None:
    async def work() -> list[str]:
        page = server_module.Page(options(federation, *words))
        body = "{}"
        sent = [
            get("/metrics"),
            get("/healthz"),
            get(
                "/act/prepare",
                method="POST",
                Cookie=cookie(federation),
                Content_Type="application/json",
                Content_Length=str(len(body)),
                Origin="http://evil.example",
            )
            + body,
        ]
        async with door(page.app, body_bytes=4096) as port:
            return [(await ask(port, request)).split(" ", 2)[1] for request in sent]

    assert asyncio.run(work()) == codes


def test_a_long_ledger_is_read_before_somebody_waits_for_it(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "READ_LIMIT_S", 0.0)  # one round at a time
    found: list[int] = []
    right = board.Boards.history

    def recorded(boards: board.Boards, run: RunId | None) -> History:
        history = right(boards, run)
        found.append(history.unread)
        return history

    monkeypatch.setattr(board.Boards, "history", recorded)

    async def work() -> None:
        page = server_module.Page(options(federation))
        await page.watch.warm_up()
        await page.watch.close()

    asyncio.run(work())
    assert found[0] > 1
    assert found == list(range(found[0], -1, -1))


def test_an_older_run_is_read_on_before_its_page_is_shown(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "READ_LIMIT_S", 0.0)  # one round at a time
    boards = board.Boards(federation, Faults())
    first = boards.history(None).unread
    shown = boards.of(RUN).history
    boards.close()
    assert shown is not None
    assert shown.unread == first - 1 - board.READS


def test_the_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[object, object] = {}
    monkeypatch.setattr(os, "nice", lambda by: said.update(nice=by))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda what, to: said.update({what: to}))
    child.limit(server_module.MAX_FILES)
    assert said == {
        "nice": child.NICE,
        resource.RLIMIT_DATA: (300, 300),  # no more than what is allowed
        resource.RLIMIT_NOFILE: (300, 300),
    }
    assert server_module.LIMITS.connections + 50 < server_module.MAX_FILES


@pytest.mark.processes
def test_a_page_that_is_killed_comes_back_with_its_sessions_and_ends_with_the_server(
    federation: Path,
) -> None:
    enters = cookie(federation)
    said: list[str] = []
    ended = asyncio.Event()

    def say(_level: str, _code: str, text: str) -> None:
        said.append(text)
        if "exit code" in text:
            ended.set()

    async def work() -> None:
        site = page_site(FederationSection(page="127.0.0.1:0"))
        process = WebProcess(federation, site, say)
        port = int(process.address.rpartition(":")[2])
        running = asyncio.create_task(process.run())

        async def stream() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/stream", Cookie=enters).encode())
            await reader.readuntil(b"event: hello")
            return reader, writer

        first, closing = await stream()
        os.kill(process.describe()["pid"], signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            while await first.read(1 << 16):
                pass  # until the stream ends
        closing.close()
        _, second = await stream()  # it waits in the server's socket for the next process
        process._process.ask()  # what the kernel does when the server is gone
        await ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        second.close()
        process.close()

    asyncio.run(asyncio.wait_for(work(), 120))
    assert "was ended by signal 9; it is restarted in 0.2 s" in said[1]
    assert "ended with exit code 0" in said[2]
