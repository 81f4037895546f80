"""A small but realistic ledger: 3 clients, 3 tasks of 2 classes, prepare, 2 x train, evaluate.

Client ``gone`` declines one round and is lost in another, one update is excluded, the first
client's class names try to be HTML. Evaluation numbers are chosen so that the matrix is

    after task 0:  90.0
    after task 1:  70.0  80.0
    after task 2:  60.0  85.0  95.0

over all clients pooled, 40 images per class and evaluation.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from byte_counts import add_bytes
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId, UpdateId
from fcil_server.ledger.enums import Answer, Cause, CountSource, Direction, Outcome, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry

RUN = RunId("r20260102-030405-abcd")
ALICE, BOB, GONE = (ClientId(c * 26) for c in "abc")
CLIENTS = (ALICE, BOB, GONE)
HTML_NAME = '<script>alert("x")</script>'
TASKS = ((HTML_NAME, "Käse"), ("cat", "dog"), ("maple", "oak"))
MATRIX = ((90.0,), (70.0, 80.0), (60.0, 85.0, 95.0))
STEPS = (("prepare", 0), ("train", 0), ("train", 1), ("evaluate", 0))
# What its server says of itself in the middle of the last task (`daemon` status).
LIVE = {
    "pid": 1,
    "started_at": 1_767_322_000.0,
    "phase": "collecting",
    "task": 2,
    "kind": "train",
    "round": 1,
    "remaining_s": 12.5,
    "asked": 3,
    "answered": 2,
    "connected": 3,
    "ready": 2,
    "here": {ALICE: True, BOB: False},
    "intake": [
        {"pid": 3, "connections": 2, "updates": 5},
        {"pid": None, "connections": 0, "updates": 1},  # it is starting again
    ],
    "worker_pid": 2,
    "worker_starts": 2,
    "worker_deaths": 1,
    "loop_lag_max_s": 0.05,
    "loop_lag_p99_s": 0.01,
}


class Clock:
    """Unix seconds that pass only when told."""

    def __init__(self, now: float = 1_767_322_800.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def digest(text: str) -> Digest:
    """Return some digest."""
    return Digest(hashlib.sha256(text.encode()).hexdigest())


def add_clients(ledger: Ledger) -> None:
    """Enrol three clients."""
    for client, name in zip(CLIENTS, ("alice", "bob", "gone"), strict=True):
        key = digest(name).encode()[:32]
        ledger.clients.add(
            client, name, curve=key, signing=key[::-1], sealing=key * 38, device="x86-64, 8 cores"
        )


def add_run(ledger: Ledger, run: RunId = RUN) -> None:
    """Start a run."""
    ledger.runs.add(
        run,
        method="pilora",
        method_version="1",
        config='[method]\nname = "pilora"\n',
        hparams={"rank": 4, "lr": 2e-3},
        backbone={"name": "embedded", "dim": 192, "digest": digest("backbone")},
        schema_digest=digest("schema"),
        seed=1993,
        environment={"python": "3.11", "threads": 2},
    )


def build(path: Path, *, clock: Clock | None = None) -> Ledger:
    """Write the whole sample run and return its open ledger."""
    clock = clock or Clock()
    ledger = Ledger(path, clock=clock)
    add_clients(ledger)
    add_run(ledger)
    registry = ClassRegistry(ledger, RUN)
    add_bytes(ledger, Direction.UP, Cause.HANDSHAKE, client=ALICE, application=600, wire=900)
    state = 0
    for task, names in enumerate(TASKS):
        registry.announce(ALICE, names)
        clock.now += 1
        info = registry.open_task(task)
        for kind, number in STEPS:
            state = _round(ledger, clock, RoundKey(RUN, task, kind, number), state)
        _evaluate(
            ledger, task, [c for t in range(task + 1) for c in ledger.tasks.all(RUN)[t].class_ids]
        )
        assert info.index == task
        ledger.tasks.close(RUN, task)
    ledger.runs.set_status(RUN, RunStatus.DONE)
    return ledger


def _round(ledger: Ledger, clock: Clock, key: RoundKey, state: int) -> int:
    ledger.rounds.open(key, asked=CLIENTS, base_state=state, remaining_s=600.0)
    senders = list(CLIENTS)
    if key.task == 1 and key.kind == "train":
        senders.remove(GONE)
        answer = (Answer.DECLINED, "on battery") if key.round == 0 else (Answer.LOST, "gone 30 s")
        ledger.answers.set(key, GONE, *answer)
    tensor = {"prepare": 24_000, "train": 310_000, "evaluate": 96}[key.kind] * (key.task + 2) // 2
    for i, client in enumerate(senders):
        clock.now += 2
        with ledger.transaction():
            ledger.updates.accept(
                key,
                client,
                update_id=UpdateId(digest(f"{key}{client}")),
                samples=100 + i,
                tensor_bytes=tensor,
                sealed_bytes=tensor + 1_500,
                train_loss=1.5 / (1 + key.round + i) if key.kind == "train" else None,
                train_accuracy=0.5 if key.kind == "train" else None,
            )
        for way, cause, size in (
            (Direction.UP, Cause.UPDATE, tensor),
            (Direction.DOWN, Cause.BROADCAST, tensor * 4 // 3),
        ):
            add_bytes(
                ledger, way, cause, round_key=key, client=client,
                tensor=size, sealed=size + 1_500, application=size + 2_000, wire=size + 3_000,
            )  # fmt: skip
            add_bytes(
                ledger, way, Cause.CONNECTION, round_key=key, client=client,
                source=CountSource.KERNEL, wire=size + 3_100, link=size + 9_000,
                retransmitted=40 if way is Direction.DOWN else 0,
            )  # fmt: skip
    if (key.task, key.kind, key.round) == (2, "train", 1):
        ledger.updates.exclude(key, BOB, "its norm is 40 times the round's median")
    new_state = None
    with ledger.transaction():
        ledger.updates.mark_counted(key)
        if key.kind != "evaluate":
            new_state = state + 1
            parent = digest(f"state {state}") if state else None
            ledger.states.add(key, new_state, digest(f"state {new_state}"), parent)
        phases = {"collect_s": 2.0 * len(senders), "aggregate_s": 0.25}
        ledger.rounds.close(key, Outcome.DONE, new_state=new_state, phases=phases)
    return state if new_state is None else new_state


def _evaluate(ledger: Ledger, task: int, seen: list[int]) -> None:
    """Alice tests 10, Bob 20 and Gone 10 images per class, all with the matrix's accuracy."""
    for client, images in ((ALICE, 10), (BOB, 20), (GONE, 10)):
        counts = {
            c: (round(MATRIX[task][i // 2] / 100 * images), images) for i, c in enumerate(seen)
        }
        counts = {
            c: (_even(task, i, client, right), n)
            for i, (c, (right, n)) in enumerate(counts.items())
        }
        ledger.evaluations.add(RUN, task, client, counts)


def _even(task: int, i: int, client: ClientId, right: int) -> int:
    """Ten images cannot be right by 8.5 or 9.5: alternate between the two classes of a task."""
    half = MATRIX[task][i // 2] % 10 == 5 and client != BOB
    whole = int(MATRIX[task][i // 2] / 10)
    return whole + i % 2 if half else right
