"""Sealed parts of a run: what stays, what goes, and what that costs when thousands have their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sample_run
from fcil_adapters.contract import Part
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.messages.messages import Chunk, Want
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation import publisher as publisher_module
from fcil_server.aggregation.publisher import Publisher, Stamp
from fcil_server.aggregation.store import PartStore
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.asking import REGISTRY
from sample_run import RUN

STAMP = Stamp("running_mean==1", "d" * 64, 0, 0, "train", 0)
CLIENTS = [ClientId(f"{n:026d}") for n in range(40)]
SENT: list[tuple[object, object, tuple[bytes, ...]]] = []


@pytest.fixture
def kit(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        sample_run.add_run(ledger)
        store = PartStore(tmp_path / "parts")
        publisher = Publisher(
            federation=FederationId("0123456789abcdef" * 2), run=RUN, keys=PrivateKeys.generate(),
            ledger=ledger, store=store, max_plain_bytes=1 << 20, compact=True,
            send=lambda peer, message, *blobs: SENT.append((peer, message, blobs)) or True,
        )  # fmt: skip
        SENT.clear()
        yield publisher, ledger, store


def part(name: str, *values: float) -> Part:
    return Part(name, Payload({"x": np.array(values, np.float32)}))


async def for_each_client(publisher: Publisher, round_: int) -> list[str]:
    """Publish a part of its own for every client."""
    own = [part(REGISTRY, round_, number) for number in range(len(CLIENTS))]
    refs = [await publisher.publish_for(c, p, STAMP) for c, p in zip(CLIENTS, own, strict=True)]
    return [ref.digest for ref in refs]


def test_the_parts_of_a_task_before_go_together_and_in_one_commit(kit):
    publisher, ledger, store = kit

    async def story() -> None:
        (first,) = await publisher.publish([part("state", 1.0)], STAMP)
        old = await for_each_client(publisher, 1)
        new = await for_each_client(publisher, 2)
        assert {*old, *new, first.digest} == set(store.digests())
        before = ledger.database._commits
        (second,) = await publisher.publish([part("state", 2.0)], STAMP)
        assert {*new, second.digest} == set(store.digests()) == set(ledger.parts.digests(RUN))
        assert ledger.database._commits - before == 2  # a part that is new, and those that go

    asyncio.run(story())


def test_what_stays_in_memory_is_bounded_and_its_size_is_known(kit, monkeypatch):
    publisher, ledger, _store = kit

    async def story() -> None:
        await for_each_client(publisher, 1)
        sizes = [len(p.stored.body) for p in publisher._cache.values()]
        assert len(sizes) == len(CLIENTS)
        assert publisher._cached_bytes == sum(sizes)
        monkeypatch.setattr(publisher_module, "CACHE_BYTES", 3 * sizes[0])
        await for_each_client(publisher, 2)
        assert len(publisher._cache) == 3
        await publisher.publish([part("state", 1.0)], STAMP)
        assert publisher._cached_bytes == sum(len(p.stored.body) for p in publisher._cache.values())

    asyncio.run(story())


def test_a_part_is_not_given_to_a_client_while_others_are_removed(kit, monkeypatch):
    """It could be one of them: then the client would ask for a file that is gone."""
    publisher, _ledger, store = kit
    removing, go_on = asyncio.Event(), asyncio.Event()
    keep_only = store.keep_only

    async def story() -> None:
        shared, other = part(REGISTRY, 1.0), part(REGISTRY, 2.0)
        await publisher.publish_for(CLIENTS[0], shared, STAMP)
        publisher._private[CLIENTS[0]] = (
            await publisher.publish_for(CLIENTS[1], other, STAMP)
        ).digest
        publisher._newest_private = (shared, await publisher._reference(shared, STAMP))
        loop = asyncio.get_running_loop()

        def slowly(kept):
            loop.call_soon_threadsafe(removing.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return keep_only(kept)

        monkeypatch.setattr(store, "keep_only", slowly)
        publishing = asyncio.create_task(publisher.publish([part("state", 1.0)], STAMP))
        await removing.wait()
        asking = asyncio.create_task(publisher.publish_for(CLIENTS[2], shared, STAMP))
        go_on.set()
        await publishing
        assert (await asking).digest in store.digests()

    asyncio.run(story())


def test_clients_that_fetch_a_part_together_are_sent_the_same_bytes_in_memory(kit, monkeypatch):
    publisher, _ledger, _store = kit

    async def story() -> None:
        (ref,) = await publisher.publish(
            [part("state", *np.random.default_rng(5).random(200_000))], STAMP
        )
        stored = publisher._cache[ref.digest].stored
        chunks = range(len(stored.parsed.hashes))
        assert len(chunks) >= 4
        monkeypatch.setattr(publisher._shared, "_most_bytes", 3 * stored.parsed.chunk_bytes)

        def fetch(index: int) -> bytes:
            SENT.clear()
            want = Want(digest=ref.digest, chunks=[index])
            publisher.serve(SimpleNamespace(client=CLIENTS[0]), want, 1 << 20)
            [(_, message, (data,))] = SENT
            assert message == Chunk(digest=ref.digest, index=index)
            assert data == stored.read(range(index, index + 1))
            return data

        first = fetch(0)
        for index in (1, 2):
            fetch(index)
        assert fetch(0) is first, "it was sent lately"
        fetch(3)
        assert fetch(0) is first, "more lately than another one"
        assert fetch(1) is fetch(1)
        assert len(publisher._shared._held) == 3

    asyncio.run(story())
