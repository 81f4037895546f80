"""Every method as a federation of processes on a slice of CIFAR-100, with late and missing clients.

Twelve classes in PyCIL's order (seed 1993), three tasks of four, two rounds each. Client a is
there all the time. Client b is killed after the first task and comes back for the third. Client
c joins in the second. Images of a class are split evenly over all clients that bring it; the
federation's own test split judges.

    .venv/bin/python scripts/bench/cifar_federation.py --data CIFAR100.zip --methods hgp plora
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from fcil_client.partition import pycil_order
from fcil_server import rundir
from fcil_server.ledger import LEDGER_NAME, Ledger
from fcil_server.local import LocalFederation
from fcil_server.rundata import collect

METHODS = ("pilora", "plora", "fed_talora", "hgp", "hepco")
TASKS, CLASSES = 3, 4
# Which client brings which task's classes; a class of the second task is c's alone.
HOLDERS = ("ab", "ac", "ab")
TIMEOUT_S = 1800.0


def read_classes(path: Path, per_class: int) -> list[tuple[str, list[bytes]]]:
    """Return the first classes of the order with some of their training files."""
    with zipfile.ZipFile(path) as archive:
        files: dict[str, list[str]] = {}
        for name in sorted(archive.namelist()):
            parts = PurePosixPath(name).parts
            if len(parts) >= 3 and parts[-3] == "train" and not name.endswith("/"):
                files.setdefault(parts[-2], []).append(name)
        names = sorted(files)
        chosen = [names[i] for i in pycil_order(len(names))[: TASKS * CLASSES]]
        return [(n, [archive.read(f) for f in files[n][:per_class]]) for n in chosen]


def write(folder: Path, classes: Sequence[tuple[str, list[bytes]]], share: int, of: int) -> None:
    """Write one of ``of`` even shares of each class into a client's folder."""
    for name, files in classes:
        target = folder / name
        target.mkdir(parents=True)
        for i, data in enumerate(files[share::of]):
            (target / f"{i:04d}.png").write_bytes(data)


def settings(method: str, seed: int, extra: Sequence[str]) -> list[str]:
    given: Mapping[str, object] = {
        "run.seed": seed,
        "method.name": method,
        "method.preset": "short",
        "tasks.min_new_classes": CLASSES,
        "tasks.settle_s": 1.0,
        "round.rounds_per_task": 2,
        "round.min_clients": 2,
        "round.grace_s": 5.0,
    }
    return [a for k, v in given.items() for a in ("-c", f"{k}={v}")] + [
        a for text in extra for a in ("-c", text)
    ]


def one_run(
    method: str, classes: Sequence[tuple[str, list[bytes]]], seed: int, extra: Sequence[str]
) -> dict[str, object]:
    """Run the federation; return its numbers."""
    tasks = [classes[t * CLASSES : (t + 1) * CLASSES] for t in range(TASKS)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fcil-cifar-") as name:
        directory = Path(name)

        def bring(client: str, task: int, part: Sequence[tuple[str, list[bytes]]]) -> Path:
            write(directory / client, part, HOLDERS[task].index(client), 2)
            return directory / client

        def join(client: str, folder: Path) -> None:
            federation.join(client, folder, "--threads", "1")
            federation.until("announced", text=f":{client}", timeout_s=TIMEOUT_S)

        with LocalFederation(directory) as federation:
            federation.serve(*settings(method, seed, extra))
            join("a", bring("a", 0, tasks[0]))
            join("b", bring("b", 0, tasks[0]))
            federation.until("task_done", text="task 0", timeout_s=TIMEOUT_S)
            federation.kill_client("b")
            federation.until("left", text=":b", timeout_s=TIMEOUT_S)
            bring("a", 1, tasks[1][1:])  # the task waits for the class that c alone has
            join("c", bring("c", 1, tasks[1]))
            federation.until("task_done", text="task 1", timeout_s=TIMEOUT_S)
            bring("a", 2, tasks[2][1:])
            join("b", bring("b", 2, tasks[2]))
            federation.until("task_done", text="task 2", timeout_s=TIMEOUT_S)
            federation.check_clients()
        with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
            run = ledger.newest_run()
            assert run is not None
            data = collect(ledger, run.run_id)
            summary = rundir.summary(data)["data"]
            counted = sum(len(r.counted) for r in data.rounds)
    numbers = {k: round(summary[k], 1) for k in ("faa", "aia", "forgetting")}
    seconds = round(time.monotonic() - began)
    return {"method": method, "seed": seed, **numbers, "updates": counted, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="cifar100.zip")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--per-class", type=int, default=100, help="images of a class in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-c", dest="settings", action="append", default=[], help="key=value")
    args = parser.parse_args()
    classes = read_classes(args.data, args.per_class)
    for method in args.methods:
        print(json.dumps(one_run(method, classes, args.seed, args.settings)), flush=True)


if __name__ == "__main__":
    main()
