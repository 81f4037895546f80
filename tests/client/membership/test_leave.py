"""A client that leaves removes its keys only once the server refuses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fcil_client.membership import leave
from fcil_client.state.home import Home
from fcil_protocol.errors import FcilError, Revoked, Unreachable
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.messages import Bye


class Visits:
    """Connections to a server, each of which ends without an answer until one is refused."""

    def __init__(self, refusals: list[FcilError | None]) -> None:
        self._refusals = refusals
        self.sent: list[Any] = []

    @asynccontextmanager
    async def __call__(self, *_: Any) -> AsyncIterator[tuple[Any, None]]:
        refusal = self._refusals.pop(0)
        if refusal is not None:
            raise refusal
        yield SimpleNamespace(send=self.sent.append), None

    async def answer(self, _line: Any) -> LinkNews:
        return LinkNews("down", "lost")


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tell a server that refuses the visits so that the client leaves; return the messages."""

    def tell(*refusals: FcilError | None) -> list[Any]:
        visits = Visits(list(refusals))
        monkeypatch.setattr(leave, "visit", visits)
        monkeypatch.setattr(leave, "answer", visits.answer)
        asyncio.run(leave.notify_server(Home(tmp_path), SimpleNamespace()))  # type: ignore[arg-type]
        return visits.sent

    return tell


def test_the_refusal_of_another_visit_shows_that_the_client_has_left(say: Any) -> None:
    (sent,) = say(None, Revoked("the client left by itself."))
    assert isinstance(sent, Bye)


def test_a_connection_that_was_lost_before_the_server_read_is_repeated(say: Any) -> None:
    assert len(say(None, None, Revoked("the client left by itself."))) == 2


@pytest.mark.parametrize("refusals", [(None, Unreachable("nobody.")), (None, None, None)])
def test_without_a_refusal_the_client_is_still_a_member(
    say: Any, refusals: tuple[FcilError | None, ...]
) -> None:
    with pytest.raises(Unreachable):
        say(*refusals)
