"""PILoRA on scikit-learn's digits, in one process without sockets: does it learn, and what helps?

Three measurements with the embedded backbone, 5 tasks of 2 classes each:

* nearest class mean of frozen features (what PILoRA has to beat),
* PILoRA on uneven clients that all hold every class,
* PILoRA under label skew (every client holds one class of each task), re-weighting on and off.

    python scripts/bench/pilora_digits.py [--rounds 3] [--seeds 3] [--option KEY=JSON ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_data import digit_images
from simulation import Images, Simulation, make_tasks

from fcil_adapters.backbone import Backbone, load_backbone

TASKS = make_tasks([(c, c + 1) for c in range(0, 10, 2)])
TRAIN = 1400  # of 1,797 pictures
SHARES = (0.6, 0.3, 0.1)  # of each class, on the uneven clients


def digits(backbone: Backbone, seed: int) -> tuple[Images, Images]:
    """Return train and test pictures in an order of the seed."""
    everything = digit_images(backbone.info.preprocessing)
    order = np.random.default_rng(seed).permutation(len(everything))
    return everything.where(order[:TRAIN]), everything.where(order[TRAIN:])


def uneven(train: Images) -> list[Images]:
    """Give every client a share of every class."""
    owner = np.zeros(len(train), dtype=np.int64)
    for c in np.unique(train.labels):
        rows = np.flatnonzero(train.labels == c)
        owner[rows] = np.searchsorted(np.cumsum(SHARES[:-1]), np.arange(len(rows)) / len(rows))
    return [train.where(owner == k) for k in range(len(SHARES))]


def skewed(train: Images, clients: int = 6) -> list[Images]:
    """Give every client one of the two classes of each task, of uneven size."""
    rng = np.random.default_rng(7)
    owner = np.zeros(len(train), dtype=np.int64)
    for c in np.unique(train.labels):
        rows = np.flatnonzero(train.labels == c)
        holders = np.arange(c % 2, clients, 2)
        owner[rows] = rng.choice(holders, len(rows), p=rng.dirichlet(np.ones(len(holders))))
    return [train.where(owner == k) for k in range(clients)]


def accuracy(
    backbone: Backbone,
    options: dict[str, Any],
    clients: list[Images],
    test: Images,
    rounds: int,
    seed: int,
) -> float:
    """Run all tasks; return the mean accuracy over all classes at the end, in percent."""
    simulation = Simulation.of(
        "pilora", options, backbone, clients, seed=seed, max_weight_share=1.0
    )
    final = simulation.run(TASKS, test, rounds).metrics.macro[-1]
    assert final is not None, "every class has test images"
    return final


Row = tuple[str, Callable[[Images], list[Images]], dict[str, Any], int]


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="training rounds per task")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions")
    parser.add_argument("--preset", default="short")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--only", choices=("mean", "uneven", "skewed"), action="append")
    args = parser.parse_args()
    given = {k: json.loads(v) for k, _, v in (o.partition("=") for o in args.option)}
    options = {"preset": args.preset, "augment": "jitter", **given}
    frozen = {**options, "lr_lora": 0.0, "lr_prototype": 1e-12}
    plain = {**options, "reweight": {"enabled": False}}
    rows: dict[str, list[Row]] = {
        "mean": [("nearest mean of frozen features", uneven, frozen, 1)],
        "uneven": [("PILoRA, 3 uneven clients", uneven, options, args.rounds)],
        "skewed": [
            ("PILoRA, label skew, re-weighting", skewed, options, args.rounds),
            ("PILoRA, label skew, plain averages", skewed, plain, args.rounds),
        ],
    }
    backbone = load_backbone()
    for row in [r for name in args.only or rows for r in rows[name]]:
        title, split, chosen, rounds = row
        final = []
        for seed in range(args.seeds):
            train, test = digits(backbone, seed)
            final.append(accuracy(backbone, chosen, split(train), test, rounds, seed))
        spread = " ".join(f"{a:.1f}" for a in final)
        print(f"{title:38s} {np.mean(final):5.1f} %  ({spread})", flush=True)


if __name__ == "__main__":
    main()
