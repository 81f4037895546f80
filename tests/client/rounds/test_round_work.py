"""A round's work and its parts: what is damaged, full or malformed costs one round at most."""

import asyncio
import contextlib
import errno
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from client.daemon_kit import DIGEST, HPARAMS, RUN, order
from client.round_kit import (
    FED,
    KEYS,
    ORDER,
    SERVER,
    TERMS,
    Host,
    fit,
    make,
    registry_part,
    unguard,
)
from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.daemon.jobs import Jobs
from fcil_client.link.downloads import IN_MEMORY_BYTES, Downloads, open_part
from fcil_client.notes import Notes
from fcil_client.rounds import round_work
from fcil_client.rounds.round_work import ClientOptions, RoundWork, read_registry
from fcil_client.state import outbox, sent_journal
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, open_body, seal, unwrap_key, wrap_key
from fcil_protocol.envelopes.header import chunk_bytes_for
from fcil_protocol.envelopes.stored_envelope import head_of, read_envelope, write_envelope
from fcil_protocol.errors import CorruptFile, DiskFull, SchemaMismatch, StaleUpdate, StorageError
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Chunk, PartRef, Parts, Want
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.testing import flip_bit
from fcil_protocol.trust.keys import PrivateKeys

CHUNK = 256 << 10


# --- the registry part ----------------------------------------------------------------------


def test_the_registry_is_name_to_id():
    assert read_registry(registry_part()) == {"cat": 0, "dog": 1}


@pytest.mark.parametrize(
    "part",
    [
        None,
        Payload(),
        registry_part(ids=(0, 1, 2)),
        registry_part(ids=(-1, 1)),
        registry_part(names=("cat", " ")),
        registry_part(task=np.zeros(3, np.int64)),
        registry_part(**{"class": np.zeros(2, np.float32)}),
        Payload({"class": np.zeros(1, np.int64), "task": np.zeros(1, np.int64)}, {"names": "c"}),
        Payload({"class": np.zeros(1, np.int64), "task": np.zeros(1, np.int64)}),
    ],
    ids=["none", "empty", "lengths", "negative", "name", "tasks", "dtype", "no list", "no names"],
)
def test_a_registry_of_another_form_is_refused_with_a_sentence(part):
    with pytest.raises(SchemaMismatch, match="registry"):
        read_registry(part)


# --- what is kept ---------------------------------------------------------------------------


def test_a_round_that_is_stopped_while_it_waits_kills_nobody_elses_call(
    home, enrolment, tmp_path, monkeypatch
):
    """A scan may have the worker then; its result is wanted whatever becomes of the round."""
    fit(monkeypatch)
    heard = []

    async def main():
        work = make(home, enrolment, tmp_path)
        jobs = Jobs(
            work,
            Notes(lambda _note: None),
            feed=heard.append,
            fail=heard.append,
            progress=lambda *_: None,
        )
        counts = {"train": {"cat": 1}, "test": {}}
        work._host.answer = ({"counts": counts, "faults": [], "notes": [], "changes": []}, [])
        jobs.scan()
        await asyncio.sleep(0)
        jobs.train(ORDER, TERMS, SERVER.public)
        for _ in range(3):
            await asyncio.sleep(0)
        assert work._host.calls == ["scan"]
        jobs.cancel_round()
        for _ in range(3):
            await asyncio.sleep(0)
        assert work._host.kills == 0
        work._host.gate.set()
        while not heard:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
        await jobs.stop()
        assert jobs.inventory.train == {"cat": 1}

    asyncio.run(main())
    assert [type(e).__name__ for e in heard] == ["Scanned"]


def test_a_round_that_is_stopped_at_its_own_call_ends_the_worker(
    home, enrolment, tmp_path, monkeypatch
):
    fit(monkeypatch)

    async def main():
        work = make(home, enrolment, tmp_path)
        task = asyncio.create_task(work.run(ORDER, TERMS, SERVER.public, lambda *_: None))
        while not work._host.calls:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert work._host.kills == 1

    asyncio.run(main())


def upload(home, enrolment, data):
    """Run a round whose worker answers at once with a state and an upload."""

    async def main():
        work = make(home, enrolment, data)
        work._host.gate.set()
        part = pack(Payload({"n": np.ones(1, np.int64)}))
        work._host.answer = ({"faults": []}, [part, part])
        return await work.run(ORDER, TERMS, SERVER.public, lambda *_: None)

    return asyncio.run(main())


@pytest.fixture
def stateful(monkeypatch):
    """The round's exchange keeps a state."""
    fit(monkeypatch)
    unguard(monkeypatch)
    upload = METHOD.exchanges(HPARAMS, NO_BACKBONE)[0].upload
    exchange = type("Exchange", (), {"keeps_state": True, "upload": upload})
    monkeypatch.setattr(round_work.registry, "find_exchange", lambda *_: exchange)


def kept(home):
    return {p.stem for name in ("outbox", "provisional") for p in (home.directory / name).iterdir()}


def test_an_update_is_kept_with_the_state_it_came_with(home, enrolment, tmp_path, stateful):
    digest = upload(home, enrolment, tmp_path)
    assert kept(home) == {digest}
    assert home.settle_provisional(digest, counted=True)


def bytes_that_leave(home, enrolment, data, monkeypatch, *, told, terms=TERMS, **options):
    """Run a round of a method with gradients; return the payload of the update in the outbox."""
    monkeypatch.setattr(type(METHOD), "reports_training", lambda *_: True)

    async def main():
        work = RoundWork(home, enrolment, KEYS, ClientOptions(data, **options))
        work._host = Host()
        work._host.gate.set()
        part = pack(Payload({"n": np.ones(1, np.int64)}))
        work._host.answer = ({"faults": [], **told}, [part, part])
        return await work.run(ORDER, terms, SERVER.public, lambda *_: None)

    envelope = read_envelope(home.outbox_path(asyncio.run(main())))
    key = unwrap_key(envelope.wrap, envelope.header, SERVER)
    body = [
        bytes(envelope.body)[envelope.parsed.extent(range(i, i + 1))]
        for i in range(len(envelope.parsed.hashes))
    ]
    return open_body(envelope.parsed, key, iter(body))


def meta_that_leaves(*args, **options):
    return unpack(bytes_that_leave(*args, **options)).meta


@pytest.mark.parametrize("compact", [True, False])
def test_an_update_has_the_form_that_the_server_asks_for(
    home, enrolment, tmp_path, stateful, monkeypatch, compact
):
    terms = replace(TERMS, compact=compact)
    plain = bytes_that_leave(home, enrolment, tmp_path, monkeypatch, told={}, terms=terms)
    assert plain == pack(unpack(plain), compact=compact)
    assert (plain[7] == 0x80) is compact


TOLD = {"trained": {"train_loss": 0.25, "train_accuracy": 0.5}}
TAKES = replace(TERMS, training_metrics=True)


def test_loss_and_accuracy_leave_if_the_server_takes_them(
    home, enrolment, tmp_path, stateful, monkeypatch
):
    sent = meta_that_leaves(home, enrolment, tmp_path, monkeypatch, told=TOLD, terms=TAKES)
    assert sent == TOLD["trained"]
    line = (home.directory / "egress.jsonl").read_text()
    assert '"name":"train_loss"' in line
    assert "0.25" not in line


@pytest.mark.parametrize(
    ("told", "terms", "options"),
    [
        (TOLD, TERMS, {}),
        (TOLD, TAKES, {"training_metrics": False}),
        ({}, TAKES, {}),
    ],
    ids=["an older server", "switched off", "no gradient"],
)
def test_no_byte_of_them_leaves_otherwise(
    home, enrolment, tmp_path, stateful, monkeypatch, told, terms, options
):
    sent = meta_that_leaves(
        home, enrolment, tmp_path, monkeypatch, told=told, terms=terms, **options
    )
    assert sent == {}


def test_the_guard_stops_them_where_they_are_switched_off():
    payload = Payload({"n": np.ones(1, np.int64)}, TOLD["trained"])
    faults = TERMS.check_upload("train", payload, TaskInfo(0, (0, 1)))
    assert any("'train_loss' is not in the schema" in fault for fault in faults)


def test_an_update_that_finds_no_room_leaves_nothing_behind(
    home, enrolment, tmp_path, stateful, monkeypatch
):
    """Nor its state: the round is declined as a whole."""

    def full(*_args):
        raise DiskFull("no room.")

    monkeypatch.setattr(outbox, "write_envelope", full)
    with pytest.raises(DiskFull):
        upload(home, enrolment, tmp_path)
    assert kept(home) == set()


def test_a_round_that_is_stopped_while_its_update_is_written_leaves_nothing_behind(
    home, enrolment, tmp_path, stateful, monkeypatch
):
    """The loop goes on meanwhile, and stops the round; a thread cannot be stopped."""
    real, written = outbox.write_envelope, threading.Event()

    async def main():
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow(*args):
            real(*args)
            loop.call_soon_threadsafe(begun.set)
            assert written.wait(60)

        monkeypatch.setattr(outbox, "write_envelope", slow)
        work = make(home, enrolment, tmp_path)
        work._host.gate.set()
        part = pack(Payload({"n": np.ones(1, np.int64)}))
        work._host.answer = ({"faults": []}, [part, part])
        task = asyncio.create_task(work.run(ORDER, TERMS, SERVER.public, lambda *_: None))
        async with asyncio.timeout(60):
            await begun.wait()
        assert len(home.outbox()) == 1
        task.cancel()
        written.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert kept(home) == set()


def test_nothing_of_a_round_reads_or_writes_on_the_daemons_loop(
    home, enrolment, tmp_path, stateful, monkeypatch
):
    """A slow disk must not silence the connection."""
    seen = {}

    def note(module, name):
        real = getattr(module, name)

        def noted(*args, **kwargs):
            seen.setdefault(name, set()).add(threading.current_thread() is threading.main_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)

    names = ("open_part", "pieces", "seal")
    for name in names:
        note(round_work, name)
    note(outbox, "write_envelope")
    upload(home, enrolment, tmp_path)
    assert seen == dict.fromkeys((*names, "write_envelope"), {False})


def test_a_small_part_that_stays_the_same_is_opened_once(
    home, enrolment, tmp_path, stateful, monkeypatch
):
    opened = []
    real = round_work.open_part
    monkeypatch.setattr(
        round_work, "open_part", lambda *a: (opened.append(a[1].digest), real(*a))[1]
    )
    work = make(home, enrolment, tmp_path)
    small = PartRef(name="registry", digest="2" * 64, sealed_bytes=round_work.KEPT_BYTES)
    large = small.model_copy(update={"digest": "3" * 64, "sealed_bytes": round_work.KEPT_BYTES + 1})
    task = TaskInfo(0, (0, 1), ())
    for ref in (small, small, large, large, small):
        work._parts(ORDER.model_copy(update={"parts": [ref]}), TERMS, task, SERVER.public)
    assert opened == [small.digest, large.digest, large.digest, small.digest]


def test_states_that_a_crash_left_without_an_update_go_with_the_next_one(
    home, enrolment, tmp_path, stateful
):
    home.save_provisional("9" * 64, Payload({"w": np.ones(1, np.float32)}))
    digest = upload(home, enrolment, tmp_path)
    assert kept(home) == {digest}


def test_a_damaged_salt_stops_the_round_before_the_worker_sees_an_image(
    home, enrolment, tmp_path, stateful
):
    (home.directory / "salt").write_bytes(b"cut")
    with pytest.raises(CorruptFile, match="salt"):
        upload(home, enrolment, tmp_path)


# --- parts ----------------------------------------------------------------------------------


def sealed_part(size, data=None):
    core = Core(
        protocol=PROTOCOL_VERSION, federation=FED, run=RUN, direction="broadcast",
        sender="server", sender_key=SERVER.public.fingerprint, recipient="client",
        method=METHOD.name, schema=DIGEST, task=0, round=0, kind="train", base=0, part="current",
    )  # fmt: skip
    sealed, key = seal(data or b"x" * size, core, SERVER, chunk_bytes=CHUNK)
    stored = sealed.stored(wrap_key(key, sealed.header, KEYS.public))
    digest = str(sealed.parsed.update_id)
    ref = PartRef(name="current", digest=digest, sealed_bytes=len(stored.body))
    return ref, sealed.parsed, stored


class Fetching:
    """One order with one part."""

    def __init__(self, home, enrolment, size):
        self.sent = []
        self.downloads = Downloads(home, enrolment, KEYS, self.sent.append)
        self.ref, self.parsed, self.stored = sealed_part(size)
        assert not self.downloads.start([self.ref])

    def header(self):
        message = Parts(digest=self.ref.digest)
        blobs = (self.stored.header, self.stored.signature, self.stored.wrap)
        received = Received(message, b"", b"", blobs)
        return self.downloads.header(received, message, TERMS, SERVER.public)

    def chunk(self, index):
        message = Chunk(digest=self.ref.digest, index=index)
        start = index * CHUNK
        data = self.stored.body[start : start + CHUNK]
        return self.downloads.chunk(Received(message, b"", b"", (data,)), message)


def test_a_part_that_had_come_whole_before_a_crash_is_complete_with_its_header(home, enrolment):
    """No chunk comes any more that could say so."""
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    stored = fetching.stored
    head = head_of(stored.header, stored.signature, b"w" * len(stored.wrap), len(stored.body))
    before = Assembly(fetching.parsed, path=home.incoming_path(fetching.ref.digest), head=head)
    for index in range(len(fetching.parsed.hashes)):
        before.put(index, fetching.stored.body[index * CHUNK : (index + 1) * CHUNK])
    assert fetching.header() is True
    assert read_envelope(home.part_path(fetching.ref.digest)) == stored, "with the new wrap"
    assert [m for m in fetching.sent if isinstance(m, Want) and not m.header] == []


def test_a_new_part_is_complete_with_its_last_chunk(home, enrolment):
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    assert fetching.header() is False
    *first, last = range(len(fetching.parsed.hashes))
    assert [fetching.chunk(i) for i in first] == [False] * len(first)
    assert fetching.chunk(last)


@pytest.mark.parametrize(
    ("part_bytes", "chunks"), [(9, 1), (100_000, 4), (2 * IN_MEMORY_BYTES, 4), (1 << 24, 4)]
)
def test_first_chunks_are_asked_for_with_the_header(home, enrolment, part_bytes, chunks):
    """As many as the window has room for: nothing is known about the link yet."""
    fetching = Fetching(home, enrolment, part_bytes)
    asked = Want(digest=fetching.ref.digest, chunks=list(range(chunks)), header=True)
    assert fetching.sent == [asked]


def test_chunks_that_were_not_asked_for_with_the_header_are_asked_for_later(home, enrolment):
    fetching = Fetching(home, enrolment, 1 << 20)
    ahead = fetching.sent.pop().chunks
    fetching.header()
    assert fetching.sent == [], "the window is full"
    for index in ahead:
        fetching.chunk(index)
    assert fetching.sent[0].chunks[0] == len(ahead)


def test_parts_share_the_window_that_is_asked_for_ahead(home, enrolment):
    sent = []
    downloads = Downloads(home, enrolment, KEYS, sent.append)
    refs = [
        PartRef(name=f"task/{n}", digest=f"{n}" * 64, sealed_bytes=size)
        for n, size in enumerate((40_000, 300_000, 10))
    ]
    downloads.start(refs)
    assert [want.chunks for want in sent] == [[0, 1], [0, 1], []]
    downloads.on_connection_lost()
    sent.clear()
    downloads.start(refs[1:])
    assert [want.chunks for want in sent] == [[0, 1, 2, 3], []], "nothing is in flight any more"


def test_parts_that_others_need_stay_when_an_order_is_fetched(home, enrolment):
    downloads = Downloads(home, enrolment, KEYS, lambda _: None)
    wanted, other, old = (c * 64 for c in "123")
    for digest in (wanted, other, old):
        home.part_path(digest).write_bytes(b"sealed")
        home.incoming_path(digest).write_bytes(b"half")
    downloads.start([PartRef(name="current", digest=wanted, sealed_bytes=6)], keep={other})
    for path_of in (home.part_path, home.incoming_path):
        assert [path_of(d).exists() for d in (wanted, other, old)] == [True, True, False]


def test_the_window_counts_bytes_whatever_the_parts_chunks(home, enrolment):
    """Chunks of 32 KiB, 1 MiB and 32 KiB."""
    sent = []
    downloads = Downloads(home, enrolment, KEYS, sent.append)
    downloads.receiver.pace = SimpleNamespace(free_bytes=4 << 20, span_bytes=1 << 20)
    sizes = (64 << 10, 4 << 30, 2 << 20)
    assert [chunk_bytes_for(size) >> 10 for size in sizes] == [32, 1024, 32]
    refs = [
        PartRef(name=f"task/{n}", digest=f"{n}" * 64, sealed_bytes=size)
        for n, size in enumerate(sizes)
    ]
    for ref in refs:
        downloads.refs[ref.digest] = ref
        downloads._ask_header(ref.digest)
    left = (4 << 20) - (64 << 10) - (3 << 20)
    assert [len(want.chunks) for want in sent] == [2, 3, left >> 15]


def test_nothing_is_asked_ahead_behind_a_relay_or_of_a_part_that_came_in_pieces(home, enrolment):
    """A relay would have to fetch it for each client; and some of it may be here."""
    behind = replace(enrolment, link_key="ab" * 32)
    assert [want.chunks for want in Fetching(home, behind, 9).sent] == [[]]
    began = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    began.header()
    began.downloads.on_connection_lost()
    began.downloads.stop()
    began.sent.clear()
    began.downloads.start([began.ref])
    assert [want.chunks for want in began.sent] == [[]]


def test_a_part_is_one_file_that_is_written_once_and_then_changes_its_name(home, enrolment):
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    fetching.header()
    began = home.incoming_path(fetching.ref.digest).stat().st_ino
    for index in reversed(range(len(fetching.parsed.hashes))):
        fetching.chunk(index)
    assert home.part_path(fetching.ref.digest).stat().st_ino == began
    assert read_envelope(home.part_path(fetching.ref.digest)) == fetching.stored
    assert not list((home.directory / "incoming").iterdir())


def test_what_arrived_of_parts_that_are_no_longer_named_is_removed(home, enrolment):
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    fetching.header()
    assert home.incoming_path(fetching.ref.digest).exists()
    fetching.downloads.start([])
    assert not home.incoming_path(fetching.ref.digest).exists()


class TestOpenPart:
    """A part on the disk that is opened for a round."""

    @pytest.fixture
    def ref(self, home):
        ref, _, stored = sealed_part(0, pack(Payload({"w": np.ones(9, np.float32)})))
        write_envelope(home.part_path(ref.digest), stored)
        return ref

    def test_a_whole_one_opens(self, home, ref):
        assert open_part(home, ref, KEYS, SERVER.public).f32("w").sum() == 9

    def test_a_damaged_one_is_removed_and_fetched_again(self, home, ref):
        path = home.part_path(ref.digest)
        path.write_bytes(flip_bit((path.read_bytes(),))[0])
        with pytest.raises(StaleUpdate, match="damaged on disk"):
            open_part(home, ref, KEYS, SERVER.public)
        assert not path.exists()

    def test_one_that_is_gone_is_fetched_again(self, home, ref):
        home.part_path(ref.digest).unlink()
        with pytest.raises(StaleUpdate, match="no longer on disk"):
            open_part(home, ref, KEYS, SERVER.public)

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
    def test_one_that_cannot_be_read_now_is_no_damaged_one(self, home, ref, monkeypatch, number):
        """It stays, and nothing is fetched over the uplink that is here."""

        def fails(*_args, **_kwargs):
            raise OSError(number, "x")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fails)
            with pytest.raises(StorageError) as failed:
                open_part(home, ref, KEYS, SERVER.public)
        assert failed.type is StorageError
        assert open_part(home, ref, KEYS, SERVER.public)

    def test_too_little_memory_is_no_damage(self, home, ref, monkeypatch):
        def fails(_data):
            raise MemoryError

        monkeypatch.setattr("fcil_client.link.downloads.unpack", fails)
        with pytest.raises(MemoryError):
            open_part(home, ref, KEYS, SERVER.public)
        assert home.part_path(ref.digest).exists()


# --- relays that add up -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_an_update_that_is_a_sum_is_sealed_for_the_relay_too_and_the_journal_names_it(
    home, enrolment, tmp_path, monkeypatch, kind
):
    unguard(monkeypatch)
    monkeypatch.setattr(round_work, "withhold", lambda payload, _: payload)
    relay = PrivateKeys.generate()
    terms = replace(TERMS, relay_name="depot", relay=relay.public)
    work = make(home, enrolment, tmp_path)
    upload = Payload({"n": np.ones(1, np.int64)})
    task = TaskInfo(0, (0, 1))
    asked = order().model_copy(update={"kind": kind})
    envelope, digest = work._seal_update(upload, asked, terms, task, SERVER.public)
    work.outbox.put(digest, envelope)
    (row,) = sent_journal.read(home.directory)[0]
    sent = []
    work.outbox.offer(digest, lambda *frames: sent.append(frames), again=False)
    (_, header, signature, wrap, *more), *_ = sent
    assert unwrap_key(wrap, header, SERVER)
    if kind == "evaluate":
        assert not more
        assert row["relay"] == ""
        return
    assert unwrap_key(*more, header, relay) == unwrap_key(wrap, header, SERVER)
    assert row["relay"] == "depot"
    work.outbox.share("another", b"")  # the next update's
    sent.clear()
    work.outbox.offer(digest, lambda *frames: sent.append(frames), again=False)
    assert len(sent[0]) == 4
