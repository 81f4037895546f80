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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from fcil_adapters.backbone import Backbone, load_backbone
from fcil_adapters.contract import Context, TaskInfo, Update, UpdateList
from fcil_adapters.evaluation import evaluate
from fcil_adapters.images import preprocess
from fcil_adapters.registry import load_half, load_method, make_hparams
from fcil_protocol.ids import ClientId

CLASSES_PER_TASK, TASKS = 2, 5
TRAIN = 1400  # of 1,797 pictures
SHARES = (0.6, 0.3, 0.1)  # of each class, on the uneven clients


@dataclass(frozen=True)
class Images:
    """Pictures in memory; the `ImageSet` of this script."""

    pictures: NDArray[np.uint8]  # (N, S, S, 3)
    labels: NDArray[np.int64]  # (N,)

    @property
    def size(self) -> int:
        return int(self.pictures.shape[1])

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.pictures[index]

    def where(self, chosen: NDArray[Any]) -> Images:
        return Images(self.pictures[chosen], self.labels[chosen])


def digits(backbone: Backbone, seed: int) -> tuple[Images, Images]:
    """Return train and test pictures, preprocessed for the backbone, in an order of the seed."""
    raw = load_digits()
    grey = (raw.images * 255 / 16).astype(np.uint8)  # (N, 8, 8)
    p = backbone.info.preprocessing
    pictures = np.stack([preprocess(Image.fromarray(g), p) for g in grey])
    order = np.random.default_rng(seed).permutation(len(pictures))
    everything = Images(pictures, raw.target.astype(np.int64))
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


def federation(
    backbone: Backbone, hparams: Any, clients: list[Images], test: Images, rounds: int, seed: int
) -> list[float]:
    """Run all tasks; return the mean accuracy over the seen classes after each task."""
    method = load_method("pilora")
    learner, aggregator = load_half(method.learner), load_half(method.aggregator)
    base = Context(
        "train", TaskInfo(0, ()), 0, rounds, hparams, backbone.info, seed=(seed,), backbone=backbone
    )
    state, accuracies = aggregator.init(base), []
    for task in tasks():
        state = aggregator.open_task(replace(base, task=task), state)
        for exchange in method.exchanges(hparams, backbone.info):
            for r in range(exchange.rounds or rounds):
                ctx = replace(
                    base, kind=exchange.kind, task=task, round=r, rounds=exchange.rounds or rounds
                )
                parts = {p.name: p.payload for p in aggregator.broadcast(ctx, state)}
                sent = []
                for k, images in enumerate(clients):
                    own = images.where(np.isin(images.labels, task.classes))
                    local = replace(ctx, seed=(seed, k))
                    _, payload = learner.run(local, state, parts, own)
                    sent.append(Update(ClientId(f"client{k:02d}"), payload))
                state = aggregator.aggregate(ctx, state, UpdateList.of(sent))
        parts = {p.name: p.payload for p in aggregator.broadcast(base, state)}
        predictor = load_half(method.model).compose(base, parts, backbone)
        _, right, total = evaluate(predictor, test.where(np.isin(test.labels, task.seen)))
        accuracies.append(float(np.mean(right / total)))
    return accuracies


def tasks() -> Iterable[TaskInfo]:
    """Return the tasks: digits 0 and 1, then 2 and 3, and so on."""
    ids = tuple(range(CLASSES_PER_TASK * TASKS))
    for t in range(TASKS):
        first = t * CLASSES_PER_TASK
        yield TaskInfo(t, ids[first : first + CLASSES_PER_TASK], ids[:first])


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
    method = load_method("pilora")
    for row in [r for name in args.only or rows for r in rows[name]]:
        title, split, chosen, rounds = row
        final = []
        for seed in range(args.seeds):
            train, test = digits(backbone, seed)
            hparams = make_hparams(method, dict(chosen))
            series = federation(backbone, hparams, split(train), test, rounds, seed)
            final.append(series[-1])
        spread = " ".join(f"{100 * a:.1f}" for a in final)
        print(f"{title:38s} {100 * np.mean(final):5.1f} %  ({spread})", flush=True)


if __name__ == "__main__":
    main()
