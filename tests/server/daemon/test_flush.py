"""The periodic writes: counts that take long to write are written less often, and always at the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from fcil_server.daemon import flush
from fcil_server.daemon.flush import MOST_OF_LOOP, LedgerFlusher


class Meter:
    """Counts whose writing takes as long as the test says."""

    def __init__(self) -> None:
        self.took_s, self.flushes = 0.0, 0

    async def flush_in_turns(self) -> float:
        self.flushes += 1
        return self.took_s


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch):
    clock, meter = [100.0], Meter()
    monkeypatch.setattr(flush, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    seen: list[str] = []
    coordinator = SimpleNamespace(
        remaining_s=None,
        progress=SimpleNamespace(key=lambda _run: None),
        context=SimpleNamespace(run="r"),
    )
    context = SimpleNamespace(
        byte_meter=meter,
        peers=(SimpleNamespace(client="camera"),),
        link=SimpleNamespace(relays=lambda: ["depot"]),
        run=SimpleNamespace(coordinator=coordinator),
        ledger=SimpleNamespace(long_log=False, clients=SimpleNamespace(touch_all=seen.extend)),
    )
    return SimpleNamespace(
        clock=clock, meter=meter, seen=seen, flusher=LedgerFlusher(context, lambda _e: None)
    )


def test_counts_of_a_few_clients_are_written_every_time(kit):
    for _ in range(3):
        asyncio.run(kit.flusher.run(counts=False))
    assert kit.meter.flushes == 3


def test_counts_that_took_long_wait_until_they_are_a_small_part_of_the_time(kit):
    kit.meter.took_s = 2.0
    asyncio.run(kit.flusher.run(counts=False))
    kit.clock[0] += 2.0 / MOST_OF_LOOP - 1
    asyncio.run(kit.flusher.run(counts=False))
    assert kit.meter.flushes == 1
    kit.clock[0] += 1
    asyncio.run(kit.flusher.run(counts=False))
    assert kit.meter.flushes == 2


def test_the_end_of_a_round_does_not_wait(kit):
    kit.meter.took_s = 2.0
    for _ in range(2):
        asyncio.run(kit.flusher.run())
    assert kit.meter.flushes == 2


def test_connected_relays_are_noted_as_seen_like_clients(kit):
    asyncio.run(kit.flusher.run())
    assert kit.seen == ["camera", "depot"]
