"""Conflicts over a class name: clients whose mean features of a class are far apart (torch-free).

A conflict excludes nothing: people decide if "crane" is a bird or a machine. It is visible only in
rounds whose uploads hold a mean for each class, and only where a round has a second class to
compare with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import TaskInfo, Update
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema

MEAN, OWNED, COUNT = "mean", "owned", "count"  # tensors of such an upload (`class_reports`)
# The distance of two clients' means of one class over that to the nearest other class. With raw
# thumbnails of digits, 40 images of each at 2 to 20 clients, honest clients reach 0.71, and one
# that gives another digit this name has 0.88 to 1.4. With 12 images the two overlap (1.18 and
# 0.83): the mean of 12 is too uncertain for a verdict.
FAR = 0.8
LEAST_IMAGES = 30
MOST_CLIENTS = 200  # most means held at once

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class ClassConflict:
    """Two clients that seem to mean different things by one class.

    Attributes:
        ratio: the distance of their means over that to the nearest other class.
    """

    class_id: int
    one: ClientId
    other: ClientId
    ratio: float


class ClassConflicts:
    """The mean features that the clients of a round give its classes, one update at a time.

    Args:
        schema: of the updates.
        task: the task of their classes.
    """

    def __init__(self, schema: PayloadSchema, task: TaskInfo) -> None:
        kinds = {spec.name: spec.kind for spec in schema.tensors}
        self._told = kinds.get(MEAN) is Kind.PROTOTYPE and COUNT in kinds
        self._task = task
        self._means: dict[int, dict[ClientId, Vector]] = defaultdict(dict)

    def take(self, update: Update) -> None:
        """Record an update; the same one again changes nothing."""
        if self._told:
            for class_id, mean in _means(update.payload, self._task).items():
                known = self._means[class_id]
                if len(known) < MOST_CLIENTS:
                    known[update.client] = mean

    def pairs(self) -> list[ClassConflict]:
        """Return the classes for which the means of two clients are far apart."""
        centres = {c: np.median(list(of.values()), axis=0) for c, of in self._means.items()}
        found = (_farthest(c, of, centres) for c, of in sorted(self._means.items()))
        return [pair for pair in found if pair is not None and pair.ratio > FAR]


def _means(payload: Payload, task: TaskInfo) -> dict[int, Vector]:
    """Return class id -> mean of the classes with enough images."""
    mean, count = payload.tensors.get(MEAN), payload.tensors.get(COUNT)
    if mean is None or count is None or len(count) != len(task.classes):
        return {}
    enough = {c for c, n in zip(task.classes, count.tolist(), strict=True) if n >= LEAST_IMAGES}
    owned = payload.tensors.get(OWNED)
    ids = list(task.classes) if owned is None else owned.tolist()
    if len(ids) != len(mean):
        return {}
    return {c: np.array(m, np.float32) for c, m in zip(ids, mean, strict=True) if c in enough}


def _farthest(
    class_id: int, means: dict[ClientId, Vector], centres: dict[int, Vector]
) -> ClassConflict | None:
    """Return the client farthest from the others' median, and the client farthest from that one."""
    if len(means) < 2 or len(centres) < 2:
        return None

    def away(point: Vector) -> ClientId:
        return max(means, key=lambda client: float(np.linalg.norm(means[client] - point)))

    one = away(centres[class_id])
    other = away(means[one])
    own = float(np.linalg.norm(means[one] - means[other]))
    nearest = min(
        float(np.linalg.norm(means[one] - centre)) for c, centre in centres.items() if c != class_id
    )
    first, second = sorted((one, other))
    return ClassConflict(class_id, first, second, own / max(nearest, 1e-12)) if own > 0 else None
