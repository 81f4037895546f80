"""What it costs that a device sleeps through three of five tasks, and what counting late gains.

Real processes: a server and three clients on scikit-learn's ten digits in five tasks. Client 2
holds most images of the digits 2 to 7. It is awake all the time, or it is killed after task 0 and
joins again before task 4; then its images are left alone or counted late. The server tests the
model on 400 other images.

    python scripts/bench/late_images.py [--methods analytic fedncm gaussian_head]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from digit_folders import write_digit
from sklearn.datasets import load_digits

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import UpdateRow
from fcil_server.reports.results.run_data import collect

SETTINGS = {"awake": ("off", False), "asleep, off": ("off", True),
            "asleep, count": ("count", True)}  # fmt: skip
TASKS = [[str(2 * t), str(2 * t + 1)] for t in range(5)]
TESTS = 400
SLEPT, EQUAL = (0.1, 0.8, 0.1), (1 / 3, 1 / 3, 1 / 3)  # shares of a digit
COUNTED = ("train", "late")  # kinds of rounds


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        accuracy: after the last task, per cent, mean over tasks (FAA).
        images: that the model counts, of all clients.
        sleepers: of them, the sleeper's.
        sent: sealed bytes of the sleeper's updates.
    """

    accuracy: float
    images: int
    sleepers: int
    sent: int


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    methods = ["analytic", "fedncm", "gaussian_head"]
    parser.add_argument("--methods", nargs="+", default=methods)
    args = parser.parse_args()
    print("| method | client 2 | FAA | images counted | of client 2 | its kB sent |")
    print("|---|---|---|---|---|---|", flush=True)
    for method in args.methods:
        for name, (late, asleep) in SETTINGS.items():
            one = measure(method, late, asleep=asleep)
            print(
                f"| `{method}` | {name} | {one.accuracy:.1f} | {one.images:,} | "
                f"{one.sleepers:,} | {one.sent / 1e3:,.1f} |",
                flush=True,
            )


def measure(method: str, late: str, *, asleep: bool) -> Result:
    """Run one federation to its end."""
    with tempfile.TemporaryDirectory() as directory:
        folders, test = write_images(Path(directory) / "data")
        with LocalFederation(Path(directory)) as federation:
            federation.serve("--until-done", *_settings(method, late, test))
            for k, folder in enumerate(folders):
                federation.join(f"client-{k + 1}", folder, "--threads", "1", "--engine", "onnx")
            sleeper = "client-2"
            if asleep:
                _pause_after(federation, 0)
                federation.kill_client(sleeper)
                control_socket.ask(federation.federation, "resume")
                _pause_after(federation, 3)
                federation.join(sleeper, folders[1], "--threads", "1", "--engine", "onnx")
                federation.until("announced", text=sleeper)
                control_socket.ask(federation.federation, "resume")
            assert federation.server is not None
            federation.server.wait(600)
            return _result(federation, sleeper)


def write_images(folder: Path) -> tuple[list[Path], Path]:
    """Write the clients' folders and the server's, by class."""
    raw = load_digits()
    order = np.random.default_rng(1).permutation(len(raw.target))
    test, clients = folder / "test", [folder / f"client-{k + 1}" for k in range(3)]
    for i in order[:TESTS]:
        write_digit(test, raw, i)
    for digit in range(10):
        own = [i for i in order[TESTS:] if raw.target[i] == digit]
        shares = SLEPT if 2 <= digit <= 7 else EQUAL
        ends = np.cumsum([0.0, *shares]) * len(own)
        for k, client in enumerate(clients):
            for i in own[round(ends[k]) : round(ends[k + 1])]:
                write_digit(client / "train", raw, i)
    return clients, test


def _pause_after(federation: LocalFederation, task: int) -> None:
    """Wait for the end of a task, and hold the run there."""
    federation.until("round_opened", text=f"task {task} train")
    control_socket.ask(federation.federation, "pause")
    federation.until("task_done", text=f"task {task}")


def _settings(method: str, late: str, test: Path) -> list[str]:
    given = {
        "method.name": method,
        "method.late": late,
        "tasks.schedule": "listed",
        "tasks.classes": str(TASKS).replace("'", '"'),
        "round.min_clients": 2,
        "round.grace_s": 1.0,
        "round.settle_s": 5.0,
        "federation.heartbeat_s": 2.0,
        "run.plots": "false",
        "run.evaluate": "false",
        "run.central_test": str(test),
    }
    return [word for key, value in given.items() for word in ("-c", f"{key}={value}")]


def _result(federation: LocalFederation, sleeper: str) -> Result:
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        data = collect(ledger, run.run_id)
        (client,) = [c.client_id for c in ledger.clients.all() if c.name.endswith(sleeper)]
        members = [c.client_id for c in ledger.clients.all()]
        by_client = {
            c: [u for u in ledger.updates.of_client(run.run_id, c) if _counts(u)] for c in members
        }
        images = {c: sum(u.samples for u in updates) for c, updates in by_client.items()}
        sent = sum(u.sealed_bytes for u in by_client[client])
        return Result(data.headline[0] or 0.0, sum(images.values()), images[client], sent)


def _counts(update: UpdateRow) -> bool:
    return update.kind in COUNTED and update.status is UpdateStatus.COUNTED


if __name__ == "__main__":
    main()
