"""What a round costs in the ledger and in ``rounds.jsonl`` is the same after 2,000 others.

Counted are the steps of SQLite's machine and the bytes read, not seconds.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import sample_run
from byte_counts import add_bytes
from fcil_protocol.ids import RoundKey, UpdateId
from fcil_server.ledger.enums import Cause, Direction, Outcome
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.sinks import follower
from fcil_server.reports.sinks.contract import Options
from fcil_server.reports.sinks.follower import Follower
from fcil_server.reports.sinks.registry import Chosen
from fcil_server.rounds.closing import needed_updates
from sample_run import ALICE, BOB, RUN, digest

LAST = 9  # round of each task
ROUNDS = 2_005  # as deep in its task as the 15th, with which it is compared


def key_of(number: int) -> RoundKey:
    return RoundKey(RUN, number // 10, "train", number % 10)


class Rounds:
    """Records one round after the other, as a server does."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.ledger = ledger
        self.folder = folder
        self.count = 0

    def record(self) -> RoundKey:
        """Open a round, take two updates, combine and close."""
        number, ledger = self.count, self.ledger
        self.count += 1
        key = key_of(number)
        with ledger.transaction():
            if key.round == 0:
                ledger.tasks.open(RUN, key.task, [key.task])
            ledger.rounds.open(key, asked=[ALICE, BOB], base_state=number)
            for client in (ALICE, BOB):
                update = UpdateId(hashlib.sha256(f"{client}{number}".encode()).hexdigest())
                assert ledger.clients.may_join(client)
                assert not ledger.updates.holds(RUN, update)
                assert ledger.updates.get(key, client) is None
                ledger.updates.accept(
                    key, client, update_id=update, samples=3, tensor_bytes=8, sealed_bytes=99
                )
                for way in Direction:
                    add_bytes(ledger, way, Cause.UPDATE, round_key=key, client=client, wire=9)
            ledger.updates.mark_counted(key)
            ledger.states.add(key, number + 1, digest(f"s{number + 1}"), digest(f"s{number}"))
            ledger.rounds.close(key, Outcome.DONE, why="all", new_state=number + 1)
            if key.round == LAST:
                ledger.evaluations.add(RUN, key.task, ALICE, {key.task: (1, 1)})
                ledger.tasks.close(RUN, key.task)
        return key

    @property
    def newest(self) -> RoundKey:
        return key_of(self.count - 1)

    def tell(self, key: RoundKey) -> None:
        """Do what follows a close."""
        run_directory.append_round(self.ledger, key, self.folder)
        assert len(needed_updates(self.ledger, RUN)) == 2
        for client in (ALICE, BOB):
            judged = self.ledger.updates.last_judged(RUN, client)
            assert judged is not None
            assert (judged.task, judged.round) == (key.task, key.round)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rounds]:
    folder = tmp_path_factory.mktemp("long")
    with Ledger(folder / "ledger.sqlite") as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
        yield Rounds(ledger, folder)


def steps(ledger: Ledger, call: Callable[[], object]) -> int:
    """Count the steps of SQLite's machine."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    ledger.database._db.set_progress_handler(step, 1)
    try:
        call()
    finally:
        ledger.database._db.set_progress_handler(None, 1)
    return count


class Deaf:
    """A sink that takes everything and keeps nothing."""

    name, packages, extra, Options = "deaf", (), "", Options

    def open(self, *_given: object) -> Deaf:
        return self

    def scalars(self, *_given: object, **_more: object) -> None:
        pass

    flush = finish = close = scalars


@pytest.mark.full
def test_a_round_costs_the_same_after_2000_others(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "Ledger", lambda *_, **__: nullcontext(rounds.ledger))
    sink = Follower(rounds.folder, RUN, Chosen(Deaf(), Options()))
    costs = []
    for before in (15, ROUNDS):
        with rounds.ledger.transaction():
            while rounds.count < before - 1:
                rounds.record()
        rounds.tell(rounds.record())  # the file is written anew, and is whole from here on
        sink.catch_up()
        recording = steps(rounds.ledger, rounds.record)
        telling = steps(rounds.ledger, lambda: rounds.tell(rounds.newest))
        costs.append((recording, telling, steps(rounds.ledger, sink.catch_up)))
    assert costs[1] == pytest.approx(costs[0], rel=0.05)
    told = [
        json.loads(x)["seq"]
        for x in (rounds.folder / run_directory.ROUNDS).read_text().splitlines()
    ]
    assert told == list(range(ROUNDS + 1))


class Watched(io.BytesIO):
    """Counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


@pytest.mark.parametrize("width", [10, 5_000, 100_000])
def test_of_a_long_file_only_the_last_line_is_read(width: int) -> None:
    text = "".join(json.dumps({"seq": n, "x": "y" * width}) + "\n" for n in range(50))
    file = Watched(text.encode())
    assert run_directory._last_seq(file) == 49
    assert file.count <= 4 * width + 4096


@pytest.mark.parametrize(
    ("held", "seq"),
    [
        (b"", None),
        (b'{"seq": 7}\n', 7),
        (b'{"seq": 7}', -1),
        (b'{"seq": 7}\n{"seq"', -1),
        (b'{"seq": 7}\n\n', -1),
        (b"\n", -1),
        (b'{"seq": "x"}\n', -1),
        (b"[7]\n", -1),
        (b"\xff" * 9_000, -1),
    ],
)
def test_a_last_line_that_is_none_is_seen(held: bytes, seq: int | None) -> None:
    assert run_directory._last_seq(io.BytesIO(held)) == seq
