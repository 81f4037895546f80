"""Ledgers for the tests of the page, made without processes: a small run, a long one, a crowd.

Each function writes a whole ledger at ``path`` (which must not exist) and returns it open; the
caller closes it. All of them are the same on every machine: ids come from names, times from a
clock that stands still.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sample_run
from fcil_protocol.ids import ClientId, RoundKey, RunId, UpdateId, named_client_id
from fcil_server.ledger.enums import Answer, Cause, Direction, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.classes import ClassRegistry
from sample_run import ALICE, BOB, GONE, RUN, Clock, digest

NOW = 1_767_322_800.0  # unix seconds at which the first row is written
OPEN_KEY = RoundKey(RUN, 3, "train", 0)
LONG_RUN = RunId("r20260103-000000-beef")
# What somebody may call a device to hurt who looks at it. Each is a name that enrolment takes.
HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(2)'>",
    "</script><script>alert(3)</script>",
    "javascript:alert(4)",
    "{{ 7 * 7 }} {% raw %}",
    "' onmouseover='alert(5)",
    "&lt;b&gt; &amp; &#x41;",
    "😀 лаб 実験 é",
    "שלום مرحبا (12)",
    "w" * 128,
    "a  b" + " " * 20 + "c",
    "%00%0d%0aSet-Cookie: x=y",
)


# The small run.


def small(path: Path, *, running: bool = True) -> Ledger:
    """Write `sample_run`, with refused messages, events and operators' acts.

    3 tasks of 2 classes, 3 clients (``gone`` declined once and was lost once), kernel bytes and
    evaluations. ``running``: a fourth task is open with its first training round, which alice has
    answered; one class waits for its task.
    """
    clock = Clock(NOW)
    ledger = sample_run.build(path, clock=clock)
    ledger.refusals.add(GONE, "bad_signature", "the update's signature does not match.")
    ledger.refusals.add(None, "unknown_client", "no client has this key.")
    ledger.refusals.add(BOB, "schema", "expected tensor head (10, 192), got (9, 192).")
    for level, code, text, client in (
        ("info", "task", "task 2 is learned", None),
        ("warning", "lost", "gone is away for 30 s. Look at its log; it may come back.", GONE),
        ("error", "worker", "the worker ended by signal 9. It is started again.", None),
    ):
        clock.now += 1
        ledger.events.add(level, code, text, run=RUN, client=client)
    ledger.audit.add("uid 1000", "pause")
    ledger.audit.add("uid 1000, page", "resume")
    if running:
        _open_round(ledger, clock)
    return ledger


def _open_round(ledger: Ledger, clock: Clock) -> None:
    ledger.runs.set_status(RUN, RunStatus.RUNNING)
    registry = ClassRegistry(ledger, RUN)
    registry.announce(BOB, ["fox", "owl"])
    clock.now += 1
    registry.open_task(3)
    registry.announce(ALICE, ["<b>walrus</b>"])
    ledger.rounds.open(OPEN_KEY, asked=(ALICE, BOB, GONE), base_state=9, remaining_s=600.0)
    clock.now += 2
    with ledger.transaction():
        ledger.updates.accept(
            OPEN_KEY,
            ALICE,
            update_id=UpdateId(digest("open alice")),
            samples=100,
            tensor_bytes=600_000,
            sealed_bytes=601_500,
        )
    ledger.answers.set(OPEN_KEY, GONE, Answer.DECLINED, "on battery")
    for client in (ALICE, BOB):
        ledger.clients.mark_seen(client)


def live(now: float = NOW + 100) -> dict[str, Any]:
    """Return what the control op ``live`` says in the middle of `small`'s open round."""
    work = ["train", 30, 100]
    return {
        **{k: v for k, v in sample_run.LIVE.items() if k != "here"},
        "now": now,
        "run": RUN,
        "mode": "running",
        "waiting_for": "",
        "task": OPEN_KEY.task,
        "kind": OPEN_KEY.kind,
        "round": {
            "kind": OPEN_KEY.kind,
            "task": OPEN_KEY.task,
            "round": OPEN_KEY.round,
            "rounds": 2,
            "phase": "collecting",
            "mode": "running",
            "waiting_for": "",
            "opened_at": now - 45.0,
            "remaining_s": 555.0,
            "deadline_s": 600.0,
            "quorum": 2,
            "take": 0,
            "asked": 3,
            "answered": 1,
            "declined": 1,
            "lost": 0,
            "received_bytes": 854_000,
            "expected_bytes": 1_208_000,
            "offered": 2,
            "clients": [
                _at_work(BOB, "bob", "none", progress=work, received=250_000),
                _at_work(ALICE, "alice", "updated", received=604_000),
                _at_work(GONE, "gone", "declined", reason="on battery"),
            ],
            "more": 0,
        },
        "peers": {
            ALICE: _peer("alice", "ready"),
            BOB: _peer("bob", "ready", progress=work),
            GONE: _peer("gone", "resting", why="on battery"),
        },
        "relays": [],
        "notes_last": 12,
    }


def _at_work(
    client: ClientId,
    name: str,
    answer: str,
    *,
    reason: str = "",
    progress: Sequence[Any] | None = None,
    received: int = 0,
) -> dict[str, Any]:
    return {
        "id": client,
        "name": name,
        "here": True,
        "answer": answer,
        "reason": reason,
        "progress": progress,
        "received": received,
        "expected": 604_000 if received else None,
        "paused": False,
    }


def _peer(
    name: str, state: str, *, progress: Sequence[Any] | None = None, why: str = ""
) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "progress": progress,
        "paused": False,
        "images": 240,
        "classes": 4,
        "agreement": 1e-6,
        "device": "x86-64, 8 cores",
        "package": "0.1.0",
        "why": why,
    }


# A long run.


def long(path: Path, *, rounds: int = 5_000, tasks: int = 40, clients: int = 6) -> Ledger:
    """Write a run of many rounds in many tasks of two classes; its last task is still open.

    A task is prepare, training rounds and evaluate. Every 50th round one client is lost, every
    77th one declines, every 200th an update is excluded. Accuracy falls slowly with age.
    """
    assert rounds % tasks == 0
    clock = Clock(NOW)
    ledger = Ledger(path, clock=clock)
    names = [f"device-{k:02}" for k in range(clients)]
    ids = [named_client_id(name) for name in names]
    _members(ledger, dict(zip(ids, names, strict=True)))
    sample_run.add_run(ledger, LONG_RUN)
    per_task = rounds // tasks
    kinds = [("prepare", 0), *(("train", k) for k in range(per_task - 2)), ("evaluate", 0)]
    keys = [RoundKey(LONG_RUN, t, kind, k) for t in range(tasks) for kind, k in kinds]
    with ledger.transaction():
        _fill(ledger, "classes", _classes(tasks))
        _fill(ledger, "tasks", _tasks(tasks, per_task))
        _fill(ledger, "rounds", [_closed(key, seq, ids) for seq, key in enumerate(keys)])
        _fill(ledger, "updates", [u for s, k in enumerate(keys) for u in _updates(k, s, ids)])
        _fill(ledger, "answers", [a for s, k in enumerate(keys) for a in _answers(k, s, ids)])
        _fill(ledger, "bytes", [b for s, k in enumerate(keys) for b in _bytes(k, s, ids)])
        _fill(ledger, "evaluations", [e for t in range(tasks - 1) for e in _tests(t, ids)])
        _fill(ledger, "events", [_event(seq, ids) for seq in range(0, rounds, 10)])
    clock.now += rounds * 12.0
    return ledger


def _closed(key: RoundKey, seq: int, ids: Sequence[ClientId]) -> dict[str, Any]:
    train = key.kind != "evaluate"
    return {
        **key._asdict(),
        "seq": seq,
        "opened_at": NOW + 12.0 * seq,
        "closed_at": NOW + 12.0 * seq + 10.0 + seq % 7 / 10,
        "remaining_s": 590.0,
        "asked": json.dumps(list(ids)),
        "reopened": 0,
        "outcome": "done",
        "why": "answered",
        "base_state": seq,
        "new_state": seq + 1 if train else None,
        "phases": json.dumps({"collect_s": 9.0 + seq % 7 / 10, "aggregate_s": 0.3}),
        "metrics": "{}",
    }


def _silent(seq: int, ids: Sequence[ClientId]) -> dict[ClientId, tuple[str, str]]:
    """Return who did not answer a round, and why."""
    found: dict[ClientId, tuple[str, str]] = {}
    if seq % 50 == 49:
        found[ids[seq // 50 % len(ids)]] = ("lost", "away for 30 s")
    if seq % 77 == 76:
        found[ids[-1]] = ("declined", "on battery")
    return found


def _answers(key: RoundKey, seq: int, ids: Sequence[ClientId]) -> Iterable[dict[str, Any]]:
    for client, (answer, reason) in _silent(seq, ids).items():
        said = {"client": client, "answer": answer, "reason": reason, "at": NOW + 12.0 * seq + 9}
        yield {**key._asdict(), **said}


def _updates(key: RoundKey, seq: int, ids: Sequence[ClientId]) -> Iterable[dict[str, Any]]:
    silent = _silent(seq, ids)
    for k, client in enumerate(ids):
        out = seq % 200 == 199 and k == 0
        if client not in silent:
            yield {
                **key._asdict(),
                "client": client,
                "update_id": f"{seq:032x}{k:032x}",
                "accepted_at": NOW + 12.0 * seq + 5 + k / 10,
                "samples": 100 + k,
                "tensor_bytes": 300_000,
                "sealed_bytes": 301_500,
                "status": "excluded" if out else "counted",
                "reason": "its norm is 40 times the round's median" if out else "",
            }


def _bytes(key: RoundKey, seq: int, ids: Sequence[ClientId]) -> Iterable[dict[str, Any]]:
    size = {"prepare": 24_000, "train": 300_000, "evaluate": 96}[key.kind] + seq % 13 * 1_000
    for client in ids:
        for way, cause, tensor in (
            (Direction.UP, Cause.UPDATE, size),
            (Direction.DOWN, Cause.BROADCAST, size // 2),
        ):
            yield _flow(key, client, way, cause, tensor, tensor + 3_000)
            yield _flow(key, client, way, Cause.CONNECTION, 0, tensor + 3_200)


def _flow(
    key: RoundKey, client: ClientId, way: Direction, cause: Cause, tensor: int, wire: int
) -> dict[str, Any]:
    kernel = cause is Cause.CONNECTION
    return {
        **key._asdict(),
        "client": client,
        "direction": way.value,
        "cause": cause.value,
        "source": "kernel" if kernel else "predicted",
        "tensor": tensor,
        "sealed": 0 if kernel else tensor + 1_500,
        "application": 0 if kernel else tensor + 2_000,
        "wire": wire,
        "link": wire + 5_000 if kernel else 0,
    }


def _classes(tasks: int) -> list[dict[str, Any]]:
    return [
        {
            "run": LONG_RUN,
            "key": f"class-{k:03}",
            "name": f"Class-{k:03}",
            "class_id": k,
            "task": k // 2,
            "seen_at": NOW,
        }
        for k in range(2 * tasks)
    ]


def _tasks(tasks: int, per_task: int) -> list[dict[str, Any]]:
    length = 12.0 * per_task
    return [
        {
            "run": LONG_RUN,
            "task": t,
            "class_ids": json.dumps([2 * t, 2 * t + 1]),
            "opened_at": NOW + t * length,
            "closed_at": NOW + (t + 1) * length if t < tasks - 1 else None,
        }
        for t in range(tasks)
    ]


def _tests(task: int, ids: Sequence[ClientId]) -> Iterable[dict[str, Any]]:
    for client in ids:
        for class_id in range(2 * task + 2):
            age = task - class_id // 2
            right = round(20 * (0.55 + 0.4 * math.exp(-age / 12)) - class_id % 3)
            yield {
                "run": LONG_RUN,
                "task": task,
                "client": client,
                "class_id": class_id,
                "correct": right,
                "total": 20,
            }


def _event(seq: int, ids: Sequence[ClientId]) -> dict[str, Any]:
    lost = seq % 50 == 40
    return {
        "at": NOW + 12.0 * seq,
        "level": "warning" if lost else "info",
        "run": LONG_RUN,
        "client": ids[seq // 50 % len(ids)] if lost else None,
        "code": "lost" if lost else "round",
        "text": f"round {seq}: " + ("a client is away for 30 s." if lost else "done."),
    }


# A crowd.


def crowd(path: Path, *, members: int = 1_000) -> Ledger:
    """Write a federation of many members, the first of which are called `HOSTILE_NAMES`.

    Its one run has a task of classes with those names, and one open round that asks everybody:
    every second member has answered, every tenth declined. Every 20th is revoked, every 30th
    never came, and the first hundred had messages refused.
    """
    ledger = Ledger(path, clock=Clock(NOW))
    names = [*HOSTILE_NAMES, *(f"member-{k:04}" for k in range(members))][:members]
    ids = [named_client_id(name) for name in names]
    _members(ledger, dict(zip(ids, names, strict=True)))
    sample_run.add_run(ledger)
    classes = [n for n in HOSTILE_NAMES if n.isprintable()][:10]
    ClassRegistry(ledger, RUN).announce(ids[0], classes)
    ClassRegistry(ledger, RUN).open_task(0)
    key = RoundKey(RUN, 0, "train", 0)
    asked = [c for k, c in enumerate(ids) if k % 20]
    ledger.rounds.open(key, asked=asked, base_state=1, remaining_s=600.0)
    answered = [c for k, c in enumerate(asked) if k % 2]
    with ledger.transaction():
        _fill(ledger, "updates", [u for u in _updates(key, 0, asked) if u["client"] in answered])
        declined = {"answer": "declined", "reason": "</td><script>alert(6)</script>", "at": NOW}
        said = [{**key._asdict(), "client": c, **declined} for c in asked[::10]]
        _fill(ledger, "answers", said)
        _fill(ledger, "bytes", list(_bytes(key, 0, answered)))
        _fill(
            ledger,
            "refusals",
            [{"at": NOW, "client": c, "code": "schema", "reason": f"no: {c}"} for c in ids[:100]],
        )
        ledger.events.add("error", "<b>", HOSTILE_NAMES[1], run=RUN, client=ids[0])
    return ledger


def _members(ledger: Ledger, names: Mapping[ClientId, str]) -> None:
    rows = []
    for k, (client, name) in enumerate(names.items()):
        key = digest(name).encode()
        crowd = len(names) > 100
        rows.append(
            {
                "client_id": client,
                "name": name,
                "curve": key[:32],
                "signing": key[32:],
                "sealing": key * 19,
                "enrolled_at": NOW,
                "revoked_at": NOW + 60 if crowd and k % 20 == 0 else None,
                "revoked_why": "<i>sold</i>" if crowd and k % 20 == 0 else "",
                "last_seen": None if crowd and k % 30 == 0 else NOW + k % 500,
                "device": "x86-64, 8 cores",
            }
        )
    with ledger.transaction():
        _fill(ledger, "clients", rows)


def _fill(ledger: Ledger, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert many rows of the same columns."""
    if rows:
        columns, marks = ", ".join(rows[0]), ", ".join("?" * len(rows[0]))
        sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        ledger.database.execute_each(sql, [tuple(row.values()) for row in rows])
