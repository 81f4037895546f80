"""How much somebody who is no member may say at once: little, but a former member its Hello."""

from types import SimpleNamespace

import pytest

from fcil_protocol.errors import TooLarge
from fcil_protocol.link.zmq_link import Incoming
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
