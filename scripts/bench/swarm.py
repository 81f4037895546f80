"""A swarm of very many clients, and a swarm beside as many joins: seconds, memory, CPU, threads.

Real processes: a server, and either one `fcil-client swarm` or one `fcil-client join` for each
client, all over the same partition of drawn images (8 x 8 pixels, random with a colour per class).

.venv/bin/python scripts/bench/swarm.py --clients 1000 [--method running_mean] [--rounds 2]
.venv/bin/python scripts/bench/swarm.py --clients 10 --joins
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image
from processes import children, cpu_s, descriptors, status_mb

from fcil_protocol.process.children import module_command
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

CLASSES = 4
PER_CLIENT = 2  # images of a class for training, and half as many for tests


def draw(folder: Path, per_class: int) -> None:
    """Write images that differ a little, in another colour for each class."""
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"k{label}").mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 100, (8, 8, 3)).astype(np.uint8)
            pixels[..., label % 3] += np.uint8(60 + 40 * (label // 3))
            Image.fromarray(pixels).save(folder / f"k{label}" / f"{number:05d}.png")


class Peak:
    """What processes had at most, looked at again and again: memory, threads, open files.

    A worker is a child of its daemon; CPU seconds are those of the last look.
    """

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.daemons_mb = self.workers_mb = self.cpu = 0.0
        self.threads = self.files = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.look()

    def look(self) -> None:
        """Look once."""
        workers = [w for pid in self.pids for w in children(pid)]
        self.daemons_mb = max(self.daemons_mb, sum(status_mb(p) or 0 for p in self.pids))
        self.workers_mb = max(self.workers_mb, sum(status_mb(p) or 0 for p in workers))
        self.threads = max(self.threads, sum(map(_threads, self.pids)))
        self.files = max(self.files, sum(descriptors(p) or 0 for p in self.pids))
        self.cpu = max(self.cpu, sum(cpu_s(p) for p in (*self.pids, *workers)))

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()


def _threads(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0


def settings(args: argparse.Namespace, tasks: list[list[str]]) -> list[str]:
    """Return the server's settings."""
    given = {
        "method.name": args.method,
        "tasks.schedule": "listed",
        "tasks.classes": json.dumps(tasks),
        "round.rounds_per_task": args.rounds,
        "round.min_clients": args.clients,
        "run.evaluate": "false",
        "run.plots": "false",
        "federation.ids": "named",
    }
    return [word for k, v in given.items() for word in ("-c", f"{k}={v}")]


def measure(args: argparse.Namespace, directory: Path, *, joins: bool) -> None:
    """Run one federation to its end and print what it took."""
    data, partition = directory / "data", directory / "partition.json"
    if not data.exists():
        draw(data, 3 * PER_CLIENT * args.clients // 2)
        split = ["fcil_client", "split", "--data", str(data), "--out", str(partition)]
        split += ["--partition", "iid", "--clients", str(args.clients), "--tasks", "2"]
        command = module_command(*split, "--order", "natural")
        subprocess.run(command, check=True, capture_output=True)
    tasks = json.loads(partition.read_text())["tasks"]
    with LocalFederation(directory / ("joins" if joins else "swarm")) as federation:
        federation.serve("--until-done", *settings(args, tasks))
        assert federation.server is not None
        server = Peak([federation.server.pid])
        began = time.time()
        own = ["--threads", "1"]
        if joins:
            for slot in range(args.clients):
                part = ["--partition", str(partition), "--slot", str(slot)]
                federation.join(f"swarm-{slot:03d}", data, *part, *own)
        else:
            federation.swarm("swarm", data, partition, "--until-done", *own)
        clients = Peak([p.pid for p in federation.clients.values()])
        federation.server.wait(args.timeout_s)
        took = time.time() - began
        clients.end()
        server.end()
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        rows = ledger.rounds.all(run.run_id)
        counted = [len(ledger.updates.of_round(r.key)) for r in rows]
    what = f"{args.clients} joins" if joins else f"a swarm of {args.clients}"
    print(f"{what}, {args.method}: {took:.0f} s in all; {len(rows)} rounds, counted {counted}")
    print(f"  all connected and the first round open after {rows[0].opened_at - began:.1f} s")
    seconds = ", ".join(f"{(r.closed_at or 0) - r.opened_at:.1f}" for r in rows)
    print(f"  seconds of a round: {seconds}")
    print(f"  server {server.daemons_mb:.0f} MB and {server.workers_mb:.0f} MB its worker")
    each = clients.daemons_mb / args.clients
    print(f"  clients {clients.daemons_mb:.0f} MB ({each:.2f} MB each), workers", end=" ")
    print(f"{clients.workers_mb:.0f} MB; {clients.cpu:.0f} CPU s")
    print(f"  {clients.threads} threads and {clients.files} open files in the clients' daemons")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--method", default="running_mean")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--joins", action="store_true", help="the same as separate joins as well")
    parser.add_argument("--timeout-s", type=float, default=3600)
    parser.add_argument("--keep", type=Path, help="directory that stays")
    args = parser.parse_args()
    directory = args.keep or Path(tempfile.mkdtemp(prefix="fcil-swarm-"))
    try:
        measure(args, directory, joins=False)
        if args.joins:
            measure(args, directory, joins=True)
    finally:
        if args.keep is None:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
