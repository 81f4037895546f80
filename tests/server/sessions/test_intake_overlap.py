"""Receiving, opening and making durable overlap, within bounds; and save, then speak."""

import asyncio
import contextlib
import errno
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from fcil_adapters.contract import TaskInfo
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import (
    AlreadyHave,
    CommitUnknown,
    DiskFull,
    InternalError,
    SchemaMismatch,
)
from fcil_protocol.ids import FederationId
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Ack, Chunk, Nack, Update, Want
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.sessions import intake, offers
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Expectation

SERVER, CLIENT = PrivateKeys.generate(), PrivateKeys.generate()
FED = FederationId("0" * 32)
TASK = TaskInfo(0, (0, 1), ())
SCHEMA = PayloadSchema(
    (
        TensorSpec("w", Kind.LORA, (4,), max_abs=1),
        TensorSpec("n", Kind.COUNT, (1,), dtype="I64", non_negative=True),
    )
)
KEYS = {}  # content keys, by digest


def update(client, size=4):
    core = Core(
        protocol=PROTOCOL_VERSION, federation=FED, run="r20260102-030405-0a0b",
        direction="update", sender=client, sender_key=CLIENT.public.fingerprint,
        recipient="server", method="m", schema="", task=0, round=0, kind="train", base=0,
    )  # fmt: skip
    plain = pack(Payload({"w": np.zeros(size, np.float32), "n": np.array([5], np.int64)}))
    sealed, key = seal(plain, core, CLIENT)
    KEYS[sealed.parsed.update_id] = key
    return sealed


class Scene:
    """An intake whose neighbours write down what they are told, in order."""

    def __init__(self, tmp_path):
        (tmp_path / "incoming").mkdir()
        self.log, self.failed, self.recorded, self.wanted, self.gone = [], [], set(), [], []
        self.opening, self.go_on = threading.Semaphore(0), threading.Event()
        self.go_on.set()
        self.most_opened = self.opened = 0
        self.spool = Spool(tmp_path / "spool")
        sync, self.sync_fault = self.spool.sync, None

        def sync_spool():
            self.log.append("spool")
            sync()

        self.spool.sync = sync_spool
        self.committed = []
        self.ports = SimpleNamespace(
            expect=lambda *_: Expectation(TASK, SCHEMA, {}, self._check),
            recorded=lambda digest: digest in self.recorded,
            opened=lambda _: None,
            together=contextlib.nullcontext,
            committed=lambda accepted: self.committed.append(accepted.client[0]),
            stored=lambda accepted: self.log.append(f"stored {accepted.client[0]}"),
            wait_until_durable=self._lasting,
            send=self._send,
            is_here=lambda peer: peer not in self.gone,
            refused=lambda peer, error: self.log.append(f"refused {type(error).__name__}"),
            failed=self.failed.append,
        )
        self.intake = Intake(
            federation=FED, keys=SERVER, incoming=tmp_path / "incoming", spool=self.spool,
            credit=1 << 20, max_payload_bytes=1 << 20, max_classes=10,
            ports=self.ports,
        )  # fmt: skip

    def _check(self, _payload, _task):
        self.opened += 1
        self.most_opened = max(self.most_opened, self.opened)
        self.opening.release()
        assert self.go_on.wait(30)
        self.opened -= 1
        return []

    def _lasting(self):
        self.log.append("ledger")
        if self.sync_fault:
            raise self.sync_fault

    def _send(self, peer, message):
        if isinstance(message, Want):
            self.wanted.append(peer.client[0])
        if isinstance(message, Ack | Nack):
            self.log.append(f"{message.type} {peer.client[0]}")
        return True

    def hold_sync(self):
        """Hold each sync of the spool; return what it releases as it begins, and what lets it go."""
        sync, syncing, go_on = self.spool.sync, threading.Semaphore(0), threading.Event()

        def held():
            syncing.release()
            assert go_on.wait(30)
            sync()

        self.spool.sync = held
        return syncing, go_on

    def offer(self, client, sealed, peer=None):
        """Send the header of a client's update; return the session."""
        channel = Channel(SERVER, CLIENT.public)
        peer = peer or Peer(client, "c", CLIENT.public, b"r", ord(client[0]), channel)
        digest = sealed.parsed.update_id
        wrap = wrap_key(KEYS[digest], sealed.header, SERVER.public)
        blobs = (bytes(sealed.header), bytes(sealed.signature), wrap)
        offer = Update(digest=digest, unasked=0)
        self.intake.offer(peer, Received(offer, b"", b"", blobs), offer)
        return peer

    async def send(self, client, sealed=None):
        """Send a whole update of a client."""
        sealed = sealed or update(client)
        peer, digest = self.offer(client, sealed), sealed.parsed.update_id
        for index in range(len(sealed.parsed.hashes)):
            message = Chunk(digest=digest, index=index)
            received = Received(message, b"", b"", (bytes(sealed.chunk(index)),))
            self.intake.chunk(peer, received, message)


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    yield made
    made.go_on.set()
    made.spool.close()


@pytest.fixture
def two_at_a_time(monkeypatch):
    """Let two updates arrive at the same time; before the scene, which has its line from then on."""
    monkeypatch.setattr(offers, "MOST_ARRIVING", 2)


def play(story):
    asyncio.run(asyncio.wait_for(story(), 60))


async def begun(scene):
    """Wait until one more update is being opened."""
    assert await asyncio.to_thread(scene.opening.acquire, timeout=30)


def test_an_ack_leaves_after_the_spool_and_then_the_ledger_are_on_the_disk(scene):
    async def story():
        await scene.send("a" * 26)
        await scene.intake.drain()
        assert scene.log == ["spool", "stored a", "ledger", "ack a"]

    play(story)


def test_other_clients_are_heard_while_an_update_is_opened_one_at_a_time(scene):
    async def story():
        scene.go_on.clear()
        await scene.send("a" * 26)
        await begun(scene)
        await scene.send("b" * 26)
        await scene.send("c" * 26)
        assert scene.log == [], "the first one is still being opened"
        scene.go_on.set()
        await scene.intake.drain()
        assert {line for line in scene.log if line.startswith("ack")} == {"ack a", "ack b", "ack c"}
        assert scene.most_opened == 1

    play(story)


def test_a_client_whose_envelopes_wait_to_be_opened_is_busy_and_no_other(scene):
    async def story():
        room = []
        scene.intake.room = room.append
        scene.go_on.clear()
        await scene.send("a" * 26)
        await begun(scene)
        assert not scene.intake.is_busy("a" * 26)
        for _ in range(intake.MAX_OPENING - 1):
            await scene.send("a" * 26)
        assert scene.intake.is_busy("a" * 26)
        for client in "bcdefghijklmnopqrstuvwxyz":  # however many there are
            assert not scene.intake.is_busy(client * 26)
            await scene.send(client * 26)
        scene.go_on.set()
        await scene.intake.drain()
        assert not scene.intake.is_busy("a" * 26)
        assert room.count("a" * 26) == intake.MAX_OPENING

    play(story)


def test_a_round_that_closes_waits_for_what_is_complete_and_not_for_what_comes_later(scene):
    later = threading.Event()

    def held(*_):
        assert later.wait(30)
        return []

    async def story():
        scene.go_on.clear()
        await scene.send("a" * 26)
        await begun(scene)
        drained = asyncio.create_task(scene.intake.drain())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not drained.done()
        scene._check = held
        await scene.send("b" * 26)
        scene.go_on.set()
        await drained
        assert scene.log == ["spool", "stored a", "ledger", "ack a"]
        later.set()
        await scene.intake.drain()
        assert scene.log[-1] == "ack b"

    play(story)


def test_those_that_come_while_a_batch_becomes_durable_are_the_next_batch(scene):
    async def story():
        syncing, go_on = scene.hold_sync()
        await scene.send("a" * 26)
        assert await asyncio.to_thread(syncing.acquire, timeout=30)
        for client in "bcd":
            await scene.send(client * 26)
        for _ in range(3):
            await begun(scene)
        for one in list(scene.intake._waiting):
            await one.over.wait()
        go_on.set()
        await scene.intake.drain()
        batches = (
            "spool",
            "stored a",
            "ledger",
            "ack a",
            "spool",
            "stored b",
            "stored c",
            "stored d",
        )
        assert scene.log == [*batches, "ledger", "ack b", "ack c", "ack d"]

    play(story)


def test_what_does_not_fit_is_refused_and_the_others_go_on(scene):
    async def story():
        await scene.send("a" * 26, update("a" * 26, size=5))
        await scene.send("b" * 26)
        await scene.intake.drain()
        assert scene.log[:2] == [f"refused {SchemaMismatch.__name__}", "nack a"]
        assert scene.log[-1] == "ack b"
        assert len(scene.spool.keys()) == 1

    play(story)


def test_small_updates_that_wait_share_a_visit_to_the_thread_and_a_large_one_does_not(
    scene, monkeypatch
):
    visits = []
    attempt = intake._attempt_all

    def count(works):
        visits.append(len(works))
        return attempt(works)

    monkeypatch.setattr(intake, "_attempt_all", count)
    large = update("e" * 26)
    monkeypatch.setattr(intake, "OPENED_BYTES", 3 * large.parsed.sealed_bytes)

    async def story():
        scene.go_on.clear()
        await scene.send("a" * 26)
        await begun(scene)
        for client in "bcdef":
            await scene.send(client * 26)
        scene.go_on.set()
        await scene.intake.drain()
        assert visits == [1, 3, 2]
        assert {line for line in scene.log if line.startswith("ack")} == {
            f"ack {client}" for client in "abcdef"
        }

    play(story)


def test_updates_are_opened_though_no_thread_could_be_started_for_some(scene, monkeypatch):
    visits = []

    def fail_once(works):
        visits.append(len(works))
        if len(visits) == 1:
            raise RuntimeError("can't start new thread")
        return attempt(works)

    attempt = intake._attempt_all
    monkeypatch.setattr(intake, "_attempt_all", fail_once)

    async def story():
        await scene.send("a" * 26)
        await scene.intake.drain()
        assert scene.log == [f"refused {InternalError.__name__}", "nack a"]
        await scene.send("b" * 26)
        await scene.intake.drain()
        assert scene.log[-1] == "ack b"

    play(story)


def test_of_a_transaction_that_fails_nobody_gets_an_ack_and_nothing_stays_in_the_spool(scene):
    @contextlib.contextmanager
    def fails():
        yield
        raise DiskFull("the disk is full.")

    scene.ports.together = fails

    async def story():
        scene.go_on.clear()
        for client in "abc":
            await scene.send(client * 26)
        scene.go_on.set()
        await scene.intake.drain()
        answers = [line for line in scene.log if line.startswith(("ack", "nack"))]
        assert sorted(answers) == ["nack a", "nack b", "nack c"]
        assert scene.committed == []
        assert scene.spool.keys() == []
        scene.ports.together = contextlib.nullcontext
        await scene.send("d" * 26)
        await scene.intake.drain()
        assert (scene.log[-1], scene.committed) == ("ack d", ["d"])

    play(story)


@pytest.mark.parametrize("durable", [True, False])
def test_a_record_that_was_never_committed_gives_way_to_the_same_update(scene, durable):
    """As after a kill, or a defect, between the spool and the ledger."""

    async def story():
        sealed = update("a" * 26)
        scene.spool.append(sealed.parsed.update_id, b"of before")
        if durable:
            scene.spool.sync()
        await scene.send("a" * 26, sealed)
        await scene.intake.drain()
        assert (scene.log[-1], scene.committed) == ("ack a", ["a"])
        assert scene.spool.get(sealed.parsed.update_id) != b"of before"

    play(story)


def test_of_a_commit_that_may_hold_no_client_gets_an_answer_and_all_stays_in_the_spool(scene):
    """The server ends with it: the next start finds the records that the ledger may name."""
    lost = CommitUnknown("the connection was lost.")

    @contextlib.contextmanager
    def fails():
        yield
        raise lost

    scene.ports.together = fails

    async def story():
        scene.go_on.clear()
        sent = [await scene.send(client * 26) for client in "abc"]
        scene.go_on.set()
        await scene.intake.drain()
        assert not [line for line in scene.log if line.startswith(("ack", "nack", "refused"))]
        assert (scene.failed, scene.committed) == ([lost], [])
        assert len(scene.spool.keys()) == len(sent)

    play(story)


def test_a_refused_update_is_not_kept_in_memory(scene):
    payloads = []

    def refuse(payload, _task):
        payloads.append(weakref.ref(payload))
        return ["it does not fit"]

    scene.ports.expect = lambda *_: Expectation(TASK, SCHEMA, {}, refuse)

    async def story():
        for client in "ab":
            await scene.send(client * 26)
        await scene.intake.drain()
        assert scene.log.count(f"refused {SchemaMismatch.__name__}") == 2
        assert [payload() for payload in payloads] == [None, None]

    gc.disable()
    try:
        play(story)
    finally:
        gc.enable()


def test_all_that_is_committed_is_told_before_others_are_refused(scene):
    """Whatever happens to a client while one is refused, a revocation for instance, comes later."""
    stored = scene.ports.stored

    def refuse_a(accepted):
        if accepted.client[0] == "a":
            raise AlreadyHave("one came first.")
        stored(accepted)

    def refused(_peer, _error):
        told.append(list(scene.committed))

    told = []
    scene.ports.stored, scene.ports.refused = refuse_a, refused
    syncing, go_on = scene.hold_sync()

    async def story():
        await scene.send("z" * 26)
        assert await asyncio.to_thread(syncing.acquire, timeout=30)
        for client in "abc":  # one transaction, once the first is on the disk
            await scene.send(client * 26)
        for one in list(scene.intake._waiting):
            await one.over.wait()
        go_on.set()
        await scene.intake.drain()
        assert told == [["z", "b", "c"]]

    play(story)


@pytest.mark.parametrize("fault", [AlreadyHave("one came first."), RuntimeError("a defect")])
def test_one_that_the_ledger_does_not_take_is_refused_alone(scene, fault):
    stored = scene.ports.stored

    def refuse_b(accepted):
        if accepted.client[0] == "b":
            raise fault
        stored(accepted)

    scene.ports.stored = refuse_b

    async def story():
        scene.go_on.clear()
        for client in "abc":
            await scene.send(client * 26)
        scene.go_on.set()
        await scene.intake.drain()
        answers = [line for line in scene.log if line.startswith(("ack", "nack"))]
        assert sorted(answers) == ["ack a", "ack c", "nack b"]
        assert (scene.committed, len(scene.spool.keys())) == (["a", "c"], 2)
        assert scene.failed == []

    play(story)


def test_an_update_that_the_failed_sync_of_others_dropped_gets_no_ack(scene, monkeypatch):
    """It was in the spool before that sync began, and in no batch: its own sync finds nothing."""
    syncs, two = [], threading.Event()
    append, sync_now = scene.spool.append, scene.spool.sync

    def counted(key, *body):
        append(key, *body)
        if len(scene.spool._index) == 2:
            two.set()

    def sync():
        if not syncs:
            assert two.wait(30)
        sync_now()

    def fail_once(fd):
        syncs.append(fd)
        if len(syncs) == 1:
            raise OSError(errno.EIO, "planted")

    monkeypatch.setattr("fcil_protocol.storage.spool.sync_data", fail_once)
    scene.spool.append, scene.spool.sync = counted, sync

    async def story():
        await scene.send("a" * 26)
        await scene.send("b" * 26)
        await scene.intake.drain()
        assert [line for line in scene.log if line.startswith(("ack", "stored"))] == []
        assert sorted(line for line in scene.log if line.startswith("nack")) == ["nack a", "nack b"]
        assert scene.failed == []

    play(story)


def test_a_ledger_that_cannot_be_synced_ends_the_server_and_nobody_gets_an_ack(scene):
    async def story():
        scene.sync_fault = DiskFull("the disk is full.")
        await scene.send("a" * 26)
        await scene.intake.drain()
        assert scene.failed == [scene.sync_fault]
        assert scene.log == ["spool", "stored a", "ledger"]

    play(story)


def test_a_batch_that_meets_a_defect_ends_the_server_and_does_not_fall_silent(scene):
    async def story():
        scene.sync_fault = RuntimeError("can't start new thread")
        await scene.send("a" * 26)
        await scene.intake.drain()
        (error,) = scene.failed
        assert isinstance(error, InternalError)
        assert "can't start new thread" in error.message
        assert not [word for word in scene.log if word.startswith("ack")]

    play(story)


def test_an_unfinished_update_is_forgotten_as_its_client_offers_another(scene):
    """The client has dropped it, and would answer no request for its chunks."""

    async def story():
        first, second = update("a" * 26), update("a" * 26)
        peer = scene.offer("a" * 26, first)
        assert list(peer.receiver.under_way) == [first.parsed.update_id]
        scene.offer("a" * 26, second, peer)
        assert list(peer.receiver.under_way) == [second.parsed.update_id]
        kept = scene.intake.arriving.of("a" * 26)
        assert [a.header.update_id for a in kept] == [second.parsed.update_id]

    play(story)


def test_a_client_that_offers_more_does_not_lose_what_is_about_to_be_opened(scene, monkeypatch):
    monkeypatch.setattr(intake, "MAX_UPLOADS", 1)
    scene.intake.arriving._per_client = 1

    async def story():
        scene.go_on.clear()
        await scene.send("b" * 26)
        await begun(scene)
        await scene.send("a" * 26)
        await scene.send("a" * 26)
        scene.go_on.set()
        await scene.intake.drain()
        assert scene.log.count("ack a") == 2
        assert not any("refused" in line for line in scene.log)

    play(story)


@pytest.mark.parametrize("in_spool", [True, False])
def test_an_update_that_is_offered_again_since_its_ack_was_lost_gets_another(scene, in_spool):
    """Also when its round is over meanwhile and the spool holds it no more."""

    async def story():
        sealed = update("a" * 26)
        await scene.send("a" * 26, sealed)
        await scene.intake.drain()
        scene.recorded.add(sealed.parsed.update_id)
        if not in_spool:
            scene.spool.remove([sealed.parsed.update_id])
        scene.log.clear()
        await scene.send("a" * 26, sealed)
        await scene.intake.drain()
        assert scene.log == ["ack a"]

    play(story)


def test_an_update_that_a_kill_kept_from_the_ledger_is_taken_anew(scene):
    async def story():
        sealed = update("a" * 26)
        scene.spool.append(sealed.parsed.update_id, b"written before the kill")
        scene.spool.sync()
        scene.log.clear()
        await scene.send("a" * 26, sealed)
        await scene.intake.drain()
        assert scene.log == ["spool", "stored a", "ledger", "ack a"]
        assert scene.spool.keys() == [sealed.parsed.update_id]
        assert StoredEnvelope.from_bytes(scene.spool.get(sealed.parsed.update_id))

    play(story)


async def chunk(scene, peer, sealed):
    """Send the only chunk of an update, and wait until it is acknowledged or refused."""
    message = Chunk(digest=sealed.parsed.update_id, index=0)
    scene.intake.chunk(peer, Received(message, b"", b"", (bytes(sealed.chunk(0)),)), message)
    await scene.intake.drain()


def test_more_updates_than_may_arrive_wait_in_line_without_room_set_aside(two_at_a_time, scene):
    async def story():
        sealed = {c: update(c * 26) for c in "abcd"}
        peers = {c: scene.offer(c * 26, sealed[c]) for c in "abcd"}
        assert scene.wanted == ["a", "b"]
        assert [scene.intake.arriving.of(c * 26) for c in "cd"] == [[], []]
        await chunk(scene, peers["b"], sealed["b"])
        assert scene.wanted == ["a", "b", "c"]
        again = scene.offer("d" * 26, sealed["d"])  # over a new connection
        await chunk(scene, peers["a"], sealed["a"])
        await chunk(scene, again, sealed["d"])
        await chunk(scene, peers["c"], sealed["c"])
        assert scene.wanted == ["a", "b", "c", "d"]
        assert [line for line in scene.log if "ack" in line] == ["ack b", "ack a", "ack d", "ack c"]

    play(story)


def test_the_line_moves_on_when_connections_end_or_send_nothing(two_at_a_time, scene):
    async def story():
        now = 0.0
        scene.intake._clock = lambda: now
        peers = [scene.offer(c * 26, update(c * 26)) for c in "abcd"]
        del peers[0]  # its connection ends
        gc.collect()
        scene.intake.revive(peers)
        assert scene.wanted == ["a", "b", "c"]
        now = offers.IDLE_S
        scene.intake.revive(peers)
        assert scene.wanted == ["a", "b", "c", "d"]

    play(story)


def test_who_has_left_is_not_called_and_who_comes_later_overtakes_nobody(two_at_a_time, scene):
    async def story():
        sealed = {c: update(c * 26) for c in "abcdef"}
        peers = {c: scene.offer(c * 26, sealed[c]) for c in "abcd"}
        scene.gone = [peers["c"]]
        scene.intake.forget(peers["a"], sealed["a"].parsed.update_id)
        peers["e"] = scene.offer("e" * 26, sealed["e"])
        assert scene.wanted == ["a", "b", "d"]
        await chunk(scene, peers["b"], sealed["b"])
        assert scene.wanted == ["a", "b", "d", "e"]

    play(story)


def test_a_client_does_not_wait_behind_an_update_that_it_has_given_up(two_at_a_time, scene):
    async def story():
        peers = {c: scene.offer(c * 26, update(c * 26)) for c in "abc"}
        scene.offer("a" * 26, update("a" * 26), peers["a"])
        assert scene.wanted == ["a", "b", "a"]

    play(story)


def test_an_offer_in_line_that_is_refused_is_not_called(two_at_a_time, scene):
    async def story():
        sealed = {c: update(c * 26) for c in "abc"}
        peers = {c: scene.offer(c * 26, sealed[c]) for c in "abc"}
        scene.intake.forget(peers["c"], sealed["c"].parsed.update_id)
        await chunk(scene, peers["a"], sealed["a"])
        assert scene.wanted == ["a", "b"]

    play(story)


def test_an_update_that_has_no_room_when_its_turn_comes_is_refused_and_the_next_called(
    two_at_a_time, scene
):
    async def story():
        first = update("a" * 26)
        peer = scene.offer("a" * 26, first)
        others = [scene.offer(c * 26, update(c * 26)) for c in "bcd"]
        take = scene.intake.arriving.take

        def full(client, header):
            if client[0] == "c":
                raise DiskFull("planted: the disk is full.")
            return take(client, header)

        scene.intake.arriving.take = full
        await chunk(scene, peer, first)
        assert scene.wanted == ["a", "b", "d"]
        assert scene.log.count("nack c") == scene.log.count("refused DiskFull") == 1
        assert len(others) == 3

    play(story)


def test_what_waits_in_line_goes_with_its_round(two_at_a_time, scene):
    async def story():
        first = update("a" * 26)
        peers = [scene.offer("a" * 26, first)]
        peers += [scene.offer(c * 26, update(c * 26)) for c in "bc"]
        scene.intake.sweep(peers)
        await chunk(scene, peers[0], first)
        assert scene.wanted == ["a", "b"]

    play(story)
