"""A round's work and its parts: what is damaged, full or malformed costs one round at most."""

import asyncio
import contextlib

import numpy as np
import pytest

from client.daemon_kit import DIGEST, HPARAMS, RUN
from client.round_kit import (
    FED,
    KEYS,
    ORDER,
    SERVER,
    TERMS,
    fit,
    make,
    registry_part,
    unguard,
)
from fcil_adapters.describe import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client import outbox, rounds
from fcil_client.downloads import IN_MEMORY_BYTES, Downloads
from fcil_client.jobs import Jobs
from fcil_client.notes import Notes
from fcil_client.rounds import read_registry
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.assembly import Assembly
from fcil_protocol.envelope import Core, seal, wrap_key
from fcil_protocol.errors import CorruptFile, DiskFull, SchemaMismatch
from fcil_protocol.messages import Chunk, PartRef, Parts, Received, Want
from fcil_protocol.payload import Payload, pack

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
    monkeypatch.setattr(rounds.registry, "find_exchange", lambda *_: exchange)


def kept(home):
    return {p.stem for name in ("outbox", "provisional") for p in (home.directory / name).iterdir()}


def test_an_update_is_kept_with_the_state_it_came_with(home, enrolment, tmp_path, stateful):
    digest = upload(home, enrolment, tmp_path)
    assert kept(home) == {digest}
    assert home.settle(digest, counted=True)


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_update_that_finds_no_room_leaves_nothing_behind(
    home, enrolment, tmp_path, stateful, monkeypatch, fails_at
):
    """Neither its note nor its state: the round is declined as a whole."""

    def full(*_args):
        raise DiskFull("no room.")

    monkeypatch.setattr(outbox, ("write_atomic", "write_envelope")[fails_at], full)
    with pytest.raises(DiskFull):
        upload(home, enrolment, tmp_path)
    assert kept(home) == set()


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


def sealed_part(size):
    core = Core(
        protocol=PROTOCOL_VERSION, federation=FED, run=RUN, direction="broadcast",
        sender="server", sender_key=SERVER.public.fingerprint, recipient="client",
        method=METHOD.name, schema=DIGEST, task=0, round=0, kind="train", base=0, part="current",
    )  # fmt: skip
    sealed, key = seal(b"x" * size, core, SERVER, chunk_bytes=CHUNK)
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
    before = Assembly(fetching.parsed, path=home.incoming_path(fetching.ref.digest))
    for index in range(len(fetching.parsed.hashes)):
        before.put(index, fetching.stored.body[index * CHUNK : (index + 1) * CHUNK])
    assert fetching.header() is True
    assert home.part_path(fetching.ref.digest).exists()
    assert [m for m in fetching.sent if isinstance(m, Want) and m.chunks] == []


def test_a_new_part_is_complete_with_its_last_chunk(home, enrolment):
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    assert fetching.header() is False
    *first, last = range(len(fetching.parsed.hashes))
    assert [fetching.chunk(i) for i in first] == [False] * len(first)
    assert fetching.chunk(last)


def test_what_arrived_of_parts_that_are_no_longer_named_is_removed(home, enrolment):
    fetching = Fetching(home, enrolment, 2 * IN_MEMORY_BYTES)
    fetching.header()
    assert home.incoming_path(fetching.ref.digest).exists()
    fetching.downloads.start([])
    assert not home.incoming_path(fetching.ref.digest).exists()
