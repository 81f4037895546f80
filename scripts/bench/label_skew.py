"""PILoRA with prototype re-weighting against plain averaging, under strong label skew.

Every client holds one of the two digits of each task (half of its classes). Real processes on
loopback, the embedded backbone, federated evaluation on the clients' own test images.

    .venv/bin/python scripts/bench/label_skew.py --seeds 1 2 3 --out label_skew.json
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fcil_server import rundir
from fcil_server.demo import TASKS
from fcil_server.ledger import LEDGER_NAME, Ledger
from fcil_server.local import LocalFederation
from fcil_server.rundata import collect

TIMEOUT_S = 1800


def write_clients(folder: Path, clients: int, seed: int) -> list[Path]:
    """Client k holds the digit (k + t) % 2 of task t, its images split evenly among holders."""
    digits = load_digits()
    rng = np.random.default_rng([seed, 17])
    for task, names in enumerate(TASKS):
        for side, name in enumerate(names):
            holders = [k for k in range(clients) if (k + task) % 2 == side]
            index = rng.permutation(np.flatnonzero(digits.target == int(name)))
            for holder, part in zip(holders, np.array_split(index, len(holders)), strict=True):
                target = folder / f"client-{holder + 1}" / name
                target.mkdir(parents=True)
                for i in part.tolist():
                    pixels = (digits.images[i] * (255 / 16)).round().astype(np.uint8)
                    image = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC)
                    image.save(target / f"{i:04d}.png")
    return [folder / f"client-{k + 1}" for k in range(clients)]


def one_run(clients: int, seed: int, options: dict[str, str], rounds: int) -> dict[str, float]:
    """Run a whole federation of processes; return its headline numbers."""
    directory = Path(tempfile.mkdtemp(prefix="fcil-skew-"))
    try:
        data = write_clients(directory / "data", clients, seed)
        settings = {
            "run.seed": str(seed),
            "tasks.schedule": "listed",
            "tasks.classes": json.dumps(TASKS),
            "method.name": "pilora",
            "method.preset": "short",
            "method.augment": "jitter",
            "round.rounds_per_task": str(rounds),
            "round.min_clients": str(clients),
            **options,
        }
        arguments = [a for k, v in settings.items() for a in ("-c", f"{k}={v}")]
        began = time.monotonic()
        with LocalFederation(directory) as federation:
            federation.serve("--until-done", *arguments)
            for path in data:
                federation.join(path.name, path, "--threads", "1")
            assert federation.server is not None
            if federation.server.wait(TIMEOUT_S):
                raise SystemExit(federation.last_words("server"))
        with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
            run = ledger.newest_run()
            assert run is not None
            summary = rundir.summary(collect(ledger, run.run_id))["data"]
        numbers = {k: summary[k] for k in ("faa", "aia", "forgetting")}
        return {**numbers, "seconds": round(time.monotonic() - began, 1)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "-c", dest="settings", action="append", default=[], help="section.key=value"
    )
    args = parser.parse_args()
    extra = dict(s.split("=", 1) for s in args.settings)
    rows = []
    for seed in args.seeds:
        for enabled in (True, False):
            options = {"method.reweight.enabled": str(enabled).lower(), **extra}
            result = one_run(args.clients, seed, options, args.rounds)
            rows.append({"seed": seed, "reweight": enabled, **result})
            print(json.dumps(rows[-1]), flush=True)
    for enabled in (True, False):
        faa = [r["faa"] for r in rows if r["reweight"] is enabled]
        print(f"reweight={enabled}: FAA {statistics.mean(faa):.1f} (seeds: {faa})")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
