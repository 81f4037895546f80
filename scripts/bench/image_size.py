"""Accuracy and speed of a frozen backbone at several image sizes.

Nearest class mean by cosine and ridge regression on 2,000 random relu features (the better of three
ridges) over the classes of a folder or zip with ``train/<class>/`` and ``test/<class>/``; images a
second of forward passes on one thread, the median of five passes for each size in turn::

    export OMP_NUM_THREADS=1
    python scripts/bench/image_size.py --data cifar100.zip --backbone deit_tiny_patch16_224 \
        --weights deit_tiny_patch16_224.safetensors --sizes 96 112 128 160
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `pretraining` is beside this folder

from pretraining import transfer
from pretraining.pictures import read_pictures

from fcil_adapters.backbones.backbone import Backbone, load_backbone

RIDGES = (1e2, 1e3, 1e4)
BATCH, PASSES = 32, 5


def main() -> None:
    """Measure and print one table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--train", type=int, default=20, help="train images of each class")
    parser.add_argument("--test", type=int, default=5, help="test images of each class")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbones = [load_backbone(args.backbone, args.weights, "cpu", s) for s in args.sizes]
    speeds: list[list[float]] = [[] for _ in backbones]
    for _ in range(PASSES):  # in turn: other load meets all sizes alike
        for seen, backbone in zip(speeds, backbones, strict=True):
            seen.append(images_per_s(backbone))
    print("| image size | tokens | nearest class mean | relu ridge | images/s |")
    print("|---|---|---|---|---|")
    for backbone, seen in zip(backbones, speeds, strict=True):
        most = args.train, args.test
        mean, ridge = accuracy(backbone, args.data, *most)
        size, tokens = backbone.info.preprocessing.size, backbone.module.patch_embed.num_patches
        print(f"| {size} | {tokens} | {mean:.1f} | {ridge:.1f} | {median(seen):.0f} |", flush=True)


def images_per_s(backbone: Backbone, batch: int = BATCH) -> float:
    """Return the speed of one pass."""
    size = backbone.info.preprocessing.size
    rng = np.random.default_rng()  # other images each time: features are remembered
    images = rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    began = time.perf_counter()
    backbone.features(images)
    return batch / (time.perf_counter() - began)


def accuracy(backbone: Backbone, data: Path, train: int, test: int) -> tuple[float, float]:
    """Return per cent of the test images: nearest class mean, best ridge."""
    prepared = backbone.info.preprocessing
    parts = (read_pictures(data, prepared, p, n) for p, n in (("train", train), ("test", test)))
    features = transfer.Features.of(backbone.features, *parts)
    ridges = [transfer.relu_ridge(features, strength=ridge) for ridge in RIDGES]
    return transfer.nearest_mean(features), max(ridges)


if __name__ == "__main__":
    main()
