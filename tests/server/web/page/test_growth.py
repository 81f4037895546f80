"""A ledger that grows at random while the page reads it: never another number than a fresh read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import sample_run
from byte_counts import add_bytes
from fcil_protocol.ids import RoundKey, RunId, UpdateId
from fcil_server.ledger.enums import (
    CENTRAL,
    OPENING,
    Answer,
    Cause,
    CountSource,
    Direction,
    RunStatus,
)
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.charts.history import History, frozen
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.traffic.paper_claims import PaperTraffic
from fcil_server.web.page.reader import HistoryReader
from sample_run import CLIENTS, RUN, Clock, digest

KINDS = ("prepare", "train", "train", "evaluate")
SETTLED_S = 200.0  # after which a closed round is not read again
COUNTED = {"rounds", "totals", "members"}  # in which bytes that come late are seen
SEEDS = (12, 23)  # each found a defect


class Growth:
    """Writes into a ledger what a server may write, in an order that the seed says."""

    def __init__(self, ledger: Ledger, clock: Clock, seed: int) -> None:
        self.ledger = ledger
        self.clock = clock
        self.dice = random.Random(seed)
        self.runs = 0
        self.run = RUN
        self.task = -1
        self.step = 0
        self.open: RoundKey | None = None
        self.last: RoundKey | None = None  # closed, and may be opened again
        self.state = 0
        self.begin()

    def begin(self) -> None:
        self.run = RunId(f"r20260102-{self.runs:06}-abcd")
        self.runs += 1
        sample_run.add_run(self.ledger, self.run)
        self.task, self.step, self.open, self.last, self.state = -1, 0, None, None, 0

    def clients(self) -> list[Any]:
        """Return who may still act."""
        return [c.client_id for c in self.ledger.clients.all() if c.curve and c.revoked_at is None]

    def grow(self) -> str:
        acts: list[tuple[int, Callable[[], None]]] = [
            (6, self.pass_time), (10, self.go_on), (8, self.answer), (6, self.count_bytes),
            (2, self.late_bytes), (2, self.note), (1, self.touch), (1, self.refuse),
            (1, self.announce), (1, self.reopen), (1, self.central), (0.3, self.fork),
            (0.2, self.begin_another), (0.6, self.erase), (0.2, self.end),
        ]  # fmt: skip
        (act,) = self.dice.choices([a for _, a in acts], [w for w, _ in acts])
        with self.ledger.transaction():
            act()
        return act.__name__

    def pass_time(self) -> None:
        self.clock.now += self.dice.choice((0.1, 1.0, 7.0, 40.0, 300.0))

    def go_on(self) -> None:
        if self.open is not None:
            self.close()
        elif self.task < 0 or self.step == len(KINDS):
            if self.task >= 0:
                self.ledger.tasks.close(self.run, self.task)
            self.task, self.step = self.task + 1, 0
            for i in (2 * self.task, 2 * self.task + 1):
                key = f"class {i}"
                if key not in {c.key for c in self.ledger.classes.all(self.run)}:
                    self.ledger.classes.add(self.run, key, key, first_seen_by=CLIENTS[0])
                self.ledger.classes.place(self.run, key, class_id=i, task=self.task)
            self.ledger.tasks.open(self.run, self.task, [2 * self.task, 2 * self.task + 1])
            self.add_state(RoundKey(self.run, self.task, OPENING, 0))
        else:
            kind = KINDS[self.step]
            number = KINDS[: self.step].count(kind)
            self.open = RoundKey(self.run, self.task, kind, number)
            self.ledger.rounds.open(self.open, asked=self.clients(), base_state=self.state)
            self.step += 1

    def close(self) -> None:
        assert self.open is not None
        key, end = self.open, self.dice.choice(("done", "done", "short", "skipped"))
        for row in self.ledger.updates.of_round(key):
            if self.dice.random() < 0.2:
                self.ledger.updates.exclude(key, row.client, "too long")
        self.ledger.updates.mark_counted(key)
        if key.kind == "evaluate":
            for row in self.ledger.updates.accepted(key):
                self.test(row.client)
        new = None
        if end == "done" and key.kind != "evaluate":
            new = self.add_state(key)
        phases = {"collect_s": self.dice.random()}
        self.ledger.rounds.close(key, end, new_state=new, phases=phases)
        self.open, self.last = None, key if new is None else None

    def add_state(self, key: RoundKey) -> int:
        self.state += 1
        self.ledger.states.add(key, self.state, digest(f"{self.run} {self.state}"), None)
        return self.state

    def test(self, client: str) -> None:
        classes = range(2 * self.task + 2)
        counts = {c: (self.dice.randrange(11), 10) for c in classes}
        self.ledger.evaluations.add(self.run, self.task, client, counts)

    def central(self) -> None:
        if self.open is None and self.task >= 0:
            self.test(CENTRAL)

    def reopen(self) -> None:
        if self.open is None and self.last is not None and self.step == self.place(self.last) + 1:
            self.ledger.rounds.reopen(self.last, asked=self.clients(), remaining_s=None)
            self.open, self.last = self.last, None

    @staticmethod
    def place(key: RoundKey) -> int:
        return KINDS.index(key.kind) + key.round

    def answer(self) -> None:
        asked = self.clients()
        if self.open is None or not asked:
            return
        client = self.dice.choice(asked)
        if self.ledger.updates.get(self.open, client) is not None:
            return
        if self.dice.random() < 0.3:
            answer = self.dice.choice(list(Answer))
            self.ledger.answers.set(self.open, client, answer, self.dice.choice(("", "why")))
            return
        update = UpdateId(digest(f"{self.open}{client}"))
        self.ledger.updates.accept(
            self.open, client, update_id=update, samples=1, tensor_bytes=1, sealed_bytes=2
        )

    def count_bytes(self) -> None:
        place = self.dice.choice((self.open, self.open, None))
        run = self.run if self.dice.random() < 0.8 else None
        self.add_bytes(place, run)

    def late_bytes(self) -> None:
        closed = [r for r in self.ledger.rounds.all(self.run) if r.closed_at is not None]
        if closed and self.clock.now - (closed[-1].closed_at or 0.0) < SETTLED_S / 2:
            self.add_bytes(closed[-1].key, None)

    def add_bytes(self, key: RoundKey | None, run: RunId | None) -> None:
        kernel = self.dice.random() < 0.4
        sizes = {"wire": self.dice.randrange(1, 2_000), "link": 3_000} if kernel else {
            "tensor": 10, "sealed": 20, "application": 30, "wire": self.dice.randrange(40, 1_000),
        }  # fmt: skip
        add_bytes(
            self.ledger,
            self.dice.choice(list(Direction)),
            Cause.CONNECTION if kernel else self.dice.choice(list(Cause)[:5]),
            round_key=key,
            run=run,
            client=self.dice.choice([*CLIENTS, None]),
            source=CountSource.KERNEL if kernel else CountSource.PREDICTED,
            **sizes,
        )

    def note(self) -> None:
        level = self.dice.choice(("info", "warning", "error"))
        run = self.dice.choice((self.run, None))
        who = self.dice.choice((None, *self.clients()))
        self.ledger.events.add(level, "x", f"bob and {self.dice.random()}", run=run, client=who)

    def touch(self) -> None:
        for client in self.clients()[:1]:
            self.ledger.clients.mark_seen(client)

    def refuse(self) -> None:
        for client in self.clients()[-1:]:
            self.ledger.refusals.add(client, "schema", "alice, bob and gone sent it")

    def announce(self) -> None:
        name = f"name {self.dice.randrange(10_000)}"
        if name not in {c.key for c in self.ledger.classes.all(self.run)}:
            self.ledger.classes.add(self.run, name, name, first_seen_by=CLIENTS[1])

    def erase(self) -> None:
        left = self.clients()
        if left:
            client = self.dice.choice(left)
            self.ledger.clients.revoke(client, "sold")
            self.ledger.clients.erase(client)

    def fork(self) -> None:
        if self.state < 2 or self.open is not None:
            return
        to, source = self.dice.randrange(1, self.state), self.run
        self.run = RunId(f"r20260102-{self.runs:06}-abcd")
        self.runs += 1
        self.ledger.forks.begin(source, to, self.run)
        self.state, self.open, self.last = to, None, None
        self.task = self.ledger.tasks.all(self.run)[-1].task
        done = [self.place(r.key) for r in self.ledger.rounds.all(self.run) if r.task == self.task]
        self.step = max(done, default=-1) + 1

    def begin_another(self) -> None:
        self.ledger.runs.set_status(self.run, RunStatus.STOPPED)
        self.begin()

    def end(self) -> None:
        self.ledger.runs.set_status(self.run, self.dice.choice(list(RunStatus)))


def shown(history: History) -> dict[str, Any]:
    """Return all that a history shows; versions are of who reads."""
    own = ("version", "marks")
    return {f.name: getattr(history, f.name) for f in fields(history) if f.name not in own}


def told(history: History) -> dict[str, Any]:
    """Return what a report says, too."""
    names = ("run", "tasks", "classes", "rounds", "totals", "outside", "pooled", "central")
    people = {m.client: (m.name, m.rounds, m.up, m.down) for m in history.members}
    busy = {c: one for c, one in people.items() if any(one[1:])}
    return {**{name: getattr(history, name) for name in names}, "people": busy}


def whole(reader: HistoryReader, run: RunId | None) -> History:
    found = reader.read(run)
    while found.unread:
        found = reader.read(run)
    return found


def follow(path: Path, seed: int, steps: int) -> None:
    """Read a ledger at each step of its growth; every second seed reads it in small pieces."""
    clock, patience_s = Clock(), 0.0 if seed % 2 else math.inf
    with Ledger(path, clock=clock) as ledger, HistoryReader(path, patience_s=patience_s) as reader:
        reader.database.clock = clock
        sample_run.add_clients(ledger)
        growth = Growth(ledger, clock, seed)
        before = whole(reader, None)
        for _ in range(steps):
            acts = [growth.grow() for _ in range(growth.dice.randrange(1, 6))]
            chosen = growth.dice.choice(ledger.runs.all()).run_id
            for run in growth.dice.sample((chosen, None), 2):
                found = whole(reader, run)
                with HistoryReader(path) as other:
                    other.database.clock = clock
                    fresh = shown(other.read(run))
                late = {name for name, value in shown(found).items() if value != fresh[name]}
                if late and late <= COUNTED:  # bytes that came after a round's end
                    clock.now += SETTLED_S
                    found = whole(reader, run)
                assert shown(found) == fresh, (seed, acts)
                report = frozen(collect(ledger, found.run.run_id))
                assert told(found) == told(report), (seed, acts)
            newest = whole(reader, None)
            assert (shown(newest) == shown(before)) == (newest.version == before.version)
            before = newest


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_while_it_grows_is_reading_it_anew(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("web.page.reader", "reports.charts.history"):
        monkeypatch.setattr(f"fcil_server.{module}.paper_of", lambda _: PaperTraffic())
    follow(tmp_path / "ledger.sqlite", seed, steps=8)
