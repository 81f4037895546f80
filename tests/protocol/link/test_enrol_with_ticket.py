"""Who shows a ticket and is turned away at the gate knocks again, and not for ever."""

import asyncio
from dataclasses import replace

import pytest

from fcil_protocol.errors import BadTicket, TooManyAtOnce, Unreachable, WireError
from fcil_protocol.ids import FederationId
from fcil_protocol.link import enrol_with_ticket
from fcil_protocol.link.interface import COME_AGAIN, LinkNews
from fcil_protocol.messages.messages import Enrolled
from fcil_protocol.trust.certificate import RootKey
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
    (text,) = said
    assert text.startswith("a:1 turns newcomers away for a moment: many connect at once, or one")


@pytest.fixture
def redeem(monkeypatch):
    """Redeem a ticket at a server that answers at some addresses; return the record and notes."""
    certificate = RootKey.generate().certify(PrivateKeys.generate().public)

    def redeem(ticket, *answering):
        async def show(_ticket, _keys, address, _make, _notify):
            if address not in answering:
                raise Unreachable(f"nobody at {address}.", action="")
            return Enrolled(
                client="c" * 26, name="camera", certificate=b"", addresses=["lan:1", "b:2", "d:4"]
            ), certificate

        monkeypatch.setattr(enrol_with_ticket, "show", show)
        said = []
        keys = PrivateKeys.generate()
        record = asyncio.run(enrol_with_ticket.redeem_ticket(ticket, keys, None, said.append))
        assert record.certificate == certificate.to_bytes().hex()
        assert (record.client_id, record.name) == ("c" * 26, "camera")
        assert (record.federation, record.ticket) == (ticket.federation, ticket.digest)
        return record, said

    return redeem


def test_the_address_that_worked_is_the_first_of_the_servers_own(redeem):
    record, said = redeem(replace(TICKET, addresses=("a:1", "b:2", "c:3")), "b:2", "c:3")
    assert record.addresses == ("b:2", "lan:1", "d:4")
    assert said == ["presenting the ticket to a:1", "presenting the ticket to b:2"]


def test_through_a_relay_the_addresses_stay_the_tickets(redeem):
    """The server's own are no use there: the link has the relay's key."""
    record, _ = redeem(replace(TICKET, addresses=("a:1", "b:2"), via=True), "b:2")
    assert record.addresses == ("b:2", "a:1")


def test_where_no_address_answers_the_last_one_is_said(redeem):
    with pytest.raises(Unreachable, match="b:2"):
        redeem(replace(TICKET, addresses=("a:1", "b:2")))


def test_a_tickets_digest_says_nothing_of_its_secret_and_is_its_guests():
    again = Ticket.from_text(TICKET.to_text())
    assert again.digest == TICKET.digest
    assert again.digest != replace(TICKET, secret=bytes(16)).digest
    assert TICKET.digest not in repr(TICKET)
