"""A server that is to end ends, whatever waits in the queue."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fcil_protocol.errors import DiskFull, FcilError, NotNow, RunFailed, UsageError
from fcil_server.daemon.commands import Commands
from fcil_server.daemon.context import ServerContext, start_guarded
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.server import Server
from fcil_server.federation.directory import Federation
from fcil_server.rounds.position import Mode
from fcil_server.runs.run_queue import RunQueue


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    federation = Federation.open(tmp_path / "f", None, ("federation.listen=127.0.0.1:0",))
    yield Server(federation, Journal(federation.ledger, lambda _: None), until_done=True)
    federation.close()


def submit(server: Server) -> None:
    settings = {"method": {"name": "fedncm"}}
    RunQueue(server.federation.directory).append("", settings, "uid 1")


def at_the_end(server: Server, mode: Mode) -> Any:
    """Let the run end while the operator has set this mode."""
    server._coordinator = SimpleNamespace(progress=SimpleNamespace(mode=mode))  # type: ignore[assignment]
    server._run_ended()
    return server


def test_the_next_run_begins_only_if_one_waits(server: Server) -> None:
    assert not server.begin_next()
    submit(server)
    assert server.begin_next()
    assert server.goes_on
    assert server._stopping.is_set()


def test_a_second_wish_for_the_next_run_changes_nothing(server: Server) -> None:
    assert not server.is_between_runs()
    submit(server)
    assert [server.begin_next(), server.begin_next()] == [True, True]
    assert server.is_between_runs()
    server.stop()
    assert not server.is_between_runs()


@pytest.mark.parametrize("op", ["pause", "resume", "drain", "close_round", "cancel_run"])
def test_between_two_runs_neither_hears_of_a_change(op: str) -> None:
    actions: Any = SimpleNamespace(is_between_runs=lambda: True)
    none: Any = None
    commands = Commands(none, actions, none, none, none)
    with pytest.raises(NotNow, match="the next one is about to begin"):
        asyncio.run(commands.answer(op, {"uid": 1}))


def test_a_directory_that_others_can_write_to_is_a_warning(server: Server) -> None:
    directory = server.federation.directory
    server.federation.tell_if_open(server.note)
    assert server.journal.latest(9) == []
    directory.chmod(0o777)
    server.federation.tell_if_open(server.note)
    (note,) = server.journal.latest(9)
    text = f"other users can write to {directory} (0777); run: chmod 700 {directory}"
    assert (note["level"], note["text"]) == ("warning", text)


@pytest.mark.parametrize("op", ["stop", "close_round"])
def test_a_full_disk_keeps_no_act_from_being_done_and_said(op: str) -> None:
    done: list[str] = []

    def audit_done(*given: object) -> None:
        assert done, "the act comes first: if it is not recorded, it is done nevertheless"
        done.append(f"audit {given[1]}")

    coordinator = SimpleNamespace(progress=None, close_short=lambda **_: done.append("close_round"))
    context: Any = SimpleNamespace(
        audit_done=audit_done, run=SimpleNamespace(coordinator=coordinator)
    )
    actions: Any = SimpleNamespace(is_between_runs=lambda: False, stop=lambda: done.append("stop"))
    none: Any = None
    commands = Commands(context, actions, none, none, none)
    assert asyncio.run(commands.answer(op, {"uid": 1})) == {}
    assert done == [op, f"audit {op}"]


def test_a_slow_look_at_test_images_holds_no_other_command(monkeypatch, server: Server) -> None:
    begun, ended = threading.Event(), threading.Event()

    def look(_config: object, _fields: object, abandoned: Callable[[], bool]) -> None:
        begun.set()
        while not abandoned():
            pass
        ended.set()

    async def cancel_meanwhile() -> None:
        context = SimpleNamespace(config=server.config, federation=server.federation)
        actions: Any = SimpleNamespace(is_between_runs=lambda: False)
        none: Any = None
        commands = Commands(context, actions, none, none, none)  # type: ignore[arg-type]
        slow = asyncio.create_task(commands.answer("submit_run", {"settings": {}}))
        await asyncio.to_thread(begun.wait)
        with pytest.raises(UsageError, match="no run with the number 7 waits"):
            await commands.answer("cancel_run", {"number": 7})
        slow.cancel()

    monkeypatch.setattr("fcil_server.daemon.commands.check_submitted", look)
    asyncio.run(cancel_meanwhile())  # waits for the thread
    assert ended.is_set()


def test_a_withdrawn_ticket_is_no_client_that_joined_with_it() -> None:
    none: Any = None
    roster = SimpleNamespace(withdraw=lambda *_: False, named=none)
    commands = Commands(SimpleNamespace(roster=roster), none, none, none, none)  # type: ignore[arg-type]
    with pytest.raises(NotNow, match="'guest' has no open ticket any more"):
        asyncio.run(commands.answer("revoke", {"uid": 1, "name": "guest", "ticket": True}))


def test_a_stop_after_the_decision_for_the_next_run_wins(server: Server) -> None:
    submit(server)
    assert server.begin_next()
    server.stop()
    assert not server.goes_on


def test_nothing_begins_once_the_server_stops_or_failed(server: Server) -> None:
    submit(server)
    server.stop()
    assert not server.begin_next()
    assert not server.goes_on


def test_a_failure_ends_it(server: Server) -> None:
    submit(server)
    assert server.begin_next()
    server.fail(RunFailed("no."))
    assert not server.goes_on


@pytest.mark.parametrize(
    ("mode", "goes_on", "stops"),
    [(Mode.RUNNING, True, True), (Mode.DRAINING, False, True), (Mode.PAUSED, False, False)],
)
def test_a_drain_or_a_pause_in_the_last_round_holds(
    server: Server, mode: Mode, goes_on: bool, stops: bool
) -> None:
    submit(server)
    at_the_end(server, mode)
    assert (server.goes_on, server._stopping.is_set()) == (goes_on, stops)


def test_what_is_done_and_not_in_the_audit_log_is_no_error(server: Server, monkeypatch) -> None:
    """Its caller would do it again: a run would be learned twice."""

    def full(*_: object) -> None:
        raise DiskFull("the disk is full.")

    context: Any = SimpleNamespace(ledger=server.federation.ledger, journal=server.journal)
    monkeypatch.setattr(context.ledger.audit, "add", full)
    ServerContext.audit_done(context, "uid 1", "submit_run", "number 1")
    (note,) = server.journal.latest(9)
    assert note["level"] == "warning"
    assert "submit_run (number 1) by uid 1 is done and is not in the audit log" in note["text"]


@pytest.mark.filterwarnings("error")
def test_work_that_is_cancelled_before_it_began_leaves_no_warning() -> None:
    """Python warns of a coroutine that is never awaited; so would the server's last words."""
    failed: list[FcilError] = []

    async def never() -> None:
        raise AssertionError("it did not begin")

    async def story() -> None:
        work = never()
        task = start_guarded(work, failed.append)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED

    asyncio.run(story())
    assert failed == []
