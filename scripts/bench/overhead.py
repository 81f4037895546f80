"""What the wire adds to tensors: TCP payload over tensor bytes, by payload size.

A server and one client on the loopback device; the ledger's predicted bytes, which name their
cause, of all rounds but the first. "payload" is updates or broadcasts alone, "all" everything
in those rounds but handshakes: orders, wants, acknowledgements, the list of classes.

.venv/bin/python scripts/bench/overhead.py [--kilobytes 10 100 300 1000 10000 100000]
    [--tensors 1 48] [--rounds 3]
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.run_data import collect

METHOD = Path(__file__).parent / "payload_method"
PAYLOAD = {Direction.UP: Cause.UPDATE, Direction.DOWN: Cause.BROADCAST}


def measure(kilobytes: float, tensors: int, rounds: int, directory: Path) -> list[str]:
    """Return the table's cells for one payload."""
    [data] = write_digits(directory / "data", 1)
    settings = {
        "method.name": "payload",
        "method.kilobytes": kilobytes,
        "method.tensors": tensors,
        "tasks.schedule": "listed",
        "tasks.classes": '[["0", "1"]]',
        "round.rounds_per_task": rounds + 1,
        "round.min_clients": 1,
        "run.evaluate": "false",
    }
    env = {"PYTHONPATH": os.pathsep.join((str(METHOD), os.environ.get("PYTHONPATH", "")))}
    with LocalFederation(directory) as federation:
        arguments = (a for k, v in settings.items() for a in ("-c", f"{k}={v}"))
        federation.serve("--until-done", *arguments, env=env)
        federation.join("client", data, env=env)
        assert federation.server is not None
        if federation.server.wait(900) != 0:
            raise SystemExit(federation.last_words("server"))
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        views = collect(ledger, run.run_id).rounds[1:]
    cells = []
    for direction, cause in PAYLOAD.items():
        flows = [f for v in views for f in v.flows if f.direction is direction]
        tensor = sum(f.tensor for f in flows)
        sent = sum(f.wire for f in flows if f.cause is cause)
        everything = sum(
            f.wire for f in flows if f.cause not in (Cause.HANDSHAKE, Cause.CONNECTION)
        )
        cells += [f"{100 * (n / tensor - 1):.2f} %" for n in (sent, everything)]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = [10, 100, 300, 1000, 10_000, 100_000]
    parser.add_argument("--kilobytes", type=float, nargs="+", default=sizes)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 48])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| tensors | in | up: payload | up: all | down: payload | down: all |")
    print("|---|---|---|---|---|---|")
    for kilobytes in args.kilobytes:
        for tensors in args.tensors:
            directory = Path(tempfile.mkdtemp(prefix="fcil-overhead-"))
            try:
                cells = measure(kilobytes, tensors, args.rounds, directory)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            print(f"| {kilobytes:g} kB | {tensors} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
