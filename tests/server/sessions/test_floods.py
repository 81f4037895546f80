"""What the operator reads of floods, and how much of whom may lie unread."""

import pytest

from fcil_protocol.envelopes.window import TOTAL_BYTES
from fcil_protocol.link.zmq_link import MEMBER_BYTES
from fcil_server.federation.allow_list import GUEST_BYTES, MAX_GUEST_BYTES, AllowList
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.sessions.conduct import AGAIN_S, Floods
from server.relay_kit import Center

ANN, BOB = b"a" * 32, b"b" * 32
CREDIT = 8 << 20


def test_who_floods_again_and_again_is_named_once_a_minute_with_a_count():
    said, counted, now = [], [], [0.0]
    floods = Floods(lambda key: key.decode()[:1], said.append, counted.append, lambda: now[0])
    for _ in range(5):
        floods.cut(ANN, "too much")
        floods.cut(BOB, "too long")
    assert said == [
        "the connection of a was cut: too much",
        "the connection of b was cut: too long",
    ]
    now[0] = AGAIN_S
    floods.cut(ANN, "too much")
    assert said[2:] == ["the connection of a was cut: too much (4 more times in the last minutes)"]
    assert counted == [ANN, BOB] * 5 + [ANN], "each time, as conduct"


def test_a_guest_may_have_little_unread_and_a_member_its_window_too():
    door = AllowList(credit=CREDIT)
    door.invite(ANN, 60)
    door.admit(BOB)
    assert door.allow(ANN) == GUEST_BYTES
    assert door.allow(BOB) == MEMBER_BYTES + CREDIT
    door.invite(BOB, 60)  # a member no more
    assert door.allow(BOB) == GUEST_BYTES


def test_a_guests_message_fits_what_may_lie_unread_of_it():
    assert MAX_GUEST_BYTES < GUEST_BYTES


@pytest.mark.parametrize("revoked", [False, True])
def test_of_a_relay_as_much_may_lie_unread_as_all_behind_it_were_asked_for(tmp_path, revoked):
    with Ledger(tmp_path / LEDGER_NAME) as ledger:
        center = Center(ledger)
        key = center.member("site", role=Role.RELAY)[0].public.curve
        if revoked:
            center.roster.allow_list.invite(key, 60)
        expected = GUEST_BYTES if revoked else MEMBER_BYTES + TOTAL_BYTES
        assert center.roster.allow(key) == expected
        assert center.roster.who(key) == "site"
        assert "sent nothing" in center.roster.who(b"")
        assert "ticket" in center.roster.who(ANN)
