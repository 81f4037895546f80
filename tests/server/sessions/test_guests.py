"""How much somebody who is no member may say at once: little, but a former member its Hello."""

from types import SimpleNamespace

import pytest

from fcil_protocol.errors import TooLarge, WireError
from fcil_protocol.link.zmq_link import Incoming
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Nack
from fcil_protocol.messages.signed_session import PURPOSE
from fcil_protocol.trust.keys import PrivateKeys, verify_signature
from fcil_server.federation.allow_list import MAX_GUEST_BYTES
from fcil_server.sessions.guests import MAX_FORMER_BYTES, Guests

MEMBER, FORMER, NEWCOMER = b"m", b"f", b"n"


@pytest.mark.parametrize(
    ("key", "most"),
    [(MEMBER, 1 << 20), (FORMER, MAX_FORMER_BYTES), (NEWCOMER, MAX_GUEST_BYTES)],
    ids=["member", "former", "newcomer"],
)
def test_what_is_longer_is_cut_at_once(key, most):
    ledger = SimpleNamespace(clients=SimpleNamespace(by_curve=lambda key: key == FORMER or None))
    roster = SimpleNamespace(
        allow_list=SimpleNamespace(is_member=MEMBER.__eq__),
        federation=SimpleNamespace(ledger=ledger),
    )
    cut = []
    guests = Guests(roster, None, lambda *_: True, cut.append, list, print)

    def say(size):
        guests.check_size(Incoming(b"", 7, key, (bytes(size - 1), b"x")))

    say(most)
    assert cut == []
    if key != MEMBER:
        with pytest.raises(TooLarge, match=f"{most + 1} bytes"):
            say(most + 1)
        assert cut == [7]


def test_a_ticket_holder_whose_message_is_unreadable_hears_why_and_so_does_the_operator():
    server, notes, sent = PrivateKeys.generate(), [], []
    ticket = SimpleNamespace(name="cam", curve=NEWCOMER, signing=b"s" * 32)
    tickets = SimpleNamespace(get={NEWCOMER: ticket}.get)
    roster = SimpleNamespace(
        allow_list=SimpleNamespace(is_member=MEMBER.__eq__),
        federation=SimpleNamespace(ledger=SimpleNamespace(tickets=tickets)),
    )

    def notify(*note, origin):
        notes.append((*note, origin))

    guests = Guests(roster, server, lambda *said: sent.append(said), print, list, notify)
    error = WireError("enrol: 'proof' is too short.")
    for key in (MEMBER, FORMER, NEWCOMER):
        guests.answer_unreadable(Incoming(b"r", 7, key, (b"x",)), error)
    assert notes == [
        ("warning", "malformed", "the ticket of cam: enrol: 'proof' is too short.", NEWCOMER.hex())
    ]
    [(route, frames)] = sent
    received = parse(tuple(frames))
    assert route == b"r"
    assert isinstance(received.message, Nack)
    assert (received.message.code, received.message.text) == ("malformed", error.message)
    verify_signature(server.public.signing, PURPOSE, received.body, received.signature)
