"""Intake of a relay's sums: each update in one gets its own answer, once it is on disk."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from functools import partial

import pytest

from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.numerics.relay_sums import (
    MOST_SUMMED,
    RunningSum,
    SummedUpdate,
    sum_faults,
    sum_schema,
)
from fcil_protocol.envelopes.envelope import seal, wrap_key
from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Ack, Chunk, Nack, Update, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import pack
from fcil_protocol.storage.spool import Spool
from fcil_server.sessions.held_offers import MOST_RELEASED
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Expectation
from server.relay_kit import until
from server.sessions.relay.test_summing import (
    CLIENT,
    FED,
    METHOD,
    RELAY,
    SERVER,
    SITE,
    SMALL,
    Offer,
    upload,
)

ALICE, BOB = ClientId("a" * 26), ClientId("b" * 26)
TASK = TaskInfo(0, (0, 1), ())
HPARAMS = METHOD.hparams(side=SMALL)
(EXCHANGE,) = METHOD.exchanges(HPARAMS, NO_BACKBONE)
DIMS = METHOD.dims(HPARAMS, NO_BACKBONE, TASK)


class Ports:
    """The run, as intake sees it: a set of digests in place of a ledger."""

    def __init__(self):
        self.ledger, self.sent, self.errors = set(), [], []
        self.syncing, self.synced = threading.Event(), threading.Event()
        self.synced.set()
        self.fault = None
        self.relay = SITE

    def expect(self, _client, _core):
        return Expectation(TASK, EXCHANGE.upload, DIMS, EXCHANGE.check)

    def expect_sum(self, _core):
        schema = sum_schema(EXCHANGE.additive)
        dims = {**DIMS, "most_summed": MOST_SUMMED}
        return Expectation(TASK, schema, dims, partial(sum_faults, EXCHANGE))

    def summing_relay(self, _peer, _core):
        return self.relay

    def recorded(self, digest):
        return digest in self.ledger

    def is_here(self, _peer):
        return True

    def opened(self, _accepted):
        pass

    def together(self):
        return contextlib.nullcontext()

    def stored(self, accepted):
        if self.fault is not None:
            raise self.fault
        self.ledger |= {one.digest for one in accepted.summed or (accepted,)}

    def committed(self, accepted):
        pass

    def wait_until_durable(self):
        self.syncing.set()
        assert self.synced.wait(60)

    def send(self, peer, message):
        self.sent.append((peer.name, message))
        return True

    def refused(self, _peer, error):
        self.errors.append(error)

    def failed(self, error):
        raise error

    def said(self, name, kind):
        """Return the digests of the messages of a kind that a peer got."""
        return [m.digest for to, m in self.sent if to == name and isinstance(m, kind)]


class Scene:
    def __init__(self, path):
        self.ports = Ports()
        (path / "incoming").mkdir()
        self.spool = Spool(path / "spool")
        self.intake = Intake(
            federation=FED, keys=SERVER, incoming=path / "incoming", spool=self.spool,
            credit=1 << 20, max_payload_bytes=1 << 30, max_classes=10, ports=self.ports,
        )  # fmt: skip
        self.relay = self.peer("relay", SITE, RELAY, sums=True)

    def peer(self, name, client, keys=CLIENT, *, sums=False):
        channel = Channel(SERVER, keys.public)
        return Peer(client, name, keys.public, b"r", 1, channel, ready=True, sums=sums)

    def offer(self, peer, offer, *, taken=True):
        message = Update(digest=offer.digest)
        blobs = (*offer.blobs[:3], *([b""] if taken else []))
        self.intake.offer(peer, Received(message, b"", b"", blobs), message)

    def send_sum(self, *offers):
        """Send the sum of some offers; return its digest."""
        total = RunningSum(EXCHANGE.additive, DIMS)
        for one in offers:
            samples = int(one.payload.i64("n").sum())
            total.add(one.payload, SummedUpdate(one.digest, samples, one.payload.tensor_bytes))
        own = {"sender": SITE, "sender_key": RELAY.public.fingerprint}
        core = replace(offers[0].sealed.parsed.core, **own)
        sealed, key = seal(pack(total.payload()), core, RELAY)
        digest, wrap = sealed.parsed.update_id, wrap_key(key, sealed.header, SERVER.public)
        count = len(sealed.parsed.hashes)
        message = Update(digest=digest, unasked=count)
        blobs = (sealed.header, sealed.signature, wrap)
        self.intake.offer(self.relay, Received(message, b"", b"", blobs), message)
        for index in range(count):
            chunk = Chunk(digest=digest, index=index)
            received = Received(chunk, b"", b"", (bytes(sealed.chunk(index)),))
            self.intake.chunk(self.relay, received, chunk)
        return digest


def play(path, story):
    async def main():
        scene = Scene(path)
        try:
            async with asyncio.timeout(60):
                await story(scene, scene.ports)
        finally:
            scene.ports.synced.set()
            await scene.intake.drain()
            scene.spool.close()

    asyncio.run(main())


def test_a_taken_update_is_not_requested_and_is_acknowledged_with_its_sum(tmp_path):
    async def story(scene, ports):
        alice, bob = scene.peer("alice", ALICE), scene.peer("bob", BOB)
        offers = Offer(upload(1), sender=ALICE), Offer(upload(2), sender=BOB)
        scene.offer(alice, offers[0])
        scene.offer(bob, offers[1])
        assert ports.sent == []
        digest = scene.send_sum(*offers)
        await until(lambda: ports.said("bob", Ack))
        assert ports.said("relay", Ack) == [digest]
        assert ports.said("alice", Ack) == [offers[0].digest]
        assert ports.ledger == {one.digest for one in offers}
        assert set(scene.spool.keys()) == {digest}

    play(tmp_path, story)


def test_no_update_is_acknowledged_before_the_sum_is_on_disk_and_then_the_newest_peer_is(tmp_path):
    async def story(scene, ports):
        alice = scene.peer("alice", ALICE)
        one = Offer(upload(1), sender=ALICE)
        scene.offer(alice, one)
        ports.synced.clear()
        scene.send_sum(one)
        await until(ports.syncing.is_set)
        scene.offer(scene.peer("alice again", ALICE), one, taken=False)
        assert ports.sent == []
        ports.synced.set()
        await until(lambda: ports.said("relay", Ack))
        await until(lambda: ports.said("alice again", Ack))
        assert ports.said("alice", Ack) == []

    play(tmp_path, story)


def test_a_newer_update_offered_meanwhile_is_not_forgotten(tmp_path):
    async def story(scene, ports):
        alice = scene.peer("alice", ALICE)
        first, second = (Offer(upload(k), sender=ALICE) for k in (1, 2))
        scene.offer(alice, first)
        ports.synced.clear()
        scene.send_sum(first)
        await until(ports.syncing.is_set)
        scene.offer(alice, second)
        ports.synced.set()
        await until(lambda: ports.said("relay", Ack))
        scene.intake.release([second.digest])
        assert ports.said("alice", Want) == [second.digest]

    play(tmp_path, story)


def test_a_released_update_is_requested_even_if_the_release_comes_first(tmp_path):
    async def story(scene, ports):
        alice, bob = scene.peer("alice", ALICE), scene.peer("bob", BOB)
        late, early = Offer(upload(1), sender=ALICE), Offer(upload(2), sender=BOB)
        scene.offer(alice, late)
        scene.intake.release([late.digest, early.digest])
        assert ports.said("alice", Want) == [late.digest]
        scene.offer(bob, early)
        assert ports.said("bob", Want) == [early.digest]
        scene.intake.sweep(())  # the round is over: nothing is remembered of it
        scene.offer(bob, early)
        assert ports.said("bob", Want) == [early.digest]

    play(tmp_path, story)


def test_of_very_many_releases_the_newest_are_remembered(tmp_path):
    async def story(scene, ports):
        bob = scene.peer("bob", BOB)
        early = Offer(upload(2), sender=BOB)
        scene.intake.release(f"{i:064x}" for i in range(MOST_RELEASED))
        scene.intake.release([early.digest])
        scene.offer(bob, early)
        assert ports.said("bob", Want) == [early.digest]

    play(tmp_path, story)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scene, _offers: setattr(scene.ports, "relay", "z" * 26),
        lambda _scene, offers: offers.append(Offer(upload(3), sender="c" * 26)),
    ],
    ids=["taken by another relay", "not offered"],
)
def test_a_sum_of_an_update_that_was_not_offered_through_its_relay_is_refused(tmp_path, spoil):
    async def story(scene, ports):
        offers = [Offer(upload(1), sender=ALICE)]
        spoil(scene, offers)
        scene.offer(scene.peer("alice", ALICE), offers[0])
        digest = scene.send_sum(*offers)
        await until(lambda: ports.said("relay", Nack))
        assert ports.said("relay", Nack) == [digest]
        assert not ports.ledger
        scene.intake.release([offers[0].digest])
        assert ports.said("alice", Want) == [offers[0].digest]

    play(tmp_path, story)


@pytest.mark.parametrize("fault", [FcilError("one is a member no more."), StorageError("full.")])
def test_a_sum_that_the_ledger_refuses_leaves_nothing_and_its_updates_can_be_requested(
    tmp_path, fault
):
    async def story(scene, ports):
        ports.fault = fault
        one = Offer(upload(1), sender=ALICE)
        scene.offer(scene.peer("alice", ALICE), one)
        scene.send_sum(one)
        await until(lambda: ports.said("relay", Nack))
        assert not set(scene.spool.keys())
        scene.offer(scene.peer("alice again", ALICE), one)
        scene.intake.release([one.digest])
        assert ports.said("alice again", Want) == [one.digest]

    play(tmp_path, story)


def test_a_refused_message_about_no_update_costs_its_client_no_offer(tmp_path):
    async def story(scene, ports):
        alice = scene.peer("alice", ALICE)
        one = Offer(upload(1), sender=ALICE)
        scene.offer(alice, one)
        scene.intake.forget(alice, "")
        scene.send_sum(one)
        await until(lambda: ports.said("alice", Ack))

    play(tmp_path, story)


def test_a_list_of_classes_in_between_costs_its_client_no_offer(tmp_path):
    """A folder that is being filled is announced again, also while a round is open."""

    async def story(scene, ports):
        alice = scene.peer("alice", ALICE)
        one = Offer(upload(1), sender=ALICE)
        scene.offer(alice, one)
        classes = Offer(upload(2), sender=ALICE, kind=INVENTORY, task=-1)
        scene.offer(alice, classes, taken=False)
        scene.send_sum(one)
        await until(lambda: one.digest in ports.said("alice", Ack))

    play(tmp_path, story)


def test_a_sum_that_is_arriving_at_the_end_of_a_round_stays_if_its_relay_is_there(tmp_path):
    async def story(scene, _ports):
        one = Offer(upload(1), sender=ALICE)
        scene.offer(scene.peer("alice", ALICE), one)
        own = {"sender": SITE, "sender_key": RELAY.public.fingerprint}
        core = replace(one.sealed.parsed.core, **own)
        sealed, key = seal(pack(one.payload), core, RELAY)
        blobs = (sealed.header, sealed.signature, wrap_key(key, sealed.header, SERVER.public))
        message = Update(digest=sealed.parsed.update_id)
        scene.intake.offer(scene.relay, Received(message, b"", b"", blobs), message)
        scene.intake.sweep([scene.relay])
        assert [a.header.update_id for a in scene.intake.arriving.of(SITE)] == [message.digest]

    play(tmp_path, story)


def test_a_taken_update_takes_the_place_of_one_that_its_client_has_given_up(tmp_path):
    async def story(scene, ports):
        alice = scene.peer("alice", ALICE)
        given_up, taken = (Offer(upload(k), sender=ALICE) for k in (1, 2))
        scene.offer(alice, given_up, taken=False)
        assert list(alice.receiver.under_way) == [given_up.digest]
        scene.offer(alice, taken)
        assert not alice.receiver.under_way

    play(tmp_path, story)
