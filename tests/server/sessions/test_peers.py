"""Live sessions: one for each client, the newest; found by connection and by client."""

from __future__ import annotations

from fcil_protocol.ids import ClientId
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.sessions.peers import FIRST_LANE, Peer, Peers

KEYS = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
ALICE, BOB, CAROL = (ClientId(c * 26) for c in "abc")


def peer(client: ClientId, conn: int, **changes: object) -> Peer:
    made = Peer(
        client=client,
        name=client[:1],
        keys=KEYS.public,
        route=b"r%d" % conn,
        conn=conn,
        channel=Channel(KEYS, KEYS.public),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def ready(
    client: ClientId,
    conn: int,
    train: dict[str, int] | None = None,
    test: dict[str, int] | None = None,
) -> Peer:
    return peer(client, conn, ready=True, train=train or {}, test=test or {})


class TestPeers:
    def test_a_session_is_found_by_connection_and_by_client(self) -> None:
        peers = Peers()
        alice = peer(ALICE, 1)
        assert peers.add(alice) is None
        assert peers.by_conn(1) is alice
        assert peers.by_client(ALICE) is alice
        assert (peers.by_conn(2), peers.by_client(BOB), len(peers)) == (None, None, 1)

    def test_a_newer_connection_takes_over_and_the_older_is_returned(self) -> None:
        peers = Peers()
        old, new = peer(ALICE, 1), peer(ALICE, 2)
        peers.add(old)
        assert peers.add(new) is old
        assert peers.by_client(ALICE) is new
        assert peers.by_conn(1) is None, "what the older one still sends is nobody's"
        assert len(peers) == 1

    def test_what_an_older_connection_says_after_a_newer_one_comes_too_late(self) -> None:
        peers = Peers()
        assert not peers.is_left_behind(peer(ALICE, 5))
        peers.add(peer(ALICE, 5))
        assert peers.is_left_behind(peer(ALICE, 4))
        assert not peers.is_left_behind(peer(ALICE, 5)), "it says hello once more"
        assert not peers.is_left_behind(peer(ALICE, 6))
        assert not peers.is_left_behind(peer(BOB, 4))

    def test_lanes_and_connections_have_numbers_that_are_not_compared(self) -> None:
        peers = Peers()
        peers.add(peer(ALICE, FIRST_LANE + 7))
        assert not peers.is_left_behind(peer(ALICE, 8))
        assert peers.is_left_behind(peer(ALICE, FIRST_LANE + 6))

    def test_a_new_hello_on_the_same_connection_replaces_the_session_quietly(self) -> None:
        peers = Peers()
        old, new = peer(ALICE, 1), peer(ALICE, 1)
        peers.add(old)
        assert peers.add(new) is None
        assert peers.by_conn(1) is new
        assert peers.remove(1) is new
        assert len(peers) == 0

    def test_the_end_of_the_older_connection_does_not_end_the_newer(self) -> None:
        peers = Peers()
        peers.add(peer(ALICE, 1))
        peers.add(new := peer(ALICE, 2))
        assert peers.remove(1) is None
        assert peers.by_client(ALICE) is new
        assert peers.by_conn(2) is new

    def test_the_end_of_a_connection_that_nobody_had_is_nothing(self) -> None:
        peers = Peers()
        peers.add(peer(ALICE, 1))
        assert peers.remove(9) is None
        assert len(peers) == 1
        peers.remove(1)
        assert peers.remove(1) is None

    def test_they_come_in_the_order_of_their_ids(self) -> None:
        """So that nothing depends on who connected first."""
        peers = Peers()
        for client, conn in ((CAROL, 1), (ALICE, 2), (BOB, 3)):
            peers.add(ready(client, conn))
        assert [p.client for p in peers] == [ALICE, BOB, CAROL]
        assert [p.client for p in peers.announced()] == [ALICE, BOB, CAROL]

    def test_only_those_who_are_ready_and_have_announced_may_be_asked(self) -> None:
        peers = Peers()
        peers.add(peer(ALICE, 1, ready=True))
        peers.add(peer(BOB, 2, train={"cat": 1}, test={}))
        peers.add(ready(CAROL, 3))
        assert [p.client for p in peers.announced()] == [CAROL]


class TestHolding:
    def test_a_client_holds_what_it_has_an_image_of_on_that_side(self) -> None:
        alice = ready(ALICE, 1, train={"cat": 3, "dog": 0}, test={"dog": 1})
        assert alice.holds(frozenset({"cat", "bird"}), "train")
        assert not alice.holds(frozenset({"cat"}), "test")
        assert alice.holds(frozenset({"dog"}), "test")

    def test_a_class_without_images_is_not_held(self) -> None:
        alice = ready(ALICE, 1, train={"dog": 0})
        assert not alice.holds(frozenset({"dog"}), "train")

    def test_before_it_has_announced_it_holds_nothing(self) -> None:
        alice = peer(ALICE, 1, ready=True)
        assert not alice.holds(frozenset({"cat"}), "train")
        assert not alice.holds(frozenset({"cat"}), "test")
        assert not alice.announced

    def test_no_class_wanted_is_no_class_held(self) -> None:
        assert not ready(ALICE, 1, train={"cat": 1}).holds(frozenset(), "train")

    def test_keys_and_envelopes_do_not_show(self) -> None:
        text = repr(peer(ALICE, 1))
        assert "keys" not in text
        assert "channel" not in text
        assert "receiving" not in text
