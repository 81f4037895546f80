"""``status --alive``: what a container's health check asks."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fcil_client.cli.main
import fcil_server.cli.main
from fcil_client.cli.show_status import check_alive
from fcil_protocol.errors import Unreachable
from fcil_protocol.process import control_socket
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    (tmp_path / "federation.toml").touch()
    Ledger(tmp_path / LEDGER_NAME).close()
    return tmp_path


@contextmanager
def daemon(directory: Path, told=None):
    """Answer on a directory's control socket, from a thread."""
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def answer(op, _fields):
        return told or {"running": True, "asked": op}

    async def run():
        server = await control_socket.serve(directory, answer)
        ready.set()
        await over.wait()
        server.close()
        await server.wait_closed()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def server_status(directory: Path, *options: str):
    return CliRunner().invoke(
        fcil_server.cli.main.app, ["status", "--dir", str(directory), "--json", *options]
    )


def test_a_server_that_does_not_run_is_no_failure_unless_one_asks_whether_it_lives(federation):
    assert server_status(federation).exit_code == 0
    found = server_status(federation, "--alive")
    assert found.exit_code == 2
    assert "no daemon runs" in found.output


def test_a_server_that_answers_is_alive(federation):
    with daemon(federation):
        found = server_status(federation, "--alive")
    assert found.exit_code == 0
    assert '"running": true' in found.stdout


def test_where_no_client_is_enrolled_none_is_alive(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = CliRunner()
    assert run.invoke(fcil_client.cli.main.app, ["status"]).exit_code == 0
    found = run.invoke(fcil_client.cli.main.app, ["status", "--alive"])
    assert found.exit_code == 2
    assert "no client's daemon answers" in found.output


def test_every_client_that_runs_has_to_answer_and_one_at_least():
    here, away = {"data": "/a", "answers": True}, {"data": "/b", "answers": False}
    check_alive([here])
    check_alive([here, {**away, "running": False}])  # of an earlier federation
    with pytest.raises(Unreachable, match="answers for /b"):
        check_alive([here, {**away, "running": True}])
    with pytest.raises(Unreachable, match="answers for /b"):
        check_alive([away])


def test_a_relay_says_how_it_is(tmp_path):
    told = {"running": True, "relay": "hall", "federation": "f", "server": "127.0.0.1:1", "up": True,
            "address": "0.0.0.0:7711", "clients": 3, "cached_chunks": 2, "cached_bytes": 600_000}  # fmt: skip
    with daemon(tmp_path, told):
        found = CliRunner().invoke(
            fcil_server.cli.main.app, ["status", "--dir", str(tmp_path), "--alive"]
        )
    assert found.exit_code == 0, found.output
    for words in ("hall at 0.0.0.0:7711", "127.0.0.1:1 (connected)", "clients     3", "2 chunks"):
        assert words in found.stdout


def test_a_relay_that_does_not_run_is_not_alive(tmp_path):
    (tmp_path / "relay.json").touch()
    found = server_status(tmp_path, "--alive")
    assert found.exit_code == 2
    assert "no daemon runs" in found.output


def test_a_relay_without_a_session_is_not_alive(tmp_path):
    told = {"running": True, "relay": "hall", "federation": "f", "server": "127.0.0.1:1", "up": False,
            "address": "0.0.0.0:7711", "clients": 0, "cached_chunks": 0, "cached_bytes": 0}  # fmt: skip
    with daemon(tmp_path, told):
        found = server_status(tmp_path)
        asked = server_status(tmp_path, "--alive")
    assert found.exit_code == 0, found.output
    assert asked.exit_code == 2
    assert "has no session with the server at 127.0.0.1:1" in asked.output
