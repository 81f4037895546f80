"""A client's home, and scenarios for its daemon against a server in memory."""

import asyncio

import pytest

from client.daemon_kit import Running, Server
from client.round_kit import FED
from fcil_client.daemon import conversation, jobs
from fcil_client.session import machine as session
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.ids import ClientId

PATIENCE_S = 60


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Run a scenario ``async (server, running) -> None`` with a client that runs.

    There are no pauses, and no images that come and go.
    """

    async def nothing(*_args, **_options):
        await asyncio.Event().wait()
        yield set()

    monkeypatch.setattr(jobs, "awatch", nothing)
    for where, name in (
        (session, "SERVER_RETRY_S"),
        (session, "LOCAL_RETRY_S"),
        (conversation, "ADDRESS_S"),
    ):
        monkeypatch.setattr(where, name, 0.0)

    def run(scenario, **options):
        async def main():
            server = Server()
            running = Running(tmp_path, monkeypatch, server, **options)
            async with asyncio.timeout(PATIENCE_S), running:
                await scenario(server, running)
            return running

        return asyncio.run(main())

    return run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Home.of(FED, tmp_path / "images")


@pytest.fixture
def enrolment(tmp_path):
    return Enrolment(ClientId("a" * 26), "c", FED, "", ("a:1",), str(tmp_path))
