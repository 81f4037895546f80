"""What must hold after a soak, each as a list of sentences about what does not."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import processes

from fcil_protocol.ids import RunId
from fcil_protocol.storage.spool import Spool
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, UpdateStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

ORPHAN_S = 20.0  # for a worker whose daemon was killed to notice and end
MEMORY_SLACK_MB = 6.0  # between the medians of the first and the last third
DESCRIPTOR_SLACK = 3
SHORTEST_LIFE_S = 120.0  # before that memory grows because the first rounds fill caches


@dataclass
class Sample:
    """One look at a daemon."""

    at: float  # seconds since the soak began
    mb: float
    fds: int


@dataclass
class Watch:
    """Memory and descriptors of daemons over time, by name and process."""

    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)

    def look(self, name: str, pid: int, at: float) -> None:
        mb, fds = processes.status_mb(pid), processes.descriptors(pid)
        if mb is not None and fds is not None:
            self.samples.setdefault((name, pid), []).append(Sample(at, mb, fds))

    def longest(self, name: str) -> list[Sample]:
        """What was seen of the process of this name that lived longest."""
        lives = [s for (n, _), s in self.samples.items() if n == name]
        return max(lives, key=lambda s: s[-1].at - s[0].at, default=[])


def memory_faults(name: str, life: list[Sample], rows: list[tuple[str, str]]) -> list[str]:
    """Compare the first and the last third of one process's life, its start left out."""
    if not life or life[-1].at - life[0].at < SHORTEST_LIFE_S:
        rows.append((f"{name}: memory", "lived too short to say"))
        return []
    life = life[len(life) // 10 :]  # the first rounds fill caches and load what is used
    third = len(life) // 3
    first, last = (statistics.median(s.mb for s in part) for part in (life[:third], life[-third:]))
    slope = statistics.linear_regression([s.at for s in life], [s.mb for s in life]).slope * 60
    minutes = (life[-1].at - life[0].at) / 60
    text = f"first third {first:.1f} MB, last third {last:.1f} MB, slope {slope:+.3f} MB/min"
    rows.append((f"{name}: memory of one process over {minutes:.1f} min", text))
    return [f"{name} grew from {first:.1f} to {last:.1f} MB"] * (last > first + MEMORY_SLACK_MB)


def descriptor_faults(name: str, at_rest: list[int], rows: list[tuple[str, str]]) -> list[str]:
    """Compare open files at the ends of runs with those after the undisturbed run."""
    rows.append(
        (f"{name}: open files after the undisturbed run, then", f"{at_rest[0]}, {at_rest[1:]}")
    )
    most = max(at_rest)
    return [f"{name} leaked descriptors: {at_rest}"] * (most > at_rest[0] + DESCRIPTOR_SLACK)


def journal_events(federation: LocalFederation) -> list[dict[str, object]]:
    """Every line of every client's journal of what left."""
    homes = (federation.directory / "state" / "fcil").glob("*/*/egress*.jsonl")
    return [json.loads(line) for path in homes for line in path.read_text().splitlines()]


def run_faults(federation: LocalFederation, run: RunId, clients: int) -> list[str]:
    """Every client counted once in every round, and everything acknowledged counted."""
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        rounds = ledger.rounds.all(run)
        updates = {row.key: ledger.updates.of_round(row.key) for row in rounds}
        answers = {row.key: ledger.answers.of_round(row.key) for row in rounds}
    faults = []
    for row in rounds:
        name = f"{run} task {row.task} {row.kind} {row.round}"
        if row.outcome is not Outcome.DONE:
            faults.append(f"{name} ended {row.outcome}")
        faults += [f"{name}: {a.client} {a.answer} ({a.reason})" for a in answers[row.key]]
        counted = [u.client for u in updates[row.key] if u.status is UpdateStatus.COUNTED]
        if sorted(counted) != sorted(row.asked):
            faults.append(f"{name}: asked {len(row.asked)}, counted {len(counted)}")
        # Somebody may have no test image of a task; to train on there is something everywhere.
        if row.kind == "train" and len(row.asked) != clients:
            faults.append(f"{name}: only {len(row.asked)} of {clients} clients were asked")
    counted_ids = Counter(u.update_id for many in updates.values() for u in many)
    faults += [f"{run}: {u} counted {n} times" for u, n in counted_ids.items() if n != 1]
    events = journal_events(federation)
    sealed = {e["digest"] for e in events if e["event"] == "sealed" and e["run"] == run}
    kinds = {e["digest"]: e["kind"] for e in events if e["event"] == "sealed"}
    acked = {e["digest"] for e in events if e["event"] == "acked"}
    faults += [
        f"{run}: {digest} was acknowledged and is not counted"
        for digest in sorted(str(d) for d in (acked & sealed) - set(counted_ids))
        if kinds[digest] != "inventory"
    ]
    return faults


def final_state(federation: LocalFederation, run: RunId) -> tuple[int, str]:
    """Number and digest of the newest state; the digest covers every byte."""
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        newest = ledger.states.newest(run)
    assert newest is not None, "the run is done"
    return newest.state, newest.digest


def leftover_faults(federation: LocalFederation) -> list[str]:
    """Files that should be gone once every daemon has ended with nothing to do."""
    faults = [f"left: {p}" for p in federation.directory.rglob("*.tmp")]
    for pattern in ("state/fcil/*/*/{}", "federation/runs/*/{}"):
        for name in ("outbox", "incoming", "provisional"):
            found = federation.directory.glob(f"{pattern.format(name)}/*")
            faults += [f"left: {p.relative_to(federation.directory)}" for p in found]
    for folder in federation.federation.glob("runs/*/spool"):
        spool = Spool(folder)
        faults += [f"left in {folder}: update {key}" for key in spool.keys()]  # noqa: SIM118
        spool.close()
    return faults


def orphan_faults(federation: LocalFederation) -> list[str]:
    """Processes of the federation that outlived it."""
    ends = time.monotonic() + ORPHAN_S
    while True:
        left = processes.with_environment("XDG_STATE_HOME", str(federation.directory / "state"))
        if not left or time.monotonic() > ends:
            return [f"process {pid} outlived its daemon" for pid in left]
        time.sleep(0.2)
