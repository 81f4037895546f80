"""A round without training: fcil, Flower and bare ZeroMQ, same payloads, side by side.

Every client sends S bytes of fresh float32 numbers in every round and gets the average of
all, in a network namespace of its own, so that the loopback device counts nothing else.
fcil verifies, opens, checks, keeps (fsync) and averages every update. Flower is deployed as
processes with TLS. Bare ZeroMQ is a floor, not a system: CURVE, chunks of 1 MiB, one fsync
per round, no average.

.venv/bin/python scripts/bench/rounds.py [--clients 2 8] [--kilobytes 300 3000 30000]
    [--tensors 1] [--rounds 6] [--flower VENV]

VENV is an environment with flwr (pip install flwr), apart from this project's own.
"""

import argparse
import itertools
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flower_side import flower
from processes import PeakMemory, again_inside, children, loopback_bytes, peak_mb, with_method
from zmq_side import bare

from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

METHOD = Path(__file__).parent / "payload_method"


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    clients: int
    kilobytes: float
    tensors: int
    rounds: int


@dataclass(frozen=True)
class Result:
    """Seconds of each round but the first; memory at most, MB, of the server's side and of one
    client's, all their processes together (of a client, what they share counts for each)."""

    seconds: list[float]
    server_mb: float
    client_mb: float


def fcil(case: Case, directory: Path) -> Result:
    """Run a federation of processes."""
    folders = write_digits(directory / "data", case.clients)
    settings = {
        "method.name": "payload",
        "method.kilobytes": case.kilobytes,
        "method.tensors": case.tensors,
        "tasks.schedule": "listed",
        "tasks.classes": '[["0", "1"]]',
        "round.rounds_per_task": case.rounds,
        "round.min_clients": case.clients,
        "run.evaluate": "false",
    }
    with LocalFederation(directory) as federation:
        federation.serve(*(a for k, v in settings.items() for a in ("-c", f"{k}={v}")))
        assert federation.server is not None
        with PeakMemory(federation.server.pid) as memory:
            for number, folder in enumerate(folders):
                federation.join(f"client{number}", folder)
            federation.until("run_done", timeout_s=900)
        server = memory.mb
        client = max(_tree_mb(p.pid) for p in federation.clients.values())
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        opened = [r.opened_at for r in ledger.rounds.all(run.run_id)]
    return Result([b - a for a, b in itertools.pairwise(opened[1:])], server, client)


def _tree_mb(pid: int) -> float:
    return peak_mb(pid, *children(pid))


def measure(name: str, case: Case, run: Callable[[Case, Path], Result]) -> None:
    """Print one row."""
    directory = Path(tempfile.mkdtemp(prefix="fcil-rounds-"))
    before, used = loopback_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        result = run(case, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    ideal = 2 * case.clients * case.kilobytes * 1000 * case.rounds
    ratio = (loopback_bytes() - before) / ideal
    print(
        f"| {case.clients} x {case.kilobytes / 1000:g} MB in {case.tensors} | {name} "
        f"| {statistics.median(result.seconds):.3f} | {min(result.seconds):.3f} "
        f"| {max(result.seconds):.3f} | {ratio:.3f} | {result.server_mb:.0f} "
        f"| {result.client_mb:.0f} | {cpu:.1f} |",
        flush=True,
    )


def inside(args: argparse.Namespace) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with_method(METHOD)
    sizes = "lo bytes / ideal | server MB | client MB | CPU s"
    print(f"| clients x payload | | median s | min | max | {sizes} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for clients in args.clients:
        for kilobytes in args.kilobytes:
            case = Case(clients, kilobytes, args.tensors, args.rounds)
            measure("bare ZeroMQ", case, lambda c, d: Result(*bare(c, d)))
            measure("fcil", case, fcil)
            if args.flower:
                measure("Flower", case, lambda c, d: Result(*flower(c, d, args.flower)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[300, 3000, 30_000])
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flower", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    sys.exit(again_inside("-rn"))


if __name__ == "__main__":
    main()
