"""Images for the simulations, shared by clients as `fcil_client.data.partition_draws` draws it.

* digits: scikit-learn's, 1,797 scans of 8 x 8 pixels, in their order;
* CIFAR-100: a slice of a zip with ``train/<class>/*`` and ``test/<class>/*``, classes in
  PyCIL's order (seed 1993).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from simulation import Images, make_tasks
from sklearn.datasets import load_digits

from fcil_adapters.contract import Preprocessing, TaskInfo
from fcil_adapters.images.decoding import decode, preprocess
from fcil_client.data import partition_draws as draws

I64 = NDArray[np.int64]
Partition = Callable[[Images, Sequence[TaskInfo], int, int], list[Images]]

UNEVEN = (0.6, 0.3, 0.1)  # of each class, on three clients
HELD_OUT = 397  # of the 1,797 digits


@dataclass(frozen=True)
class Data:
    """Train and held-out test images of some tasks."""

    train: Images
    test: Images
    tasks: tuple[TaskInfo, ...]


@cache
def digit_images(p: Preprocessing) -> Images:
    """Return all of scikit-learn's digits, in its order."""
    raw = load_digits()
    grey = (raw.images * 255 / 16).astype(np.uint8)  # 0..16 -> 0..255, (N, 8, 8)
    pictures = np.stack([preprocess(Image.fromarray(g), p) for g in grey])
    return Images(pictures, raw.target.astype(np.int64))


def all_digits(p: Preprocessing, seed: int) -> Data:
    """Return all digits in an order of the seed, in five tasks of two."""
    everything = digit_images(p)
    order = np.random.default_rng(seed).permutation(len(everything))
    test, train = everything.where(order[-HELD_OUT:]), everything.where(order[:-HELD_OUT])
    return Data(train, test, _tasks((5, 2)))


def uneven(train: Images) -> list[Images]:
    """Give each of three clients its share of every class."""
    owner = np.zeros(len(train), dtype=np.int64)
    for c in np.unique(train.labels):
        rows = np.flatnonzero(train.labels == c)
        owner[rows] = np.searchsorted(np.cumsum(UNEVEN[:-1]), np.arange(len(rows)) / len(rows))
    return [train.where(owner == k) for k in range(len(UNEVEN))]


def even(train: Images, clients: int) -> list[Images]:
    """Give each client an equal share of every class."""
    owner = np.zeros(len(train), dtype=np.int64)
    for c in np.unique(train.labels):
        rows = np.flatnonzero(train.labels == c)
        owner[rows] = np.arange(len(rows)) % clients
    return [train.where(owner == k) for k in range(clients)]


def digits(p: Preprocessing, seed: int, train: int, test: int, groups: tuple[int, int]) -> Data:
    """Return the digits in their order, so many train and test images per class."""
    everything = digit_images(p)
    sides: tuple[list[I64], list[I64]] = ([], [])
    for c in range(groups[0] * groups[1]):
        rng = np.random.default_rng([seed, c, 2])
        order = rng.permutation(np.flatnonzero(everything.labels == c))
        sides[0].append(order[:train])
        sides[1].append(order[train : train + test])
    chosen = [everything.where(np.concatenate(side)) for side in sides]
    return Data(chosen[0], chosen[1], _tasks(groups))


def cifar100(
    p: Preprocessing, path: Path, seed: int, train: int, test: int, groups: tuple[int, int]
) -> Data:
    """Return the first classes of PyCIL's order, drawn anew for each seed.

    Args:
        p: the backbone's preprocessing.
        path: the zip.
        seed: which images.
        train: train images per class.
        test: test images per class.
        groups: tasks, classes per task.
    """
    tasks, size = groups
    with zipfile.ZipFile(path) as archive:
        files = _files(archive)
        names = sorted({name for _, name in files})  # the label ids of CIFAR-100
        order = draws.pycil_order(len(names))[: tasks * size]
        sides = []
        for side, count in (("train", train), ("test", test)):
            pictures, labels = [], []
            for c, old in enumerate(order):
                found = files[side, names[old]]
                rng = np.random.default_rng([seed, c, side == "test"])
                for i in rng.choice(len(found), min(count, len(found)), replace=False):
                    pictures.append(preprocess(decode(archive.read(found[i])), p))
                    labels.append(c)
            sides.append(Images(np.stack(pictures), np.array(labels, dtype=np.int64)))
    return Data(sides[0], sides[1], _tasks(groups))


def _tasks(groups: tuple[int, int]) -> tuple[TaskInfo, ...]:
    """Return tasks of consecutive class ids: how many tasks, classes per task."""
    ids = range(groups[0] * groups[1])
    return tuple(make_tasks([ids[i : i + groups[1]] for i in ids[:: groups[1]]]))


def _files(archive: zipfile.ZipFile) -> dict[tuple[str, str], list[str]]:
    """Return (side, class) -> names of its images, sorted."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(archive.namelist()):
        parts = PurePosixPath(name).parts
        if len(parts) >= 3 and not name.endswith("/"):
            found.setdefault((parts[-3], parts[-2]), []).append(name)
    return found


def dirichlet(beta: float) -> Partition:
    """Split each class by a draw from Dirichlet(beta)."""
    return _per_task(draws.dirichlet(beta))


def quantity(alpha: int) -> Partition:
    """Give every client alpha classes of each task; owners of a class share it equally."""
    return _per_task(draws.quantity(alpha))


def _per_task(owners: draws.Draw) -> Partition:
    """Draw each task from its own stream, the same every round."""

    def split(train: Images, tasks: Sequence[TaskInfo], clients: int, seed: int) -> list[Images]:
        owner = np.full(len(train), -1, dtype=np.int64)
        for task in tasks:
            rows = np.flatnonzero(np.isin(train.labels, task.classes))
            rng = draws.task_stream(seed, task.index)
            owner[rows] = owners(train.labels[rows], clients, rng)
        return [train.where(owner == k) for k in range(clients)]

    return split
