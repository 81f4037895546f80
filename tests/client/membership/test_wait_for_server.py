"""A client's first start waits for its server, and only for what waiting can mend."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_client.cli.main import app
from fcil_client.membership import wait_for_server as waiting
from fcil_client.membership.wait_for_server import wait_for_server
from fcil_protocol.errors import (
    BadTicket,
    FcilError,
    Starting,
    TooManyAtOnce,
    Unreachable,
    WrongClock,
)
from fcil_protocol.process.supervisor import Service


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.0)


class Door:
    """An attempt to enrol that is refused for these reasons, one after the other."""

    def __init__(self, *refusals: FcilError) -> None:
        self.refusals = list(refusals)
        self.said: list[str] = []

    async def enrol(self) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        return "enrolled"

    def try_it(self, service: Service | None = None) -> str | None:
        service = service or Service(environ={})
        return asyncio.run(wait_for_server(self.enrol, service, self.said.append))


def test_it_waits_for_a_server_that_is_late_full_or_starting_and_says_each_reason_once() -> None:
    nobody = [Unreachable("nobody answers.", action="Start one.") for _ in range(3)]
    door = Door(*nobody, TooManyAtOnce("full."), Starting("it starts."), WrongClock("in 1970."))
    assert door.try_it() == "enrolled"
    assert [text.partition(". ")[0] for text in door.said] == [
        "nobody answers", "full", "it starts", "in 1970",
    ]  # fmt: skip
    assert door.said[0].endswith("This client keeps trying; Ctrl-C ends it. Start one.")
    assert "the ticket is still valid" in door.said[1]


def test_a_server_that_is_there_is_not_waited_for() -> None:
    door = Door()
    assert (door.try_it(), door.said) == ("enrolled", [])


def test_what_waiting_cannot_mend_ends_it() -> None:
    door = Door(Unreachable("nobody answers."), BadTicket("altered."))
    with pytest.raises(BadTicket):
        door.try_it()
    assert len(door.said) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_without_an_error(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(waiting, "LONGEST_PAUSE_S", 3600.0)
    door = Door(*[Unreachable("nobody answers.")] * 9)
    said = door.said.append

    def say(text: str) -> None:
        said(text)
        if len(door.said) == 1:
            os.kill(os.getpid(), number)

    assert asyncio.run(wait_for_server(door.enrol, Service(environ={}), say)) is None
    assert len(door.refusals) == 8
    assert door.said[1].startswith(f"{number.name}: ")


def test_a_supervisor_sees_a_client_that_runs_and_waits(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000000"}
        Door(Unreachable("nobody answers.")).try_it(Service(environ=environ))
        told = [supervisor.recv(999) for _ in range(3)]
    assert told == [b"READY=1", b"STATUS=waiting for a server", b"WATCHDOG=1"]


def test_join_fails_at_once_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "images" / "cat").mkdir(parents=True)
    done = CliRunner().invoke(app, ["join", "--data", str(tmp_path / "images"), "--no-wait"])
    assert done.exit_code == 2
    assert "no fcil server runs on this machine as this user" in done.stderr
