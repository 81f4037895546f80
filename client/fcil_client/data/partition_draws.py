"""The papers' draws of owners for images, and nothing else (docs/partitions.md).

A draw sees one task: the labels of its images in, the owner of each image out. Finding the images
and storing the result is the task of `partition_file`. HePCo's clients own nothing: they choose
afresh for every round (`hepco`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import UsageError
from fcil_protocol.process.terminal import count_of

I64 = NDArray[np.int64]
# Labels of a task's images (N,), clients, the task's stream -> owner of each image (N,).
Draw = Callable[[I64, int, np.random.Generator], I64]

MAX_DRAWS = 1000
PYCIL_SEED = 1993
ORDERS = ("pycil", "natural", "shuffled")


def task_stream(seed: int, task: int) -> np.random.Generator:
    """Return the random generator of a task, the same for all its rounds."""
    return np.random.default_rng([seed, task])


# --- draws ---------------------------------------------------------------------------------


def quantity(alpha: int, *, minimum: int = 1, categorical: bool = False) -> Draw:
    """Give every client ``alpha`` classes of each task; owners of a class share it equally.

    Source: PILoRA and Fed-TaLoRA, appendices; the rule of coverage and ``categorical`` are
    fed-mammoth's. The classes are redrawn until each has an owner, `MAX_DRAWS` times at most; then
    a random client takes each missing class in exchange for one of its own that others own as well.
    Shares of a class differ by at most one image.

    Args:
        alpha: classes of each client and task; in a task of fewer classes, all of them.
        minimum: images that each client should have of a task; redrawn until it holds, `MAX_DRAWS`
            times at most in all, and after that with fewer.
        categorical: instead, draw the owner of each image from its class's owners.
    """

    def owners(labels: I64, clients: int, rng: np.random.Generator) -> I64:
        classes = np.unique(labels)
        left = _Tries()
        while True:
            held = _held(len(classes), min(alpha, len(classes)), clients, rng, left)  # (K, C)
            owner = np.zeros(len(labels), dtype=np.int64)
            for c, label in enumerate(classes):
                rows = rng.permutation(np.flatnonzero(labels == label))
                holders = np.flatnonzero(held[:, c])
                if categorical:
                    owner[rows] = rng.choice(holders, len(rows))
                    continue
                for k, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
                    owner[part] = k
            if _smallest(owner, clients) >= minimum or left.over:
                return owner

    return owners


def _held(
    classes: int, alpha: int, clients: int, rng: np.random.Generator, left: _Tries
) -> NDArray[np.bool_]:
    """Return the owners of each class (K, C); each class has at least one."""
    assert alpha * clients >= classes, f"{clients} clients of {alpha} classes own not {classes}"
    while True:
        left.count()
        held = np.zeros((clients, classes), dtype=bool)
        for k in range(clients):
            held[k, rng.choice(classes, alpha, replace=False)] = True
        if held.any(axis=0).all():
            return held
        if left.over:
            break
    for c in np.flatnonzero(~held.any(axis=0)):
        # At least as many places as classes, and a class without an owner: another has two.
        spare = held & (held.sum(axis=0) > 1)
        k = rng.choice(np.flatnonzero(spare.any(axis=1)))
        held[k, rng.choice(np.flatnonzero(spare[k]))] = False
        held[k, c] = True
    return held


def dirichlet(
    beta: float, *, minimum: int = 1, categorical: bool = False, balance: bool = False
) -> Draw:
    """Split each class by shares p from Dirichlet(beta, ..., beta) over the clients.

    Source: PILoRA's code, whose cut points are ``floor(cumsum(p) n_c)``. A task is redrawn until
    every client has ``minimum`` images of it, `MAX_DRAWS` times at most; after that, clients can
    have fewer, or none in the task.

    Args:
        beta: concentration: if small, few clients hold a class; if large, the split is even.
        minimum: images that each client should have of a task.
        categorical: draw an owner for each image from p instead of cutting (fed-mammoth).
        balance: give no more images to clients that already hold N / K images of the task (Li et
            al., "Federated Learning on Non-IID Data Silos"). At a small beta this is visibly
            another partition.
    """

    def owners(labels: I64, clients: int, rng: np.random.Generator) -> I64:
        left = _Tries()
        while True:
            left.count()
            owner = np.full(len(labels), -1, dtype=np.int64)
            for label in np.unique(labels):
                rows = rng.permutation(np.flatnonzero(labels == label))
                shares = rng.dirichlet([beta] * clients)  # (K,)
                if balance:
                    shares = _capped(shares, owner)
                if categorical:
                    owner[rows] = rng.choice(clients, len(rows), p=shares)
                    continue
                cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
                owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
            if _smallest(owner, clients) >= minimum or left.over:
                return owner

    return owners


def _capped(shares: NDArray[np.float64], owner: I64) -> NDArray[np.float64]:
    """Set the share of clients that already hold N / K images to zero, and normalise."""
    clients = len(shares)
    free = np.bincount(owner[owner >= 0], minlength=clients) < len(owner) / clients
    kept: NDArray[np.float64] = shares * free
    if kept.sum() == 0:  # at a tiny beta all of p can belong to clients that are full
        kept = free.astype(np.float64)
    kept /= kept.sum()
    return kept


def even() -> Draw:
    """Deal the images out (iid): each class, and all of them together, as evenly as possible."""

    def owners(labels: I64, clients: int, rng: np.random.Generator) -> I64:
        owner = np.zeros(len(labels), dtype=np.int64)
        dealt = 0
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            owner[rows] = (dealt + np.arange(len(rows))) % clients
            dealt += len(rows)
        return owner

    return owners


class _Tries:
    """Counts draws up to `MAX_DRAWS`."""

    def __init__(self) -> None:
        self._left = MAX_DRAWS

    def count(self) -> None:
        self._left -= 1

    @property
    def over(self) -> bool:
        return self._left <= 0


def _smallest(owner: I64, clients: int) -> int:
    return int(np.bincount(owner, minlength=clients).min())


# --- HePCo ---------------------------------------------------------------------------------


def hepco_classes(classes: int, kappa: float) -> int:
    """Return the number of a task's classes of which a client sees images: C'.

    The paper's formula, C - floor(C (1 - kappa)), in decimals: in floats, 0.8 of 10 classes are 9.
    """
    return classes - int(classes * (1 - Fraction(str(kappa))))


def hepco_counts(classes: int, images: int, kappa: float, gamma: float, beta: float) -> list[int]:
    """Return the number of images of each of the C' classes, the largest first.

    Args:
        classes: number of classes of the task.
        images: number of images of the task.
        kappa: share of the classes that a client sees.
        gamma: share of a class's images that it sees.
        beta: imbalance: last class's images over the first one's.
    """
    kept, most = hepco_classes(classes, kappa), images / classes
    exponents = [i / (kept - 1) if kept > 1 else 0.0 for i in range(kept)]
    return [int(int(most * beta**e) * Fraction(str(gamma))) for e in exponents]


def hepco(
    labels: I64, rng: np.random.Generator, *, kappa: float, gamma: float, beta: float
) -> dict[int, I64]:
    """Choose the images of one client in one round: label -> rows of ``labels``, ascending.

    Source: HePCo's experiments. The classes are permuted and the first C' kept; small tails can be
    empty, and such a class is absent. A class with fewer images gives them all.
    """
    classes = np.unique(labels)
    order = rng.permutation(classes)
    chosen = {}
    for label, count in zip(
        order, hepco_counts(len(classes), len(labels), kappa, gamma, beta), strict=False
    ):
        rows = np.flatnonzero(labels == label)
        if count:
            picked = rng.choice(rows, min(count, len(rows)), replace=False)
            chosen[int(label)] = np.sort(picked)
    return chosen


def hepco_stream(seed: int, task: int, round_: int, slot: int) -> np.random.Generator:
    """Return the random generator of a client's images in one round."""
    return np.random.default_rng([seed, task, round_, slot])


# --- classes and tasks ---------------------------------------------------------------------


def natural_order(names: Sequence[str]) -> list[str]:
    """Sort class names: as numbers if all of them are numbers, else as text."""
    numbers = all(re.fullmatch(r"[0-9]{1,18}", name) for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


def pycil_order(classes: int) -> list[int]:
    """Return PyCIL's order: ``np.random.seed(1993); np.random.permutation(C)``."""
    legacy = np.random.RandomState(PYCIL_SEED)  # the papers' generator
    return [int(c) for c in legacy.permutation(classes)]


def class_order(names: Sequence[str], order: str | Sequence[str], seed: int) -> list[str]:
    """Return the classes in the order in which tasks take them.

    Args:
        names: all classes.
        order: one of `ORDERS`, or the names themselves, possibly a subset.
        seed: seed of ``shuffled`` (HePCo: ``random.seed(seed); random.shuffle(range(C))``).

    Raises:
        UsageError: a name is unknown, or listed twice.
    """
    known = natural_order(names)
    if not isinstance(order, str):
        return _listed(known, order)
    if order == "natural":
        return known
    if order == "pycil":
        return [known[i] for i in pycil_order(len(known))]
    if order == "shuffled":
        index = list(range(len(known)))
        random.Random(seed).shuffle(index)  # noqa: S311  the paper's generator, no secret
        return [known[i] for i in index]
    raise UsageError(
        f"unknown class order {order!r}; known are {', '.join(ORDERS)}.",
        action="Or name a text file with one class name on each line.",
    )


def _listed(known: Sequence[str], order: Sequence[str]) -> list[str]:
    strange = [name for name in order if name not in set(known)]
    if strange:
        raise UsageError(
            f"the class order names {strange[0]!r}, which is not among the {len(known)} classes of "
            "the data.",
            action=f"There are {', '.join(known[:8])}{' and others' if len(known) > 8 else ''}.",
        )
    twice = [name for i, name in enumerate(order) if name in order[:i]]
    if twice:
        raise UsageError(f"the class order names {twice[0]!r} twice.", action="Remove one of them.")
    return list(order)


def make_tasks(order: Sequence[str], tasks: int, per_task: int) -> tuple[tuple[str, ...], ...]:
    """Cut an order of classes into tasks.

    Args:
        order: the classes.
        tasks: number of tasks; 0: as needed. If classes do not divide evenly, earlier tasks have
            one class more.
        per_task: classes in each; 0: all classes over ``tasks``. With both given, the first
            ``tasks`` x ``per_task`` classes are used. With neither, there are ten tasks.

    Raises:
        UsageError: there are not enough classes.
    """
    if not per_task:
        tasks = tasks or 10
        if tasks > len(order):
            raise UsageError(
                f"{count_of(len(order), 'class')} cannot make {tasks} tasks.",
                action="Ask for fewer tasks: --tasks N",
            )
        cuts = [len(part) for part in np.array_split(np.arange(len(order)), tasks)]
    elif tasks:
        if tasks * per_task > len(order):
            raise UsageError(
                f"{tasks} tasks of {per_task} classes need {tasks * per_task} classes; the data "
                f"has {len(order)}.",
                action="Ask for fewer: --tasks N --classes-per-task N",
            )
        cuts = [per_task] * tasks
    else:
        full, rest = divmod(len(order), per_task)
        cuts = [per_task] * full + [rest] * bool(rest)
    ends = np.cumsum([0, *cuts]).tolist()
    return tuple(tuple(order[a:b]) for a, b in pairwise(ends))
