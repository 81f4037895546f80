"""Broadcasts from an object store instead of the server: its CPU, its bytes and the rounds' time.

Every client sends S bytes in each round and gets the average of all, once over the link and once
from a folder that a web server shows (Python's own, in a process of its own, whose CPU is not
counted: it stands for another machine). Clients run here too, so seconds are theirs as well.

.venv/bin/python scripts/bench/object_store.py [--clients 8] [--kilobytes 3000 30000] [--rounds 5]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from processes import cpu_s, with_method

from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

METHOD = Path(__file__).parent / "payload_method"


def measure(clients: int, kilobytes: float, rounds: int, directory: Path, *store: str) -> list[str]:
    """Return the table's cells of one run."""
    folders = write_digits(directory / "data", clients)
    settings = {
        "method.name": "payload",
        "method.kilobytes": kilobytes,
        "tasks.schedule": "listed",
        "tasks.classes": '[["0", "1"]]',
        "round.rounds_per_task": rounds,
        "round.min_clients": clients,
        "run.evaluate": "false",
        "run.plots": "false",
    }
    with LocalFederation(directory) as federation:
        given = (a for k, v in settings.items() for a in ("-c", f"{k}={v}"))
        federation.serve(*given, *(a for text in store for a in ("-c", text)))
        assert federation.server is not None
        for number, folder in enumerate(folders):
            federation.join(f"client{number}", folder)
        federation.until("update")
        before = cpu_s(federation.server.pid)
        federation.until("task_done", timeout_s=900)
        cpu = cpu_s(federation.server.pid) - before
        federation.until("run_done", timeout_s=900)
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest().run_id
        rows = ledger.rounds.all(run)
        down = [c for c in ledger.bytes.all(run) if c.direction is Direction.DOWN]
    seconds = [row.closed_at - row.opened_at for row in rows[1:]]
    link = sum(c.wire for c in down if c.cause is Cause.CONNECTION)
    elsewhere = sum(c.wire for c in down if c.cause is Cause.OBJECT_STORE)
    ideal = rounds * clients * kilobytes * 1000
    return [
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        f"{cpu / (rounds - 1) / clients * 1000:.0f}",
        f"{link / ideal:.3f}",
        f"{elsewhere / ideal:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[3000, 30_000])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with_method(METHOD)
    print("| payload, parts from | seconds of a round | server's daemon, CPU ms for a client "
          "and round | down the link / ideal | from the store / ideal |")  # fmt: skip
    print("|---|---|---|---|---|")
    for kilobytes in args.kilobytes:
        for name in ("the server", "a store"):
            directory = Path(tempfile.mkdtemp(prefix="fcil-store-"))
            folder = directory / "parts"
            folder.mkdir()
            command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
            web = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=dict(os.environ),
            )  # fmt: skip
            try:
                assert web.stdout is not None
                port = web.stdout.readline().split("port ")[1].split()[0]
                store = (f"parts.store=file://{folder}", f"parts.url=http://127.0.0.1:{port}")
                used = store if name == "a store" else ()
                cells = measure(args.clients, kilobytes, args.rounds, directory, *used)
                print(f"| {kilobytes / 1000:g} MB, {name} | {' | '.join(cells)} |", flush=True)
            finally:
                web.terminate()
                web.wait()
                shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
