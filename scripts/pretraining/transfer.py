"""What a frozen backbone is worth: simple classifiers on its features.

All numbers are per cent of the test pictures; nothing here has options to tune per backbone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretraining.pictures import Pictures

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Extractor = Callable[[NDArray[np.uint8]], NDArray[np.float32]]

_NEIGHBOURS, _TEMPERATURE = 20, 0.07  # DINO, section 4.1
_RIDGE, _RELU_RIDGE = 1.0, 1e3
_RELU = 2000
_ROWS = 256


@dataclass(frozen=True)
class Features:
    """Features of a train and a test part with their labels."""

    train: F64  # (N, d)
    labels: I64  # (N,)
    test: F64  # (M, d)
    answers: I64  # (M,)

    @classmethod
    def of(cls, extract: Extractor, train: Pictures, test: Pictures) -> Features:
        """Compute them in passes of `_ROWS` pictures."""
        seen = [
            np.concatenate(
                [extract(p.images[i : i + _ROWS]) for i in range(0, len(p.images), _ROWS)]
            )
            for p in (train, test)
        ]
        return cls(seen[0].astype(float), train.labels, seen[1].astype(float), test.labels)


def nearest_mean(f: Features) -> float:
    """Nearest class mean by cosine."""
    means = np.stack([f.train[f.labels == c].mean(0) for c in range(int(f.labels.max()) + 1)])
    return _right(_unit(f.test) @ _unit(means).T, f.answers)


def neighbours(f: Features, k: int = _NEIGHBOURS) -> float:
    """k-NN by cosine, each neighbour's vote weighted with exp(cosine / 0.07)."""
    train, test = _unit(f.train), _unit(f.test)
    k = min(k, len(train))
    votes = np.zeros((len(test), int(f.labels.max()) + 1))
    for start in range(0, len(test), _ROWS):
        near = test[start : start + _ROWS] @ train.T
        nearest = np.argpartition(-near, k - 1, axis=1)[:, :k]
        weights = np.exp((np.take_along_axis(near, nearest, 1) - 1) / _TEMPERATURE)
        rows = np.arange(start, start + len(near))[:, None]
        np.add.at(votes, (rows, f.labels[nearest]), weights)
    return _right(votes, f.answers)


def linear(f: Features) -> float:
    """Linear ridge regression on one-hot labels with a bias, lambda 1."""
    return _right(_ridge(_with_one(f.train), f.labels, _with_one(f.test), _RIDGE), f.answers)


def relu_ridge(
    f: Features, width: int = _RELU, seed: int = 0, strength: float = _RELU_RIDGE
) -> float:
    """Ridge on random relu features: normal projections of the features, lambda 1,000."""
    matrix = np.random.default_rng(seed).standard_normal((f.train.shape[1], width))
    train, test = (np.maximum(x @ matrix, 0) for x in (f.train, f.test))
    return _right(_ridge(train, f.labels, test, strength), f.answers)


def _ridge(train: F64, labels: I64, test: F64, strength: float) -> F64:
    targets = np.eye(int(labels.max()) + 1)[labels]
    gram = train.T @ train + strength * np.eye(train.shape[1])
    scores: F64 = test @ np.linalg.solve(gram, train.T @ targets)
    return scores


def _with_one(x: F64) -> F64:
    return np.hstack([x, np.ones((len(x), 1))])


def _unit(x: F64) -> F64:
    lengths: F64 = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(lengths == 0, 1, lengths)


def _right(scores: F64, answers: I64) -> float:
    return 100 * float((scores.argmax(1) == answers).mean())
