"""What a client that is ten times slower costs, in synchronous and in asynchronous rounds.

Real processes: a server and five clients on scikit-learn's digits, `fedavg_lora` on the embedded
backbone. The worker of the last client is stopped for nine tenths of the time. Either all clients
hold all digits, or two digits are the slow client's alone. The server tests every state on 400
other images; each federation has the same seconds.

    python scripts/bench/asynchronous.py [--seconds 150] [--repeats 3]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from digit_folders import write_digit
from sklearn.datasets import load_digits

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

MODES: dict[str, dict[str, Any]] = {
    "synchronous, waits for all": {},
    "synchronous, `take = 4`": {"take": 4},
    "synchronous, deadline of 6 s": {"deadline_s": 6, "on_short": "close", "quorum": 1},
    "asynchronous, `take = 4`": {"mode": "async", "take": 4, "max_staleness": 30},
    "asynchronous, `take = 2`": {"mode": "async", "take": 2, "max_staleness": 60},
}
CLIENTS, IMAGES, TESTS = 5, 60, 400
SLOW, RARE = CLIENTS - 1, (8, 9)
PERIOD_S, SHARE = 0.5, 0.1  # of the slow client's worker
AIMS = (0.5, 0.65, 0.8)


@dataclass(frozen=True)
class Result:
    """One federation.

    Attributes:
        reached: accuracy that was aimed at -> seconds from the first round's opening, if reached.
        accuracy: of the last state, 0 to 1.
        states: made.
        slow: updates of the slow client that count.
        staleness: mean of the counted updates, in states.
        sent: bytes of all counted updates.
    """

    reached: dict[float, float]
    accuracy: float
    states: int
    slow: int
    staleness: float
    sent: int


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    aims = " | ".join(f"s to {aim:.0%}" for aim in AIMS)
    print(f"| digits | rounds | {aims} | accuracy | states | slow counted |"
          " staleness | MB sent |")  # fmt: skip
    print("|---|---|" + "---|" * (len(AIMS) + 5), flush=True)
    for skewed in (False, True):
        for name, rules in MODES.items():
            found = [measure(rules, args.seconds, k, skewed=skewed) for k in range(args.repeats)]
            print(_row("8 and 9 slow alone" if skewed else "alike", name, found), flush=True)


def _row(digits: str, name: str, found: list[Result]) -> str:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    reached = []
    for aim in AIMS:
        times = sorted(one.reached.get(aim, float("inf")) for one in found)
        middle = times[len(times) // 2]
        reached.append("-" if middle == float("inf") else f"{middle:.0f}")
    cells = [
        *reached,
        f"{median([one.accuracy for one in found]):.1%}",
        f"{median([one.states for one in found]):.0f}",
        f"{median([one.slow for one in found]):.0f}",
        f"{median([one.staleness for one in found]):.1f}",
        f"{median([one.sent / 1e6 for one in found]):.1f}",
    ]
    return f"| {digits} | {name} | {' | '.join(cells)} |"


def measure(rules: dict[str, Any], seconds: float, seed: int, *, skewed: bool) -> Result:
    """Run one federation for some seconds after its first round has opened."""
    with tempfile.TemporaryDirectory() as directory:
        folders, test = write_images(Path(directory) / "data", seed, skewed=skewed)
        with LocalFederation(Path(directory)) as federation:
            federation.serve(*_settings(rules, test, seed))
            control_socket.ask(federation.federation, "pause")
            for k, folder in enumerate(folders):
                federation.join(f"client-{k}", folder, "--threads", "1")
                federation.until("announced", text=f"client-{k}")
            with slowed(federation.clients[f"client-{SLOW}"].pid):
                control_socket.ask(federation.federation, "resume")
                federation.until("round_opened")
                time.sleep(seconds)
            federation.kill_server()
            return _result(federation, seconds)


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let the workers of a client run for a share of the time."""
    over = threading.Event()

    def send(what: signal.Signals) -> None:
        for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker), what)

    def run() -> None:
        while not over.wait(PERIOD_S * SHARE):
            send(signal.SIGSTOP)
            over.wait(PERIOD_S * (1 - SHARE))
            send(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def write_images(folder: Path, seed: int, *, skewed: bool) -> tuple[list[Path], Path]:
    """Write the clients' folders and the server's, by class."""
    raw = load_digits()
    order = np.random.default_rng(seed).permutation(len(raw.target))
    test, clients = folder / "test", [folder / f"client-{k}" for k in range(CLIENTS)]
    for i in order[:TESTS]:
        write_digit(test, raw, i)
    rest = order[TESTS:]
    if skewed:
        rare = np.isin(raw.target[rest], RARE)
        shares = [*np.array_split(rest[~rare], SLOW), rest[rare]]
    else:
        shares = np.array_split(rest, CLIENTS)
    for client, share in zip(clients, shares, strict=True):
        for i in share[:IMAGES]:
            write_digit(client / "train", raw, i)
    return clients, test


def _settings(rules: dict[str, Any], test: Path, seed: int) -> list[str]:
    given = {
        "method.name": "fedavg_lora",
        "method.preset": "short",
        "method.epochs": 1,
        "method.augment": "jitter",
        "tasks.schedule": "listed",
        "tasks.classes": str([[str(d) for d in range(10)]]).replace("'", '"'),
        "round.rounds_per_task": 100_000,
        "round.settle_s": 0.0,
        "federation.heartbeat_s": 5.0,
        "run.seed": seed,
        "run.plots": "false",
        "run.evaluate": "false",
        "run.central_test": str(test),
        "run.central_test_every": 1,
        **{f"round.{key}": value for key, value in rules.items()},
    }
    return [word for key, value in given.items() for word in ("-c", f"{key}={value}")]


def _result(federation: LocalFederation, seconds: float) -> Result:
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        (slow,) = [c.client_id for c in ledger.clients.all() if c.name.endswith(f"-{SLOW}")]
        rows = [r for r in ledger.rounds.all(run.run_id) if r.closed_at is not None]
        began, reached, accuracy = rows[0].opened_at, dict[float, float](), 0.0
        counted = []
        for row in rows:
            assert row.closed_at is not None
            age = row.closed_at - began
            if age > seconds or not row.metrics.get("test_total"):
                continue
            accuracy = row.metrics["test_correct"] / row.metrics["test_total"]
            for aim in AIMS:
                if accuracy >= aim:
                    reached.setdefault(aim, age)
            for update in ledger.updates.of_round(row.key):
                if update.status is UpdateStatus.COUNTED:
                    start = row.base_state if update.base_state is None else update.base_state
                    counted.append((update, row.base_state - start))
        return Result(
            reached=reached,
            accuracy=accuracy,
            states=sum(r.new_state is not None for r in rows),
            slow=sum(update.client == slow for update, _ in counted),
            staleness=float(np.mean([age for _, age in counted])) if counted else 0.0,
            sent=sum(update.sealed_bytes for update, _ in counted),
        )


if __name__ == "__main__":
    main()
