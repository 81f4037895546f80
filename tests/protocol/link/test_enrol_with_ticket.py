"""Who shows a ticket and is turned away at the gate knocks again, and not for ever."""

import asyncio

import pytest

from fcil_protocol.errors import BadTicket, TooManyAtOnce, WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.link import enrol_with_ticket
from fcil_protocol.link.interface import COME_AGAIN, LinkNews
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket

TICKET = Ticket.new(bytes(range(32)), FederationId("0123456789abcdef" * 2), ("a:1",), 3600.0)


UNKNOWN = "unknown_client"


class Gate:
    """Turns links away for these reasons, one after the other.

    What comes through the gate then is no message.
    """

    def __init__(self, *reasons):
        self.reasons, self.knocks, self.closed = reasons, 0, 0

    def __call__(self, *_):
        self.news = LinkNews("up")
        if self.knocks < len(self.reasons):
            self.news = LinkNews("refused", self.reasons[self.knocks])
        self.knocks += 1
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


@pytest.fixture
def knock(monkeypatch):
    """Show the ticket to a gate."""
    monkeypatch.setattr(enrol_with_ticket, "AGAIN_S", 0)

    def show(gate, say=lambda _: None):
        try:
            asyncio.run(enrol_with_ticket.show(TICKET, PrivateKeys.generate(), "a:1", gate, say))
        finally:
            assert gate.closed == gate.knocks

    return show


@pytest.mark.parametrize("reason", [UNKNOWN, COME_AGAIN])
def test_the_second_knock_is_heard(knock, reason):
    gate = Gate(reason)
    with pytest.raises(WireError):  # so far it came
        knock(gate)
    assert gate.knocks == 2


def test_a_ticket_that_is_not_known_is_said_after_the_second_knock(knock):
    gate = Gate(*[UNKNOWN] * 9)
    with pytest.raises(BadTicket, match="does not know this ticket") as told:
        knock(gate)
    assert gate.knocks == 2
    assert "too many" not in str(told.value)


def test_where_too_many_come_it_knocks_until_there_is_room(knock):
    gate = Gate(*[COME_AGAIN] * (enrol_with_ticket.TRIES - 1))
    with pytest.raises(WireError):
        knock(gate)
    assert gate.knocks == enrol_with_ticket.TRIES


def test_after_a_minute_of_too_many_it_says_so_and_nothing_of_a_bad_ticket(knock):
    gate = Gate(*[COME_AGAIN] * 99)
    with pytest.raises(TooManyAtOnce, match="knows this ticket") as told:
        knock(gate)
    assert gate.knocks == enrol_with_ticket.TRIES
    assert told.value.exit_code == 2
    assert "the ticket is still valid" in str(told.value)


def test_a_ticket_that_is_withdrawn_meanwhile_is_said_then(knock):
    gate = Gate(COME_AGAIN, COME_AGAIN, UNKNOWN, UNKNOWN)
    with pytest.raises(BadTicket):
        knock(gate)
    assert gate.knocks == 4


def test_it_says_once_that_it_waits(knock):
    said = []
    with pytest.raises(TooManyAtOnce):
        knock(Gate(*[COME_AGAIN] * 99), said.append)
    assert said == ["too many clients connect to a:1 at once; trying again for a minute"]
