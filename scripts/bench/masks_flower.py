"""A round behind masks, and a plain one: fcil, and Flower with its SecAgg+, side by side.

Every client sends S bytes of fresh float32 numbers in every round and gets the average of all;
no client drops out. The server and its clients are processes in two network namespaces, joined by a
pair of devices, whose counters are the bytes. Flower is deployed with TLS. A round behind masks is
all that it takes to get one average: five rounds of fcil's run, four stages of SecAgg+. Seconds
are the median of the rounds but the first; bytes and CPU are those of the same rounds, heartbeats
and waiting included.

.venv/bin/python scripts/bench/masks_flower.py --flower VENV [--clients 5]
    [--kilobytes 300 3000] [--rounds 11] [--flower-rounds 6] [--max-weight 1]
    [--only "fcil, masks" ...]

VENV is an environment with flwr (pip install flwr), apart from this project's own. Needs user
namespaces; nothing leaves the machine.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from byte_ledger import HERE, device_bytes, two_hosts
from flower_side import APP, deployed
from processes import again_inside, cpu_s, tree, with_method

from fcil_protocol.process.children import module_command
from fcil_server.aggregation.store import StateStore
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import RoundRow

METHOD = Path(__file__).parent / "payload_method"
SECAGG = Path(__file__).parent / "secagg_app"
PORT, RUN_SEED, TIMEOUT_S = 7710, 1, 1800.0


@dataclass(frozen=True)
class Case:
    """One size of the table; ``there`` is the prefix of commands on the clients' host."""

    clients: int
    kilobytes: float
    rounds: int
    there: Sequence[str]
    flower: Path | None
    max_weight: float
    tensors: int = 1


@dataclass
class Meter:
    """CPU of a server and of its clients, and the device's bytes, ten times a second."""

    server: int
    clients: Sequence[int]
    rows: list[tuple[float, ...]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.1):
            server = sum(map(cpu_s, tree(self.server)))
            clients = sum(cpu_s(p) for client in self.clients for p in tree(client))
            self.rows.append((time.time(), server, clients, *device_bytes("v0")))

    def between(self, start: float, end: float) -> list[float]:
        """Return the growth of each figure between two times, from the samples around them."""
        at, *figures = np.array(self.rows).T
        return [float(np.diff(np.interp([start, end], at, one))[0]) for one in figures]


@dataclass(frozen=True)
class Result:
    """Seconds of each round but the first; the others of one round (and client) on average."""

    seconds: list[float]
    server_s: float
    client_s: float
    up: float
    down: float
    error: float

    @classmethod
    def of(
        cls, case: Case, meter: Meter, seconds: list[float], start: float, end: float, error: float
    ) -> Self:
        """Return what a meter saw from the end of the first round to that of the last."""
        server, clients, up, down = meter.between(start, end)
        rounds, all_ = len(seconds), len(seconds) * case.clients
        return cls(seconds, server / rounds, clients / all_, up / all_, down / all_, error)


# --- fcil ---------------------------------------------------------------------------------------


def fcil(case: Case, directory: Path, secure: str) -> Result:
    """Run a federation of processes."""
    settings = {
        "method.name": "payload",
        "method.kilobytes": case.kilobytes,
        "tasks.schedule": "listed",
        "tasks.classes": '[["0", "1"]]',
        "round.rounds_per_task": case.rounds,
        "round.min_clients": case.clients,
        "federation.listen": f"{HERE}:{PORT}",
        "privacy.secure": secure,
        "run.seed": RUN_SEED,
        "run.evaluate": "false",
    }
    folders = write_digits(directory / "data", case.clients)
    with LocalFederation(directory, port=PORT) as federation:
        federation.serve(*(a for k, v in settings.items() for a in ("-c", f"{k}={v}")))
        for number, folder in enumerate(folders):
            join(federation, f"client{number}", folder, case.there)
        assert federation.server is not None
        clients = [p.pid for p in federation.clients.values()]
        with Meter(federation.server.pid, clients) as meter:
            federation.until("run_done", timeout_s=TIMEOUT_S)
            time.sleep(0.3)
        federation.check_clients()
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        rounds = ledger.rounds.all(run.run_id)
        states = StateStore(federation.federation / "runs" / run.run_id / "states")
        found = states.load(ledger.states.newest(run.run_id).state).f32("w0")
    first = "mask_keys" if secure == "masks" else "train"
    bounds = [r.opened_at for r in rounds if r.kind == first]
    assert len(bounds) == case.rounds
    assert rounds[-1].closed_at is not None
    bounds.append(rounds[-1].closed_at)
    error = float(np.abs(found - true_mean(case, rounds)).max())
    seconds = [b - a for a, b in pairwise(bounds[1:])]
    return Result.of(case, meter, seconds, bounds[1], bounds[-1], error)


def join(federation: LocalFederation, name: str, data: Path, there: Sequence[str]) -> None:
    """Start a client on the other host."""
    command = module_command("fcil_client", "join", "--data", str(data), "--nice", "0")
    with federation.log(name).open("ab") as log:
        federation.clients[name] = subprocess.Popen(
            [*there, *command], env=federation.environment(), stdout=log, stderr=log
        )


def true_mean(case: Case, rounds: Sequence[RoundRow]) -> np.ndarray:
    """Return the average in float64 of what all clients drew in the last round."""
    last = [r for r in rounds if r.kind == "train"][-1]
    seeds = [(RUN_SEED, int.from_bytes(c.encode()[:6], "big"), last.round) for c in last.asked]
    size = round(case.kilobytes * 250)
    drawn = [np.random.default_rng(seed).random(size, dtype=np.float32) for seed in seeds]
    return np.mean(drawn, axis=0, dtype=np.float64)


# --- Flower -------------------------------------------------------------------------------------


def flower(case: Case, directory: Path, app: Path) -> Result:
    """Run a Flower app on a SuperLink and SuperNodes."""
    assert case.flower is not None
    given = f"max-weight={case.max_weight}" if app is SECAGG else ""
    ends = time.monotonic() + TIMEOUT_S
    with (
        deployed(
            case, directory, case.flower, app, given, address=HERE, there=case.there
        ) as running,
        Meter(running.server, running.nodes) as meter,
    ):
        while len(rounds := running.lines("TOOK")) < case.rounds:
            if time.monotonic() > ends:
                raise running.failed()
            time.sleep(0.5)
        if "Secure aggregation halted" in running.log.read_text(errors="replace"):
            raise running.failed()
        error = float(running.lines("OFF")[0][0])
    times = [(float(seconds), float(ended)) for seconds, ended in rounds]
    own = [seconds for seconds, _ in times[1:]]
    return Result.of(case, meter, own, times[0][1], times[-1][1], error)


SYSTEMS: dict[str, Callable[[Case, Path], Result]] = {
    "fcil, plain": lambda c, d: fcil(c, d, "off"),
    "fcil, masks": lambda c, d: fcil(c, d, "masks"),
    "Flower, plain": lambda c, d: flower(c, d, APP),
    "Flower, SecAgg+": lambda c, d: flower(c, d, SECAGG),
}


def measure(name: str, case: Case, plain: dict[str, float]) -> str:
    """Return one row; ``plain`` keeps the seconds of each system without masks."""
    directory = Path(tempfile.mkdtemp(prefix="fcil-masks-"))
    try:
        result = SYSTEMS[name](case, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    median, system = statistics.median(result.seconds), name.partition(",")[0]
    if name.endswith("plain"):
        plain[system] = median
    ratio = f"{median / plain[system]:.1f}" if system in plain else "-"
    return (
        f"| {case.clients} x {case.kilobytes / 1000:g} MB | {name} | {median:.2f} "
        f"| {min(result.seconds):.2f} to {max(result.seconds):.2f} | {ratio} "
        f"| {result.up / 1e6:.2f} | {result.down / 1e6:.2f} "
        f"| {result.server_s:.2f} | {result.client_s:.2f} | {result.error:.0e} |"
    )


def inside(args: argparse.Namespace) -> None:
    with_method(METHOD)
    spent = "up, MB | down, MB | server CPU s | client CPU s | largest error"
    seconds = "seconds, median | min to max | times plain"
    print(f"| clients x payload | system | {seconds} | {spent} |")
    print(f"|{'---|' * 10}")
    with two_hosts() as there:
        subprocess.run([*there, "ip", "link", "set", "lo", "up"], check=True)
        for clients in args.clients:
            for kilobytes in args.kilobytes:
                plain: dict[str, float] = {}
                for name in args.only:
                    own = name.startswith("fcil")
                    rounds = args.rounds if own else args.flower_rounds
                    case = Case(clients, kilobytes, rounds, there, args.flower, args.max_weight)
                    if args.flower or own:
                        print(measure(name, case, plain), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[5])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[300, 3000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--flower-rounds", type=int, default=6)
    parser.add_argument("--flower", type=Path)
    parser.add_argument("--only", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--max-weight", type=float, default=1.0, help="of SecAgg+; a client's is 1")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    sys.exit(again_inside("-rnm"))


if __name__ == "__main__":
    main()
