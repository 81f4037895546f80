"""Who shows a ticket and is turned away at the gate knocks once more, and not for ever."""

import asyncio

import pytest

from fcil_protocol import redemption
from fcil_protocol.errors import BadTicket, WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.keys import PrivateKeys
from fcil_protocol.link import LinkNews
from fcil_protocol.ticket import Ticket

TICKET = Ticket.new(bytes(range(32)), FederationId("0123456789abcdef" * 2), ("a:1",), 3600.0)


class Gate:
    """Turns the first ``refuses`` links away; what comes through the gate then is no message."""

    def __init__(self, refuses):
        self.refuses, self.knocks, self.closed = refuses, 0, 0

    def __call__(self, *_):
        self.knocks += 1
        self.news = LinkNews("refused", "unknown_client")
        if self.knocks > self.refuses:
            self.news = LinkNews("up")
        return self

    async def recv(self):
        return self.news if self.news.state == "refused" else self.open()

    def open(self):
        self.recv = self.junk
        return self.news

    async def junk(self):
        return [b"junk"]

    def send(self, _):
        return True

    def close(self):
        self.closed += 1


def knock(gate, monkeypatch):
    monkeypatch.setattr(redemption, "AGAIN_S", 0)
    asyncio.run(redemption.show(TICKET, PrivateKeys.generate(), "a:1", gate))


def test_the_second_knock_is_heard(monkeypatch):
    gate = Gate(refuses=1)
    with pytest.raises(WireError):  # so far it came
        knock(gate, monkeypatch)
    assert (gate.knocks, gate.closed) == (2, 2)


def test_after_the_second_the_sentence_says_what_to_do(monkeypatch):
    gate = Gate(refuses=9)
    with pytest.raises(BadTicket, match="does not know this ticket"):
        knock(gate, monkeypatch)
    assert (gate.knocks, gate.closed) == (2, 2)
