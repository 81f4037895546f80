"""Methods without a gradient beside the five methods, in one process on digits.

The setting of HGP's ablations in docs/benchmarks/paper-claims.md: five tasks of two digits, three
clients, dirichlet(0.5), 30 held-out test images of each class, the embedded backbone. The five
methods run two rounds for each task, those without a gradient have one::

    export OMP_NUM_THREADS=1
    python scripts/bench/frozen_features.py --seeds 1 2 3
    python scripts/bench/frozen_features.py --seeds 1 2 3 --only analytic --train 140
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

import torch
from bench_data import digits, dirichlet
from simulation import Simulation

from fcil_adapters.backbones.backbone import load_backbone

CLIENTS, BETA, TEST, GROUPS, ROUNDS = 3, 0.5, 30, (5, 2), 2

_SHORT = {"preset": "short", "augment": "jitter"}
_LINEAR = {"features": "linear"}
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedncm", {}),
    ("fedncm", {"metric": "euclidean"}),
    ("gaussian_head", {}),
    ("gaussian_head", {"head": "lda"}),
    ("gaussian_head", {"head": "quadratic"}),
    ("gaussian_head", {"cov": "full", "head": "lda"}),
    ("gaussian_head", {"cov": "diag", "head": "lda"}),
    ("analytic", {}),
    ("analytic", {"precision": "double"}),
    ("analytic", {"form": "ridge", "rho": 1e-3, "features": "relu_projection"}),
    ("analytic", {"projection": 500}),
    ("analytic", {"group": 4}),
    ("analytic", {"truncate": 16}),
    ("analytic", {**_LINEAR, "truncate": 8}),
    ("analytic", _LINEAR),
    ("analytic", {**_LINEAR, "group": 4}),
    ("hgp", {**_SHORT, "epochs": 3}),
    ("pilora", _SHORT),
    ("plora", _SHORT),
    ("fed_talora", {**_SHORT, "batch_size": 8}),
    ("hepco", {**_SHORT, "batch_size": 8}),
)


def main() -> None:
    """Measure and print one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--train", type=int, default=30, help="train images of each class")
    parser.add_argument("--only", action="append", help="method; may be repeated")
    parser.add_argument("--skip", type=int, default=0, help="rows that are left out at the start")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone()
    more = dict(option.split("=", 1) for option in args.option)
    print("| method | options | FAA | seeds | AIA | forgetting | kB up / down | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, options in ROWS[args.skip :]:
        if args.only and name not in args.only:
            continue
        results = []
        for seed in args.seeds:
            data = digits(backbone.info.preprocessing, seed, args.train, TEST, GROUPS)
            clients = dirichlet(BETA)(data.train, data.tasks, CLIENTS, seed)
            simulation = Simulation.of(name, {**options, **more}, backbone, clients, seed=seed)
            results.append(simulation.run(data.tasks, data.test, ROUNDS))
        faa, aia = ([getattr(r.metrics, key) for r in results] for key in ("faa", "aia"))
        lost = mean(r.metrics.forgetting["max"] for r in results)
        shown = ", ".join(f"{k} = {v}" for k, v in options.items()) or "-"
        up, down = (mean(getattr(r, side) for r in results) / 1000 for side in ("up", "down"))
        print(
            f"| `{name}` | {shown} | {mean(faa):.1f} | {', '.join(f'{a:.1f}' for a in faa)} "
            f"| {mean(aia):.1f} | {lost:.1f} | {up:,.0f} / {down:,.0f} "
            f"| {mean(r.seconds for r in results):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
