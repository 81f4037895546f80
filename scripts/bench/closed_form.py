"""Classifiers in closed form on frozen features of all classes at once, in one process.

Nearest class means, `analytic` and `gaussian_head` with several options, on the first images of
each class of a folder or zip with ``train/<class>/`` and ``test/<class>/``; the projection is
another one for each seed (0: without `analytic`), and ``--tail`` takes from ``--train`` images down
to a twentieth of it::

    export OMP_NUM_THREADS=1
    python scripts/bench/closed_form.py --data cifar100.zip --train 20 --test 10
    python scripts/bench/closed_form.py --data cifar100.zip --train 20 --test 10 --image-size 160 \
        --backbone deit_tiny_patch16_224 --weights deit_tiny_patch16_224.safetensors
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # `pretraining` is beside this folder

from pretraining.pictures import read_pictures
from pretraining.transfer import Features, nearest_mean

from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.numerics.scores import quadratic
from fcil_adapters.numerics.symmetric import pack_triangle
from fcil_adapters.toolkit.closed_form.lift import SEED_WORDS, make_lift
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.solving import solve
from fcil_adapters.toolkit.closed_form.sums import ProductSums
from fcil_adapters.toolkit.gaussians.discriminants import (
    Quadratic,
    linear_discriminant,
    quadratic_discriminant,
)
from fcil_adapters.toolkit.gaussians.gaussian import describe
from fcil_adapters.toolkit.gaussians.mixture import Mixture, make_mixture
from fcil_adapters.toolkit.gaussians.store import ClassEntry

ROWS = {
    "both, within, gcv (default)": {},
    "relu_projection": {"features": "relu_projection"},
    "linear": {"features": "linear"},
    "both, prior = none": {"prior": "none"},
    "both, ridge, gcv": {"form": "ridge"},
    "relu_projection, ridge, rho = 1e-3": {
        "features": "relu_projection", "form": "ridge", "rho": 1e-3
    },
}  # fmt: skip
SHARES = (0.1, 1.0, 0.3)  # the quadratic head's defaults
HEADS: dict[str, Callable[[Mixture], Quadratic]] = {
    "lda, shrinkage = 0.01": lambda mixture: linear(mixture, 0.01),
    "lda (default)": lambda mixture: linear(mixture, 0.1),
    "quadratic (default)": lambda mixture: quadratic_discriminant(mixture, 8, SHARES),
}


def main() -> None:
    """Measure and print one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--train", type=int, default=20, help="train images of each class")
    parser.add_argument("--test", type=int, default=10, help="test images of each class")
    parser.add_argument("--tail", action="store_true", help="classes of unlike sizes")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(args.backbone, args.weights, "cpu", args.image_size)
    prepared = backbone.info.preprocessing
    parts = [
        read_pictures(args.data, prepared, part, most)
        for part, most in (("train", args.train), ("test", args.test))
    ]
    found = Features.of(backbone.features, *parts)
    if args.tail:
        found = long_tail(found)
    print(f"{len(found.train)} train images, {len(found.answers)} test images\n")
    print("| classifier | right, % | seeds |")
    print("|---|---|---|")
    print(f"| nearest class mean, cosine | {nearest_mean(found):.1f} | |", flush=True)
    for title, options in ROWS.items() if args.seeds else ():
        h = AnalyticHparams.model_validate(options)
        right = [accuracy(h, found, seed) for seed in range(args.seeds)]
        print(
            f"| {title} | {mean(right):.1f} | {', '.join(f'{r:.1f}' for r in right)} |", flush=True
        )
    gaussians = mixture_of(found)
    for title, make in HEADS.items():
        head = make(gaussians)
        scores = quadratic(found.test, head.weight, head.bias, head.turn, head.offset)
        right = 100 * float((scores.argmax(axis=1) == found.answers).mean())
        print(f"| gaussian_head, {title} | {right:.1f} | |", flush=True)


def mixture_of(features: Features) -> Mixture:
    """Return Gaussians of the classes as one client would send them by default."""
    entries = [
        ClassEntry(0, c, "one", describe(features.train[features.labels == c], "lowrank", 16))
        for c in range(int(features.labels.max()) + 1)
    ]
    return make_mixture(entries, range(len(entries)), "counts")


def linear(mixture: Mixture, shrinkage: float) -> Quadratic:
    """Return LDA as a quadratic head without directions."""
    weight, bias = linear_discriminant(mixture, shrinkage)
    return Quadratic(
        weight, bias, np.zeros((len(bias), 0, weight.shape[1])), np.zeros((len(bias), 0))
    )


def long_tail(features: Features) -> Features:
    """Keep of class c a share of its images that falls from 1 to a twentieth."""
    classes = int(features.labels.max()) + 1
    kept = []
    for c in range(classes):
        own = np.flatnonzero(features.labels == c)
        kept.append(own[: max(1, round(len(own) * 20 ** (-c / (classes - 1))))])
    rows = np.concatenate(kept)
    return Features(features.train[rows], features.labels[rows], features.test, features.answers)


def accuracy(h: AnalyticHparams, features: Features, seed: int) -> float:
    """Return per cent of the test images, with the projection of a seed."""
    d = features.train.shape[1]
    words = np.random.default_rng(seed).integers(2**62, size=SEED_WORDS)
    lift = make_lift(h, d, words)
    phi: NDArray[np.float64] = lift(features.train)
    targets = np.eye(int(features.labels.max()) + 1)[features.labels]
    counts = targets.sum(axis=0)
    sums = ProductSums(
        pack_triangle(phi.T @ phi), np.arange(len(counts)), targets.T @ phi, counts, len(phi)
    )
    found = solve(h, sums)
    scores = lift(features.test) @ found.weight.T + found.bias
    return 100 * float((scores.argmax(axis=1) == features.answers).mean())


if __name__ == "__main__":
    main()
