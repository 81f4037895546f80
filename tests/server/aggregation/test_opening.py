"""An update is opened from the spool once, into memory that the worker maps; damage is named."""

import asyncio
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fcil_adapters.contract import registry
from fcil_adapters.worker.pipe import AsyncPipe, Pipe
from fcil_protocol.envelopes.envelope import seal, wrap_key
from fcil_protocol.envelopes.header import Core
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile
from fcil_protocol.errors import CannotOpen, CorruptFile
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation import aggregation as aggregations
from fcil_server.aggregation.aggregation import (
    LARGE_BYTES,
    TOGETHER_BYTES,
    Aggregation,
    _first_few,
)
from fcil_server.aggregation.combining import Combined
from fcil_server.federation.config import load
from server.update_rows import update_row

SENDER = "a" * 26
PAYLOAD = Payload({"w": np.arange(500_000, dtype=np.float32)}, {"n": 3})


@pytest.fixture
def keys():
    return PrivateKeys.generate()


@pytest.fixture
def aggregation(tmp_path, keys):
    method = registry.load_method("running_mean")
    hparams = registry.make_hparams(method, {})
    made = Aggregation(method, hparams, load(None), log=tmp_path / "worker.log")
    made.use(None, keys, Spool(tmp_path / "spool"))
    yield made
    made._spool.close()


def put(aggregation, keys, payload=PAYLOAD, *, name=None, recipient=None):
    """Spool a sealed update; return its row."""
    core = Core(
        protocol=1, federation="0" * 32, run="r", direction="update", sender=SENDER,
        sender_key=keys.public.fingerprint, recipient="server", method="running_mean", schema="",
        task=0, round=0, kind="train", base=0,
    )  # fmt: skip
    sealed, key = seal(pack(payload), core, keys)
    wrap = wrap_key(key, sealed.header, recipient or keys.public)
    update = name or sealed.parsed.update_id
    aggregation._spool.append(update, sealed.stored(wrap).to_bytes())
    aggregation._spool.sync()
    return SimpleNamespace(client=SENDER, samples=1, update_id=update, record=update)


def test_an_update_reaches_the_worker_as_it_was_sealed(aggregation, keys):
    row = put(aggregation, keys)
    assert pack(aggregation.open_update(row)) == pack(PAYLOAD)

    async def over():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            await AsyncPipe(ours).send({"reply": {}}, aggregation._shared([row]))
            return Pipe(theirs).recv()

    fields, (blob,) = asyncio.run(over())
    assert fields == {"reply": {}}
    assert isinstance(blob, memoryview), "mapped, not copied"
    assert blob == pack(PAYLOAD)
    assert np.array_equal(unpack(blob).tensors["w"], PAYLOAD.tensors["w"])


def test_of_several_those_before_a_damaged_one_come_and_its_error_at_its_own_turn(
    aggregation, keys
):
    payloads = [Payload({"w": np.full(9, k, dtype=np.float32)}) for k in range(3)]
    rows = [put(aggregation, keys, payload) for payload in payloads]
    assert aggregation._shared(rows) == [pack(payload) for payload in payloads]
    rows[1].record = "0" * 64  # no such record
    assert aggregation._shared(rows) == [pack(payloads[0])]
    with pytest.raises(CorruptFile):
        aggregation._shared(rows[1:])


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([1], 1),
        ([TOGETHER_BYTES + 1, 1], 1),
        ([TOGETHER_BYTES - 1, 1, 1], 2),
        ([1, TOGETHER_BYTES, 1], 1),
        ([1000] * 40, 40),
    ],
)
def test_small_updates_go_to_the_worker_together(sizes, count):
    rows = [SimpleNamespace(sealed_bytes=size) for size in sizes]
    assert _first_few(rows) == rows[:count]


def test_its_record_is_read_step_by_step_and_hashed_only_where_it_does_not_open(
    aggregation, keys, monkeypatch
):
    row = put(aggregation, keys, Payload({"w": np.zeros(1_000_000, dtype=np.float32)}))
    sizes, hashed = [], []
    real = EnvelopeFile.read

    def read(file, chunks):
        data = real(file, chunks)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(EnvelopeFile, "read", read)
    monkeypatch.setattr(aggregation._spool, "get", hashed.append)
    aggregation.open_update(row)
    with aggregation._spool.open(row.record, EnvelopeFile) as stored:
        assert sum(sizes) == stored.parsed.sealed_bytes > 4_000_000
    assert max(sizes) <= 1 << 20
    assert not hashed
    row.record = "0" * 64
    with pytest.raises(CorruptFile, match="no record"):
        aggregation.open_update(row)
    assert hashed == [row.record]


@pytest.mark.parametrize("where", [0.0, 0.5, 0.9999])
def test_a_record_that_the_disk_changed_is_told_as_damage_of_the_file(
    aggregation, keys, tmp_path, where
):
    row = put(aggregation, keys)
    (segment,) = (tmp_path / "spool").glob("*.seg")
    body = len(aggregation._spool.get(row.update_id))
    at = os.stat(segment).st_size - body + int(where * body)
    with segment.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptFile, match="is damaged"):
        aggregation._shared([row])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_whole_record_of_another_update_is_not_taken_for_this_one(aggregation, keys):
    with pytest.raises(CorruptFile, match="is another update"):
        aggregation.open_update(put(aggregation, keys, name="0" * 64))


def test_what_was_sealed_for_another_key_is_not_blamed_on_the_disk(aggregation, keys):
    row = put(aggregation, keys, recipient=PrivateKeys.generate().public)
    with pytest.raises(CannotOpen):
        aggregation.open_update(row)


@pytest.mark.parametrize(
    ("sizes", "first"), [((10, LARGE_BYTES - 10), "tidied"), ((5, 6), "asked")]
)
def test_what_large_updates_took_goes_back_before_the_worker_takes_memory(
    aggregation, monkeypatch, sizes, first
):
    done = []
    monkeypatch.setattr(aggregations, "give_back", lambda: done.append("tidied"))

    async def combine(*_):
        done.append("asked")
        return Combined(None)

    monkeypatch.setattr(aggregation, "_combine", combine)
    ctx = SimpleNamespace(kind="train", task=SimpleNamespace(index=0), round=0)
    rows = [replace(update_row(f"c{n}"), sealed_bytes=size) for n, size in enumerate(sizes)]
    asyncio.run(aggregation.aggregate(ctx, None, rows, None))
    assert done[0] == first
    assert done[-1] == "asked"
