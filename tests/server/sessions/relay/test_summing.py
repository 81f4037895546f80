"""A relay adds up what its clients send: each update once, and what it cannot add it gives back.

Server and clients are lists of messages; keys, seals, payloads and the event loop are real.
"""

import asyncio
import json
import threading
from collections import Counter
from itertools import product

import numpy as np
import pytest

from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.numerics.relay_sums import updates_of
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import (
    Core,
    open_body,
    parse_header,
    seal,
    unwrap_key,
    verify_header,
    wrap_key,
)
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S
from fcil_protocol.errors import DiskFull
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import (
    Ack,
    Chunk,
    Decline,
    Nack,
    PrivacyTerms,
    RelayKeys,
    Release,
    RoundClosed,
    RoundOpen,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.payloads.builtin import TRAIN_LOSS
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.testing import flip_bit
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.sessions.relay import summing as summing_module
from fcil_server.sessions.relay.summing import Summing
from server.relay_kit import CREDIT, RUN, until

SERVER, RELAY, CLIENT = (PrivateKeys.generate() for _ in range(3))
FED = FederationId("0" * 32)
SITE = ClientId("s" * 26)
CLASSES = (0, 1)
SMALL, LARGE = 8, 64  # sides of thumbnails: payloads of 0.5 kB, and of 32 kB for each class
MANY = tuple(range(80))  # classes, with which a large update exceeds 1 MiB
NEVER_S = 1e9
PRIVACY = PrivacyTerms(relay_sums=True)
METHOD = registry.load_method("running_mean")
SENDERS = map("".join, product("abcdefghijklmnopqrstuvwxyz", repeat=26))  # one for each update
BITS = 28  # of a mean in fixed point


def relay_keys(keys=RELAY):
    return RelayKeys(name="site", **keys.public.to_fields())


def schema_of(side=SMALL):
    return registry.schema_digest(METHOD, METHOD.hparams(side=side), NO_BACKBONE, PRIVACY)


def welcome(side=SMALL, **changes):
    hparams = METHOD.hparams(side=side)
    fields = {
        "protocol": PROTOCOL_VERSION, "server_nonce": bytes(16), "certificate": b"", "run": RUN,
        "method": METHOD.name, "method_version": METHOD.version,
        "hparams": hparams.model_dump_json(), "schema_digest": schema_of(side),
        "backbone": json.dumps(backbone_fields(NO_BACKBONE)), "needs_backbone": False,
        "ready": True, "max_payload_bytes": 1 << 30, "credit": CREDIT, "privacy": PRIVACY,
        "summing_relay": relay_keys(),
    }  # fmt: skip
    return Welcome(**{**fields, **changes})


def opening(number=0, base=0, classes=CLASSES):
    return RoundOpen(
        run=RUN, task=0, kind="train", round=number, rounds=9, base=base, classes=list(classes),
        past=[], seed=[1], remaining_s=NEVER_S, parts=[],
    )  # fmt: skip


def closing(number=0):
    return RoundClosed(run=RUN, task=0, kind="train", round=number, outcome="done")


def upload(k, side=SMALL, classes=CLASSES):
    """Return a client's upload: of k + 1, k + 2, ... images, with means that halves can hold."""
    rng = np.random.default_rng(k)
    mean = (rng.integers(-512, 513, (len(classes), side * side)) / 512).astype(np.float32)
    count = np.arange(len(classes), dtype=np.int64) + k + 1
    return Payload({"mean": mean, "count": count, "n": count.sum(keepdims=True)})


class Offer:
    """A sealed update of a client, as it offers it; what is given in place of a part is false."""

    def __init__(self, payload, *, wrap=None, chunk_bytes=16 << 10, **core):
        self.payload = payload
        fields = {
            "protocol": PROTOCOL_VERSION, "federation": FED, "run": RUN, "direction": "update",
            "sender": next(SENDERS), "sender_key": CLIENT.public.fingerprint, "recipient": "server",
            "method": METHOD.name, "schema": schema_of(), "task": 0, "round": 0, "kind": "train",
            "base": 0,
        }  # fmt: skip
        plain = payload if isinstance(payload, bytes) else pack(payload)
        core = Core(**{**fields, **core})
        self.sealed, key = seal(plain, core, CLIENT, chunk_bytes=chunk_bytes)
        self.wrap = wrap_key(key, self.sealed.header, RELAY.public) if wrap is None else wrap
        for_server = wrap_key(key, self.sealed.header, SERVER.public)
        self.blobs = (self.sealed.header, self.sealed.signature, for_server)
        self.digest = self.sealed.parsed.update_id
        self.chunks = range(len(self.sealed.parsed.hashes))


class Site:
    """A relay's `Summing` between lists: what the server and its clients get."""

    def __init__(self, folder, wait_s=NEVER_S):
        self.incoming = folder / "incoming"
        self.pushed, self.pulled, self.notes, self.counts = [], [], [], Counter()
        self.keys = {}  # of lanes: a client has one, however often it connects
        self.summing = Summing(
            RELAY, SITE, FED, SERVER.public, credit=CREDIT, incoming=self.incoming,
            push=lambda message, *blobs: self.pushed.append((message, blobs)),
            pull=lambda number, message: self.pulled.append((number, message)),
            notify=lambda *note: self.notes.append(note), counts=self.counts, wait_s=wait_s,
            key_of=lambda number: self.keys.get(number, b"key of lane %d" % number),
        )  # fmt: skip

    def say(self, message, *numbers):
        """Let the server say something to the clients of some lanes."""
        for number in numbers:
            self.summing.on_server_message(number, message)

    def begin(self, *numbers, side=SMALL, classes=CLASSES, **changes):
        """Let clients begin sessions, and a round."""
        self.say(welcome(side, **changes), *numbers)
        self.say(opening(classes=classes), *numbers)

    def offer(self, number, offer, *, unasked=0, fourth=True):
        """Return the blobs of an offer that pass to the server."""
        self.keys.setdefault(number, offer.sealed.parsed.core.sender.encode())
        message = Update(digest=offer.digest, unasked=unasked)
        blobs = (*offer.blobs, offer.wrap) if fourth else offer.blobs
        frames = (b"body", b"signature", *blobs)
        passing = self.summing.on_client_message(
            number, Received(message, b"body", b"signature", blobs), frames
        )
        assert passing[:2] == frames[:2]
        assert passing[2:5] == offer.blobs
        return passing[2:]

    def takes(self, number, offer, **options):
        """Offer an update; return True if it is marked as taken, or it passes unmarked."""
        fourth = self.offer(number, offer, **options)[3:]
        assert fourth in ((), (b"",))
        return bool(fourth)

    def chunk(self, number, offer, index, data=None):
        """Send a chunk; return True if it passes to the server."""
        message = Chunk(digest=offer.digest, index=index)
        blob = bytes(offer.sealed.chunk(index)) if data is None else data
        frames = (b"body", b"", blob)
        passing = self.summing.on_client_message(
            number, Received(message, b"", b"", (blob,)), frames
        )
        assert passing in (None, frames)
        return passing is not None

    def send(self, number, offer, chunks=None):
        for index in offer.chunks if chunks is None else chunks:
            assert not self.chunk(number, offer, index)

    def deliver(self, number, offer):
        """Offer an update that is taken, and send all of it."""
        assert self.takes(number, offer)
        self.send(number, offer)

    async def idle(self):
        """Wait until no thread works, and nothing waits for one."""
        own = self.summing
        await until(lambda: own._sending is None and (own._opener is None or own._opener.done()))

    @property
    def added(self):
        """The digests that are in the sum that is not sent yet."""
        total = self.summing._round.total if self.summing._round else None
        return [] if total is None else [update.digest for update in total.updates]

    @property
    def sums(self):
        """The offers of sums that the server has got: message and blobs."""
        return [(m, blobs) for m, blobs in self.pushed if isinstance(m, Update)]

    @property
    def released(self):
        return sorted(d for m, _ in self.pushed if isinstance(m, Release) for d in m.digests)

    @property
    def wanted(self):
        """What clients were asked for since the last call: lane, digest and chunks."""
        found = [(number, m.digest, m.chunks) for number, m in self.pulled]
        self.pulled.clear()
        return found

    def open(self, which=-1):
        """Return the payload of a sum, as the server opens it, and its updates' digests."""
        message, (data, signature, wrap) = self.sums[which]
        verify_header(data, signature, RELAY.public)
        header = parse_header(data, max_plain_bytes=1 << 30)
        assert header.update_id == message.digest
        core = header.core
        assert (core.sender, core.run, core.kind) == (SITE, RUN, "train")
        assert core.schema == schema_of() or core.schema == schema_of(LARGE)
        self.summing.on_want(Want(digest=message.digest, chunks=list(range(len(header.hashes)))))
        came = {}
        for chunk, blobs in self.pushed:
            if isinstance(chunk, Chunk) and chunk.digest == message.digest:
                came[chunk.index] = blobs[0]
        pieces, at = [], 0
        while at < len(header.hashes):
            pieces.append(came[at])
            at += -(-len(came[at]) // header.chunk_bytes)
        payload = unpack(open_body(header, unwrap_key(wrap, data, SERVER), pieces))
        return payload, [update.digest for update in updates_of(payload)]

    def answer(self, answer=Ack, which=-1):
        """Answer a sum."""
        digest = self.sums[which][0].digest
        fields = {} if answer is Ack else {"code": "schema_mismatch", "text": "no", "action": ""}
        return self.summing.on_answer(answer(digest=digest, **fields))

    @property
    def is_empty(self):
        """True if no update is kept, in memory or in files."""
        arriving = self.summing._arriving
        held = [one for own in arriving._of.values() for one in own]
        return not held and not arriving._in_memory and not [*self.incoming.iterdir()]


def play(folder, story, **options):
    async def main():
        site = Site(folder, **options)
        try:
            await story(site)
        finally:
            await site.summing.close()
        assert site.is_empty

    asyncio.run(main())


def expected(payloads):
    """Return the sums by definition, in float64: n_k times the mean, and the images."""
    means = [p.i64("count")[:, None] * p.tensors["mean"].astype(np.float64) for p in payloads]
    return sum(means), sum(p.i64("count") for p in payloads)


def check(site, offers, which=-1):
    """Check that a sum is exactly that of some updates."""
    payload, digests = site.open(which)
    assert digests == sorted(offer.digest for offer in offers)
    mean, count = expected([offer.payload for offer in offers])
    assert np.array_equal(np.ldexp(payload.i64("mean").astype(np.float64), -BITS), mean)
    assert np.array_equal(payload.i64("count"), count)
    assert payload.i64("n").tolist() == [count.sum()]
    by_digest = {offer.digest: offer.payload for offer in offers}
    for one in updates_of(payload):
        own = by_digest[one.digest]
        assert (one.samples, one.tensor_bytes) == (own.i64("n").sum(), own.tensor_bytes)


class Gate:
    """Holds a step of the relay's thread until a test opens it."""

    def __init__(self, summing, name):
        self._work, self._open, self.reached = getattr(summing, name), threading.Event(), 0
        setattr(summing, name, self)

    def __call__(self, *args):
        self.reached += 1
        assert self._open.wait(60)
        return self._work(*args)

    def open(self):
        self._open.set()


# --- one sum -----------------------------------------------------------------------------------


def test_two_updates_become_one_sum_and_its_ack_ends_both(tmp_path):
    async def story(site):
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await site.idle()
        assert site.sums == []
        site.deliver(2, second)
        await until(lambda: site.sums)
        check(site, [first, second])
        assert site.answer()
        assert site.counts == {"sums": 1, "added": 2}
        assert site.summing._taken == {}
        assert site.released == []
        assert site.is_empty

    play(tmp_path, story)


def test_unasked_chunks_are_not_asked_for_and_others_are(tmp_path):
    async def story(site):
        site.begin(1, side=LARGE)
        offer = Offer(upload(1, LARGE), schema=schema_of(LARGE))
        assert len(offer.chunks) == 3
        assert site.takes(1, offer, unasked=2)
        assert site.wanted == [(1, offer.digest, [2])]
        site.send(1, offer)
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


def test_lost_chunks_are_asked_for_again(tmp_path, monkeypatch):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1))
        assert site.takes(1, offer, unasked=1)
        site.summing.revive()
        assert site.wanted == []
        loop = asyncio.get_running_loop()
        now = loop.time() + 2 * LOSS_TIMEOUT_S
        monkeypatch.setattr(loop, "time", lambda: now)
        site.summing.revive()
        monkeypatch.undo()
        assert site.wanted == [(1, offer.digest, [0])]

    play(tmp_path, story)


# --- who is waited for -------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_declines_or_leaves_is_not_waited_for(leaves, tmp_path):
    async def story(site):
        site.begin(1, 2)
        offer = Offer(upload(1))
        site.deliver(1, offer)
        await site.idle()
        assert site.sums == []
        if leaves:
            site.summing.on_client_left(2)
        else:
            decline = Decline(run=RUN, task=0, kind="train", round=0, reason="no")
            frames = (b"body", b"signature")
            received = Received(decline, *frames, ())
            assert site.summing.on_client_message(2, received, frames) == frames
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


def test_what_has_left_its_client_counts_though_that_has_left(tmp_path):
    async def story(site):
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        site.summing.on_client_left(1)
        site.deliver(2, second)
        await until(lambda: site.sums)
        check(site, [first, second])

    play(tmp_path, story)


def test_after_a_while_a_sum_goes_without_those_that_are_missing_and_they_make_another(tmp_path):
    async def story(site):
        site.begin(1, 2, 3)
        offers = [Offer(upload(k)) for k in range(3)]
        site.deliver(1, offers[0])
        await until(lambda: site.sums)
        check(site, offers[:1])
        site.deliver(2, offers[1])
        await site.idle()
        await until(lambda: site.summing._round.overdue)
        site.deliver(3, offers[2])
        await site.idle()
        assert len(site.sums) == 1, "one at a time"
        assert site.answer()
        await until(lambda: len(site.sums) == 2)
        check(site, offers[1:])
        assert site.answer()
        assert site.counts == {"sums": 2, "added": 3}

    play(tmp_path, story, wait_s=0)


def test_no_sum_holds_more_than_the_most_updates_though_clients_are_at_work(tmp_path, monkeypatch):
    async def story(site):
        monkeypatch.setattr(summing_module, "MOST_SUMMED", 2)
        site.begin(*range(1, 5))
        offers = [Offer(upload(k)) for k in range(3)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await site.idle()
        assert len(site.sums) == 1
        check(site, offers[:2])
        assert site.added == [offers[2].digest]

    play(tmp_path, story)


# --- answers of the server ---------------------------------------------------------------------


def test_the_updates_of_a_refused_sum_are_released_and_not_taken_again(tmp_path):
    async def story(site):
        site.begin(1, 2)
        offers = [Offer(upload(k)) for k in range(2)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await until(lambda: site.sums)
        assert site.answer(Nack)
        assert site.released == sorted(offer.digest for offer in offers)
        assert site.counts == {}
        assert site.notes[-1][0] == "warning"
        assert not site.takes(1, offers[0])
        assert site.chunk(1, offers[0], 0), "it passes to the server"
        await site.idle()
        assert len(site.sums) == 1

    play(tmp_path, story)


def test_an_answer_about_something_else_is_left_to_others(tmp_path):
    async def story(site):
        site.begin(1)
        assert not site.summing.on_answer(Ack(digest="0" * 64))
        site.deliver(1, Offer(upload(1)))
        await until(lambda: site.sums)
        assert not site.summing.on_answer(Ack(digest="0" * 64))
        assert site.answer()
        assert not site.answer()

    play(tmp_path, story)


@pytest.mark.parametrize("answer", [Ack, Nack])
def test_an_answer_to_an_update_that_is_added_releases_the_others_of_its_sum(answer, tmp_path):
    async def story(site):
        site.begin(1, 2, 3)
        offers = [Offer(upload(k)) for k in range(3)]
        for number, offer in enumerate(offers[:2], 1):
            site.deliver(number, offer)
        await site.idle()
        fields = {} if answer is Ack else {"code": "not_yet", "text": "no", "action": ""}
        site.say(answer(digest=offers[0].digest, **fields), 1)
        assert site.released == [offers[1].digest]
        site.deliver(3, offers[2])
        await until(lambda: site.sums)
        check(site, offers[2:])

    play(tmp_path, story)


def test_an_answer_to_an_update_of_a_sum_that_is_being_sealed_releases_the_others(tmp_path):
    async def story(site):
        gate = Gate(site.summing._sender, "seal")
        site.begin(1, 2)
        offers = [Offer(upload(k)) for k in range(2)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await until(lambda: gate.reached)
        site.say(Ack(digest=offers[0].digest), 1)
        gate.open()
        await site.idle()
        assert site.sums == []
        assert site.released == [offers[1].digest]

    play(tmp_path, story)


def test_an_answer_to_an_update_that_is_being_opened_keeps_it_out(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await until(lambda: gate.reached)
        site.say(Ack(digest=first.digest), 1)
        gate.open()
        await site.idle()
        assert site.added == []
        site.deliver(2, second)
        await until(lambda: site.sums)
        check(site, [second])
        assert site.released == []

    play(tmp_path, story)


def test_an_update_that_was_being_opened_as_its_sum_was_given_up_is_released(tmp_path):
    async def story(site):
        site.begin(1, 2, 3)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await site.idle()
        gate = Gate(site.summing, "_add")
        site.deliver(2, second)
        await until(lambda: gate.reached)
        site.say(Ack(digest=first.digest), 1)
        gate.open()
        await site.idle()
        assert site.released == [second.digest]
        assert site.added == []

    play(tmp_path, story)


def test_a_sum_that_cannot_be_sealed_is_given_back(tmp_path):
    async def story(site):
        def fail(*_):
            raise MemoryError

        site.summing._sender.seal = fail
        site.begin(1)
        offer = Offer(upload(1))
        site.deliver(1, offer)
        await until(lambda: site.released)
        assert site.released == [offer.digest]
        assert site.sums == []

    play(tmp_path, story)


# --- what is not added -------------------------------------------------------------------------


def changed(**tensors):
    return Payload({**upload(1).tensors, **tensors})


UNFIT = {
    "of no images": changed(count=np.zeros(2, np.int64), n=np.zeros(1, np.int64)),
    "another shape": changed(mean=np.zeros((3, 64), np.float32)),
    "out of range": changed(mean=np.full((2, 64), 2, np.float32)),
    "not a number": changed(mean=np.full((2, 64), np.nan, np.float32)),
    "fewer than none": changed(count=np.array([-1, 2]), n=np.array([1])),
    "a false total": changed(n=np.array([99])),
    "a tensor more": changed(more=np.zeros(1, np.float32)),
    "no payload": b"nothing",
    "a loss, where nothing is trained": Payload(upload(1).tensors, {TRAIN_LOSS: 0.25}),
    "too many images": changed(count=np.array([2**50, 0]), n=np.array([2**50])),
}


@pytest.mark.parametrize("payload", UNFIT.values(), ids=UNFIT)
def test_what_is_unfit_once_opened_is_released_and_changes_no_sum(payload, tmp_path):
    async def story(site):
        site.begin(1, 2)
        bad, good = Offer(payload), Offer(upload(2))
        site.deliver(1, bad)
        await until(lambda: site.released)
        assert site.released == [bad.digest]
        site.deliver(2, good)
        await until(lambda: site.sums)
        check(site, [good])

    play(tmp_path, story)


def test_a_content_key_for_somebody_else_is_released(tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1), wrap=bytes(summing_module.WRAP_BYTES))
        site.deliver(1, offer)
        await until(lambda: site.released)
        assert site.released == [offer.digest]

    play(tmp_path, story)


UNTAKEN = {
    "round": {"round": 1},
    "task": {"task": 1},
    "kind": {"kind": "late"},
    "run": {"run": "r20260102-030405-0a0c"},
    "base": {"base": 1},
    "schema": {"schema": "0" * 64},
    "federation": {"federation": "1" * 32},
    "length of the wrap": {"wrap": b""},
}


@pytest.mark.parametrize("core", UNTAKEN.values(), ids=UNTAKEN)
def test_what_its_header_makes_unfit_passes_on(core, tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1), **core)
        assert not site.takes(1, offer, unasked=1)
        assert site.chunk(1, offer, 0)
        assert site.wanted == []

    play(tmp_path, story)


def test_what_is_larger_than_any_update_passes_on(tmp_path):
    async def story(site):
        site.begin(1)
        assert not site.takes(1, Offer(bytes(2 << 20)))
        assert site.takes(1, Offer(bytes(1 << 19)))

    play(tmp_path, story)


def test_a_digest_that_is_not_its_header_s_passes_on(tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1))
        offer.digest = "0" * 64
        assert not site.takes(1, offer)
        offer.blobs = (b"no header", *offer.blobs[1:])
        assert not site.takes(1, offer)

    play(tmp_path, story)


def test_an_offer_without_a_key_for_the_relay_passes_on(tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1))
        assert site.offer(1, offer, fourth=False) == offer.blobs
        assert site.chunk(1, offer, 0)

    play(tmp_path, story)


def test_an_offer_passes_on_before_a_round_opens_and_after_it_has_closed(tmp_path):
    async def story(site):
        site.say(welcome(), 1)
        assert not site.takes(1, Offer(upload(1)))
        site.say(opening(), 1)
        assert site.takes(1, Offer(upload(2)))
        site.say(closing(), 1)
        assert not site.takes(1, Offer(upload(3)))

    play(tmp_path, story)


@pytest.mark.parametrize(
    "changes",
    [
        {"summing_relay": None},
        {"summing_relay": relay_keys(CLIENT)},
        {"schema_digest": "1" * 64},
        {"method": "unknown"},
        {"half": ["unknown"]},
        {"backbone": "{}"},
    ],
    ids=["no relay", "another relay", "another schema", "no method", "half of what", "backbone"],
)
def test_a_client_whose_welcome_lets_this_relay_add_nothing_is_not_served(changes, tmp_path):
    async def story(site):
        site.begin(1, 2, **changes)
        assert not site.takes(1, Offer(upload(1)))
        said = [level for level, _ in site.notes]
        assert said == ([] if "summing_relay" in changes else ["warning"]), "not for each client"

    play(tmp_path, story)


def test_a_chunk_that_does_not_match_gives_the_update_back(tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1))
        assert site.takes(1, offer, unasked=1)
        (spoilt,) = flip_bit((bytes(offer.sealed.chunk(0)),))
        assert not site.chunk(1, offer, 0, spoilt)
        assert site.released == [offer.digest]
        assert site.is_empty
        assert site.chunk(1, offer, 0), "now the server receives it"
        assert not site.takes(1, offer)

    play(tmp_path, story)


def test_a_chunk_of_another_client_s_update_does_nothing(tmp_path):
    async def story(site):
        site.begin(1, 2)
        offer = Offer(upload(1))
        assert site.takes(1, offer)
        assert not site.chunk(2, offer, 0, b"false")
        assert site.released == []
        site.summing.on_client_left(2)
        site.send(1, offer)
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


def test_a_full_disk_passes_updates_on(tmp_path):
    async def story(site):
        def full(*_):
            raise DiskFull("full")

        site.begin(1)
        site.summing._arriving.take = full
        offer = Offer(upload(1))
        assert not site.takes(1, offer)
        assert site.summing._taken == {}

    play(tmp_path, story)


def test_a_disk_that_fails_meanwhile_gives_the_update_back(tmp_path, monkeypatch):
    async def story(site):
        classes = MANY
        site.begin(1, side=LARGE, classes=classes)
        offer = Offer(upload(1, LARGE, classes), schema=schema_of(LARGE))
        assert site.takes(1, offer)
        (file,) = site.incoming.iterdir()
        file.unlink()
        file.mkdir()
        assert not site.chunk(1, offer, 0)
        assert site.released == [offer.digest]
        file.rmdir()

    play(tmp_path, story)


# --- again -------------------------------------------------------------------------------------


def test_what_is_offered_twice_is_asked_for_once(tmp_path):
    async def story(site):
        site.begin(1)
        offer = Offer(upload(1))
        assert site.takes(1, offer)
        assert site.wanted == [(1, offer.digest, [0])]
        assert site.takes(1, offer)
        assert site.wanted == []
        site.send(1, offer)
        await until(lambda: site.sums)
        assert site.takes(1, offer), "complete"
        assert site.wanted == []
        check(site, [offer])

    play(tmp_path, story)


@pytest.mark.parametrize(
    "left",
    [True, False],
)
def test_a_client_that_comes_back_on_a_new_lane_sends_what_has_not_come(left, tmp_path):
    async def story(site):
        site.begin(1, side=LARGE)
        offer = Offer(upload(1, LARGE), schema=schema_of(LARGE))
        assert site.takes(1, offer)
        site.send(1, offer, [0])
        site.wanted  # noqa: B018 - forget
        if left:
            site.summing.on_client_left(1)
        site.begin(2, side=LARGE)
        assert site.takes(2, offer)
        assert site.wanted == [(2, offer.digest, [1, 2])]
        site.send(2, offer)
        site.summing.on_client_left(1)
        await until(lambda: site.sums)
        check(site, [offer])
        assert site.is_empty

    play(tmp_path, story)


def test_a_complete_update_is_not_sent_again_over_a_new_lane(tmp_path):
    async def story(site):
        site.begin(1, 2)
        offer = Offer(upload(1))
        site.deliver(1, offer)
        await site.idle()
        site.summing.on_client_left(1)
        site.begin(3)
        site.wanted  # noqa: B018 - forget
        assert site.takes(3, offer)
        assert site.wanted == []
        site.summing.on_client_left(2)
        site.summing.on_client_left(3)
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


def test_a_newer_update_replaces_one_that_its_client_has_abandoned(tmp_path):
    async def story(site):
        site.begin(1)
        old, new = Offer(upload(1)), Offer(upload(2))
        assert site.takes(1, old)
        site.deliver(1, new)
        await until(lambda: site.sums)
        check(site, [new])
        assert old.digest not in site.summing._taken
        assert site.is_empty

    play(tmp_path, story)


# --- the end of a round ------------------------------------------------------------------------


async def receiving(site, offers):
    assert site.takes(1, offers[0])


async def opening_one(site, offers):
    gate = Gate(site.summing, "_add")
    site.deliver(1, offers[0])
    assert site.takes(2, offers[1])
    await until(lambda: gate.reached)
    return gate


async def sealing(site, offers):
    gate = Gate(site.summing._sender, "seal")
    for number, offer in enumerate(offers, 1):
        site.deliver(number, offer)
    await until(lambda: gate.reached)
    return gate


async def under_way(site, offers):
    for number, offer in enumerate(offers, 1):
        site.deliver(number, offer)
    await until(lambda: site.sums)


STATES = [receiving, opening_one, sealing, under_way]


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_nothing_of_a_round_reaches_the_next_one(state, closes, tmp_path):
    async def story(site):
        site.begin(1, 2)
        gate = await state(site, [Offer(upload(k)) for k in range(2)])
        sent = len(site.sums)
        if closes:
            site.say(closing(), 1, 2)
        site.say(opening(1, 1), 1, 2)
        if gate is not None:
            gate.open()
        offers = [Offer(upload(k), round=1, base=1) for k in range(2)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await until(lambda: len(site.sums) == sent + 1)
        check(site, offers)
        assert site.answer()
        assert site.released == []
        assert site.is_empty

    play(tmp_path, story)


@pytest.mark.parametrize("state", STATES)
def test_a_closed_round_leaves_nothing(state, tmp_path):
    async def story(site):
        site.begin(1, 2)
        gate = await state(site, [Offer(upload(k)) for k in range(2)])
        sent = len(site.sums)
        site.say(closing(), 1, 2)
        if gate is not None:
            gate.open()
        await site.idle()
        assert len(site.sums) == sent
        if sent:
            assert not site.answer()
        assert site.summing._round is None
        assert site.summing._taken == {}
        assert not site.summing._waiting
        assert site.is_empty

    play(tmp_path, story)


def test_what_is_unfit_is_not_released_once_its_round_is_over(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1)
        site.deliver(1, Offer(b"nothing"))
        await until(lambda: gate.reached)
        site.say(closing(), 1)
        gate.open()
        await site.idle()
        assert site.released == []
        assert all(level != "warning" for level, _ in site.notes)

    play(tmp_path, story)


@pytest.mark.parametrize("state", STATES)
def test_it_can_be_closed_at_any_time(state, tmp_path):
    async def story(site):
        site.begin(1, 2)
        gate = await state(site, [Offer(upload(k)) for k in range(2)])
        sent = len(site.pushed)
        closing = asyncio.create_task(site.summing.close())
        await asyncio.sleep(0)
        if gate is not None:
            gate.open()
        await closing
        assert len(site.pushed) == sent
        assert site.is_empty

    play(tmp_path, story)


def test_a_timer_of_an_earlier_round_sends_no_sum_of_this_one(tmp_path):
    async def story(site):
        site.begin(1, 2)
        site.deliver(1, Offer(upload(1)))
        await site.idle()
        due = site.summing._round.due
        assert due is not None
        site.say(closing(), 1, 2)
        assert due.cancelled()

    play(tmp_path, story)


def test_large_updates_leave_no_file(tmp_path):
    async def story(site):
        site.begin(1, 2, side=LARGE, classes=MANY)
        offers = [Offer(upload(k, LARGE, MANY), schema=schema_of(LARGE)) for k in range(2)]
        assert site.takes(1, offers[0])
        assert [path.name for path in site.incoming.iterdir()] == [offers[0].digest]
        site.send(1, offers[0])
        await site.idle()
        assert site.is_empty, "an update that is added is not kept"
        site.deliver(2, offers[1])
        await until(lambda: site.sums)
        check(site, offers)
        site.say(closing(), 1, 2)
        assert site.is_empty

    play(tmp_path, story)


# --- what disturbs it ---------------------------------------------------------------------------


def test_a_sum_holds_no_more_than_the_most_updates_while_another_is_under_way(
    tmp_path, monkeypatch
):
    async def story(site):
        monkeypatch.setattr(summing_module, "MOST_SUMMED", 2)
        site.begin(*range(1, 8))
        offers = [Offer(upload(k)) for k in range(7)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await until(lambda: site.sums)
        await site.idle()
        for number in range(4):
            await until(lambda n=number: len(site.sums) == n + 1)
            assert len(site.open()[1]) <= 2
            assert site.answer()
        assert site.counts == {"sums": 4, "added": 7}

    play(tmp_path, story)


def test_a_client_that_leaves_again_and_again_leaves_one_update_until_the_round_ends(tmp_path):
    async def story(site):
        sender = next(SENDERS)
        offers = [Offer(upload(k), sender=sender) for k in range(2)]
        free = site.summing._arriving._free
        for number in range(1, 5):
            site.begin(number)
            assert site.takes(number, offers[number % 2])
            site.summing.on_client_left(number)
            assert site.summing._receiving == set()
            assert site.summing._arriving._free == free - offers[0].sealed.parsed.sealed_bytes
        site.say(closing(), 9)
        assert site.is_empty
        assert site.summing._arriving._free == free

    play(tmp_path, story)


def test_a_lane_that_was_asked_for_an_earlier_round_is_not_taken_into_this_one(tmp_path):
    async def story(site):
        site.begin(1, 2)
        site.say(opening(1, 1), 2)
        assert not site.takes(1, Offer(upload(1)))
        offer = Offer(upload(2), round=1, base=1)
        site.deliver(2, offer)
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


@pytest.mark.parametrize("how", ["no key", "unfit", "released"])
def test_a_client_whose_update_passes_on_is_not_waited_for(how, tmp_path):
    async def story(site):
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        if how == "unfit":
            second.wrap = b"short"
        elif how == "released":
            site.deliver(2, second)
            site.summing._release([second.digest])
            site.begin(2)
        site.deliver(1, first)
        await site.idle()
        site.offer(2, second, fourth=how != "no key")
        await site.idle()
        assert len(site.sums) == 1

    play(tmp_path, story)


def test_a_client_that_has_sent_all_is_not_waited_for_on_its_new_lane(tmp_path):
    async def story(site):
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await site.idle()
        site.summing.on_client_left(1)
        site.begin(3)
        assert site.takes(3, first)
        site.deliver(2, second)
        await site.idle()
        assert len(site.sums) == 1
        check(site, [first, second])

    play(tmp_path, story)


def test_an_update_that_is_refused_while_it_waits_and_offered_again_is_added_once(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await until(lambda: gate.reached)
        site.deliver(2, second)
        site.say(Nack(digest=second.digest, code="not_yet", text="later", action=""), 2)
        site.deliver(2, second)
        gate.open()
        await until(lambda: site.sums or site.released)
        check(site, [first, second])

    play(tmp_path, story)


def test_an_update_that_is_refused_while_it_is_opened_passes_on_when_it_is_offered_again(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1)
        offer = Offer(upload(1))
        site.deliver(1, offer)
        await until(lambda: gate.reached)
        site.say(Nack(digest=offer.digest, code="not_yet", text="later", action=""), 1)
        took = site.takes(1, offer)
        gate.open()
        assert not took
        await site.idle()
        assert site.added == []
        assert site.sums == []

    play(tmp_path, story)


def test_an_update_in_place_of_which_its_client_offers_another_is_in_no_sum(tmp_path):
    async def story(site):
        site.begin(1, 2)
        old, new, other = (Offer(upload(k), sender=c * 26) for k, c in enumerate("aab"))
        site.deliver(1, old)
        await site.idle()
        site.deliver(1, new)
        await site.idle()
        site.deliver(2, other)
        await until(lambda: site.sums)
        check(site, [new, other])
        assert site.released == [old.digest]

    play(tmp_path, story)


def test_a_false_offer_of_another_client_s_update_stops_nothing(tmp_path):
    async def story(site):
        site.begin(1, 2)
        offer, false = Offer(upload(1)), Offer(upload(2))
        assert site.takes(1, offer)
        false.digest = offer.digest
        assert not site.takes(2, false)
        site.send(1, offer)
        await until(lambda: site.sums)
        check(site, [offer])

    play(tmp_path, story)


def test_an_update_that_is_answered_while_it_waits_is_not_kept(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1, 2)
        first, second = Offer(upload(1)), Offer(upload(2))
        site.deliver(1, first)
        await until(lambda: gate.reached)
        site.deliver(2, second)
        site.say(Ack(digest=second.digest), 2)
        site.summing.on_client_left(2)
        gate.open()
        await until(lambda: site.sums)
        check(site, [first])
        assert site.is_empty

    play(tmp_path, story)


def test_a_connection_that_is_dead_does_not_keep_a_closed_round(tmp_path):
    async def story(site):
        site.begin(1, 2)
        site.deliver(1, Offer(upload(1)))
        await site.idle()
        site.say(closing(), 1)  # lane 2's client has a newer one
        assert site.summing._round is None
        assert site.summing._taken == {}

    play(tmp_path, story)


def test_what_the_file_system_refuses_does_not_end_the_relay(tmp_path):
    async def story(site):
        def refuse(*_):
            raise PermissionError("no")

        site.begin(1)
        site.summing._arriving.take = refuse
        assert not site.takes(1, Offer(upload(1)))

    play(tmp_path, story)


def test_one_that_cannot_be_added_costs_no_other_that_waits_behind_it(tmp_path):
    async def story(site):
        gate = Gate(site.summing, "_add")
        site.begin(1, 2, 3)
        bad, *good = (
            Offer(Payload({"x": np.zeros(3, np.float32)})),
            Offer(upload(1)),
            Offer(upload(2)),
        )
        site.deliver(1, bad)
        await until(lambda: gate.reached)
        for number, offer in enumerate(good, 2):
            site.deliver(number, offer)
        gate.open()
        await until(lambda: site.sums)
        assert site.released == [bad.digest]
        check(site, good)

    play(tmp_path, story)


def test_an_answer_while_another_is_opened_costs_no_third_that_waits(tmp_path):
    async def story(site):
        site.begin(1, 2, 3, 4)
        offers = [Offer(upload(k)) for k in range(3)]
        site.deliver(1, offers[0])
        await site.idle()
        gate = Gate(site.summing, "_add")
        site.deliver(2, offers[1])
        await until(lambda: gate.reached)
        site.deliver(3, offers[2])
        site.say(Ack(digest=offers[0].digest), 1)
        gate.open()
        await site.idle()
        assert site.released == [offers[1].digest]
        assert site.added == [offers[2].digest]

    play(tmp_path, story)


@pytest.mark.parametrize("fourth", [True, False], ids=["reconnected", "restarted"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked again", "not asked yet"])
def test_a_client_that_comes_back_need_not_send_what_is_added(tmp_path, fourth, asked):
    """A restarted client has its key for the relay no more; the server may not have asked yet."""

    async def story(site):
        site.begin(1, 2)
        offers = [Offer(upload(k)) for k in range(2)]
        site.deliver(1, offers[0])
        await site.idle()
        site.summing.on_client_left(1)
        site.say(welcome(), 5)
        if asked:
            site.say(opening(), 5)
        assert site.takes(5, offers[0], fourth=fourth)
        site.deliver(2, offers[1])
        await until(lambda: site.sums)
        check(site, offers)
        assert not site.released

    play(tmp_path, story)


def test_what_the_server_requests_from_a_client_passes(tmp_path):
    """It takes the update itself, so a sum with it would be refused: the others are released."""

    async def story(site):
        site.begin(1, 2, 3)
        offers = [Offer(upload(k)) for k in range(2)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await site.idle()
        site.say(Want(digest=offers[0].digest, chunks=[0]), 1)
        assert site.chunk(1, offers[0], 0)
        assert site.released == [offers[1].digest]

    play(tmp_path, story)


def test_answers_to_another_client_about_an_update_change_nothing(tmp_path):
    async def story(site):
        site.begin(1, 2, 3)
        offers = [Offer(upload(k)) for k in range(2)]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await site.idle()
        site.keys[3] = b"another"
        site.say(Nack(code="malformed", text="", digest=offers[0].digest), 3)
        site.say(Want(digest=offers[0].digest, chunks=[0]), 3)
        assert sorted(site.added) == sorted(offer.digest for offer in offers)

    play(tmp_path, story)


def test_a_client_that_names_another_as_sender_undoes_nothing(tmp_path):
    async def story(site):
        site.begin(1, 2, 3)
        offers = [Offer(upload(k), sender=c * 26) for k, c in enumerate("ab")]
        for number, offer in enumerate(offers, 1):
            site.deliver(number, offer)
        await site.idle()
        site.keys[3] = b"another"
        site.takes(3, Offer(upload(3), sender="a" * 26))
        assert sorted(site.added) == sorted(offer.digest for offer in offers)
        assert not site.released

    play(tmp_path, story)


def test_a_method_whose_code_fails_at_the_relay_passes(tmp_path, monkeypatch):
    def fails(*_):
        return {}["gamma"]

    async def story(site):
        monkeypatch.setattr(summing_module.SumTerms, "of", fails)
        site.begin(1)
        assert not site.takes(1, Offer(upload(1)))
        ((level, text),) = site.notes
        assert level == "warning"
        assert "gamma" in text

    play(tmp_path, story)


def test_a_reopened_round_has_its_new_deadline(tmp_path):
    async def story(site):
        site.say(welcome(), 1, 2)
        site.say(opening().model_copy(update={"remaining_s": 0.0}), 1, 2)
        site.say(opening(), 1, 2)
        offers = [Offer(upload(k)) for k in range(2)]
        site.deliver(1, offers[0])
        await site.idle()
        site.deliver(2, offers[1])
        await until(lambda: site.sums)
        check(site, offers)

    play(tmp_path, story)
