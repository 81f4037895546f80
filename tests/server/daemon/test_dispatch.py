"""What the server makes of a client's report of its work."""

import asyncio
from types import SimpleNamespace

import pytest

from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import Decline, Progress
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import keys_digest
from fcil_server.daemon.cut_offs import A_ROTATION
from fcil_server.daemon.dispatch import Dispatch
from fcil_server.daemon.sessions import ClientSessions
from fcil_server.rounds import coordinator, events
from sample_run import RUN


@pytest.mark.parametrize(
    ("number", "kind", "phase"),
    [(4, "train", "working"), (1, "train", "round 1: working"), (0, "finish", "working")],
)
def test_work_on_an_earlier_round_names_it(number, kind, phase):
    current = RoundKey(RUN, 0, "train", 4)
    coordinator = SimpleNamespace(
        context=SimpleNamespace(run=RUN), progress=SimpleNamespace(key=lambda _: current)
    )
    desk = SimpleNamespace(_context=SimpleNamespace(run=SimpleNamespace(coordinator=coordinator)))
    said = Progress(run=RUN, task=0, kind=kind, round=number, phase="working", done=1, total=2)
    assert Dispatch._phase(desk, said) == phase


def test_a_members_connections_without_a_session_are_few():
    """Each takes two descriptors; a guest's is cut after its answer."""
    cut, sessions = [], {3}
    context = SimpleNamespace(
        roster=SimpleNamespace(allow_list=SimpleNamespace(is_member=lambda key: key == b"member")),
        peers=SimpleNamespace(by_conn=lambda conn: conn if conn in sessions else None),
        link=SimpleNamespace(cut=cut.append),
    )
    desk = SimpleNamespace(_context=context, _strays={})
    for conn in (1, 2, 2, 3, 4, 5, 6, 7):
        Dispatch._limit_strays(desk, SimpleNamespace(key=b"member", conn=conn))
        Dispatch._limit_strays(desk, SimpleNamespace(key=b"guest", conn=100 + conn))
    assert cut == [1, 2], "3 has a session, and 4 to 7 are the newest"
    sessions.add(5)
    for conn in (8, 9):
        Dispatch._limit_strays(desk, SimpleNamespace(key=b"member", conn=conn))
    assert cut == [1, 2, 4]
    assert desk._strays == {b"member": [6, 7, 8, 9]}


def test_new_keys_are_in_force_before_their_cost_is_counted():
    """Else a member that is cut off for it would be one again with the new keys."""
    keys, done = PrivateKeys.generate().public, []

    def adopt(_row, _message):
        done.append("adopted")
        return keys

    sessions = SimpleNamespace(
        _row=lambda _peer: SimpleNamespace(via=None),
        _context=SimpleNamespace(
            roster=SimpleNamespace(rotate=adopt), journal=SimpleNamespace(note=lambda *_: None)
        ),
        _cut_offs=SimpleNamespace(count_needless=lambda _client, count: done.append(count)),
        send=lambda _peer, message: done.append(message.digest),
    )
    ClientSessions.rotate(sessions, SimpleNamespace(name="camera", client="c"), None)
    assert done == ["adopted", keys_digest(keys), A_ROTATION]


@pytest.mark.parametrize("run", [RUN, "r20990101-000000-ffff"])
def test_a_decline_of_an_earlier_run_does_nothing_to_this_one(run):
    heard, needless = [], []

    def declined(client, key, reason):
        heard.append((client, key, reason))
        return key.run == RUN

    coordinator = SimpleNamespace(context=SimpleNamespace(run=RUN), on_client_declined=declined)
    context = SimpleNamespace(
        run=SimpleNamespace(coordinator=coordinator),
        journal=SimpleNamespace(note=lambda *_: None),
    )
    desk = SimpleNamespace(
        _context=context, _cut_offs=SimpleNamespace(count_needless=needless.append)
    )
    peer = SimpleNamespace(client="c", name="c", resting=False)
    Dispatch._decline(desk, peer, Decline(run=run, task=0, kind="train", round=4, reason="not_now"))
    assert heard == [("c", RoundKey(run, 0, "train", 4), "not_now")]
    assert (peer.resting, needless) == ((True, []) if run == RUN else (False, ["c"]))


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_is_asked_in_the_session_in_which_it_has_announced_its_classes(
    announced, monkeypatch
):
    """Else it has no ids of its classes, and declines."""
    asked = []

    async def ask(_context, _progress, peer, **_):
        asked.append(peer)

    monkeypatch.setattr(coordinator, "ask", ask)
    peer = SimpleNamespace(announced=announced)
    desk = SimpleNamespace(
        context=SimpleNamespace(peers=SimpleNamespace(by_client=lambda _: peer)),
        progress=None, late_images=SimpleNamespace(ask=lambda _: None),
        remaining_s=1.0, verdict=lambda _: None,
    )  # fmt: skip
    key = RoundKey(RUN, 0, "train", 0)
    asyncio.run(coordinator.Coordinator._execute(desk, events.Ask("a" * 26), key))
    assert asked == [peer] * announced
