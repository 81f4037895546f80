"""Updates that wait in line while others arrive: in order, one of a client, and none for ever."""

from types import SimpleNamespace

import pytest

from fcil_protocol.envelopes.window import Pace
from fcil_protocol.ids import RoundKey
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_server.sessions.offers import IDLE_S, MOST_ARRIVING, OfferLine, UploadOffer

ROUND = RoundKey("r", 0, "train", 2)


def offer(client, *, unasked=0, kind="train", round_=2):
    core = SimpleNamespace(run="r", task=0, kind=kind, round=round_)
    header = SimpleNamespace(core=core, update_id=f"{client}{round_}")
    return UploadOffer(SimpleNamespace(client=client, sums=False), header, (), unasked)


def left(line, arriving=0):
    """Return the clients that are called, in order, while this many updates arrive."""
    return [one.peer.client for one in iter(lambda: line.next(arriving), None)]


@pytest.fixture
def line():
    return OfferLine()


def test_the_first_in_line_is_called_first_and_a_new_offer_keeps_its_place(line):
    for client in "abc":
        line.put(offer(client))
    line.put(newer := offer("a", round_=3))
    line.leave("b")
    assert line.next(MOST_ARRIVING - 1) is newer
    assert left(line) == ["c"]


def test_nobody_is_called_while_too_many_arrive(line):
    assert line.is_full(MOST_ARRIVING)
    assert not line.is_full(MOST_ARRIVING - 1)
    line.put(offer("a"))
    assert line.is_full(0), "nobody overtakes who waits"
    assert line.next(MOST_ARRIVING) is None
    assert left(line, MOST_ARRIVING - 1) == ["a"]
    assert not line.is_full(0)


def test_an_offer_that_was_refused_leaves_the_line_and_another_of_its_client_stays(line):
    line.put(offer("a"))
    line.leave("a", "a1")
    line.leave("b", "b2")
    assert line.is_full(0)
    line.leave("a", "a2")
    assert left(line) == []


def test_updates_that_have_stalled_make_room_for_as_many_others(line):
    receivers = [SimpleNamespace(pace=Pace(1 << 20)) for _ in range(3)]
    for receiver in receivers[:2]:
        receiver.pace.asked(1000, now=0.0)
    receivers[0].pace.arrived(1, now=1.0)
    for client in "ab":
        line.put(offer(client))
    line.look(receivers, now=IDLE_S)
    assert line.next(MOST_ARRIVING + 1) is None, (
        "one has sent a byte since, one has nothing to send"
    )
    assert line.next(MOST_ARRIVING).peer.client == "a"
    line.look(receivers, now=IDLE_S + 1)
    assert line.next(MOST_ARRIVING + 2) is None
    line.look(receivers * MOST_ARRIVING, now=IDLE_S + 1)
    assert line.next(2 * MOST_ARRIVING) is None, "however many have stalled"
    assert left(line, 2 * MOST_ARRIVING - 1) == ["b"]
    line.look(receivers, now=IDLE_S + 1)
    assert line.is_full(MOST_ARRIVING), "nobody waits"


def test_what_is_on_its_way_and_lists_of_classes_do_not_wait():
    assert offer("a").may_wait
    assert not offer("a", unasked=1).may_wait
    assert not offer("a", kind=INVENTORY).may_wait


@pytest.mark.parametrize(
    ("continues", "stay"), [(None, []), (ROUND, ["a", "b"]), (RoundKey("r", 1, "train", 0), [])]
)
def test_the_end_of_a_round_empties_the_line_but_for_what_counts_later(line, continues, stay):
    for client, round_ in (("a", 2), ("b", 3)):
        line.put(offer(client, round_=round_))
    line.put(offer("c", kind="evaluate"))
    line.sweep(continues)
    assert left(line) == stay
