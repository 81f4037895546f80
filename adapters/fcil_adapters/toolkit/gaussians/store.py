"""The server's Gaussians: an entry per client and class, the latest, or one per update and class.

For HGP, and for every method that draws features of old classes from Gaussians.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fcil_adapters.contract import State, Update, Updates
from fcil_adapters.toolkit.gaussians.batches import unpack_gaussians
from fcil_adapters.toolkit.gaussians.gaussian import (
    I64,
    Described,
    Gaussian,
    store_gaussians,
    stored_gaussians,
)
from fcil_protocol.payloads.payload import Array

_NAMES = ("count", "mean", "rest", "rows", "factor", "label", "client")


@dataclass(frozen=True)
class ClassEntry:
    """One client's latest Gaussian of one class.

    Attributes:
        task: the task that added the class.
        label: the class id.
        client: the client's id.
    """

    task: int
    label: int
    client: str
    gaussian: Gaussian


def read_entries(state: State, tasks: Iterable[int]) -> list[ClassEntry]:
    """Return the entries of some tasks in their order in the state."""
    return [entry for task in tasks for entry in _of_task(state, task)]


def sent_entries(
    h: Described, updates: Updates, task: int, device: str
) -> tuple[list[ClassEntry], I64]:
    """Return this round's clients' entries of the task's classes, and image counts (K, c).

    One update is open at a time; only its Gaussians stay, which the state will hold anyway.
    """
    entries: list[ClassEntry] = []
    counts: list[I64] = []
    for update in updates:
        entries += _of_update(h, update, task, device)
        counts.append(update.payload.i64("count"))
    return entries, np.stack(counts)


def merge_entries(
    old: Sequence[ClassEntry],
    new: Sequence[ClassEntry],
    classes: Sequence[int],
    *,
    drop_stale: bool,
) -> list[ClassEntry]:
    """Put new entries in the place of old ones, ordered by class and client.

    Where an image is counted once (`late_images`), use `add_entries`.

    Args:
        old: entries of the task so far.
        new: entries of this round; one per client and class.
        classes: the task's class ids, in order.
        drop_stale: forget the old ones of each class with new ones.
    """
    renewed = {e.label for e in new} if drop_stale else set()
    kept = {(e.label, e.client): e for e in old if e.label not in renewed}
    kept.update({(e.label, e.client): e for e in new})
    return _ordered(kept.values(), classes)


def add_entries(
    old: Sequence[ClassEntry], new: Sequence[ClassEntry], classes: Sequence[int]
) -> list[ClassEntry]:
    """Put new entries beside old ones, which are of other images; the arguments of `merge_entries`.

    Ordered by class and client, and then as they came.
    """
    return _ordered([*old, *new], classes)


def _ordered(entries: Iterable[ClassEntry], classes: Sequence[int]) -> list[ClassEntry]:
    position = {c: i for i, c in enumerate(classes)}
    return sorted(entries, key=lambda e: (position[e.label], e.client))


def entry_tensors(entries: Sequence[ClassEntry], task: int, d: int) -> dict[str, Array]:
    """Return the state's tensors that hold a task's entries (d: width of a feature)."""
    clients = [np.frombuffer(e.client.encode("ascii"), dtype=np.uint8) for e in entries]
    tensors: dict[str, Array] = {
        **store_gaussians([e.gaussian for e in entries], d),
        "label": np.array([e.label for e in entries], dtype=np.int64),
        "client": np.stack(clients) if clients else np.zeros((0, 0), dtype=np.uint8),
    }
    return {_name(task, name): array for name, array in tensors.items()}


def _name(task: int, name: str) -> str:
    return f"gauss.{task}.{name}"


def _of_task(state: State, task: int) -> list[ClassEntry]:
    tensors = {name: state.tensors[_name(task, name)] for name in _NAMES}
    clients = [row.tobytes().decode("ascii") for row in tensors["client"]]
    labels = np.asarray(tensors["label"], dtype=np.int64).tolist()
    gaussians = stored_gaussians(tensors)
    return [ClassEntry(task, c, k, g) for c, k, g in zip(labels, clients, gaussians, strict=True)]


def _of_update(h: Described, update: Update, task: int, device: str) -> list[ClassEntry]:
    counts = update.payload.i64("count").tolist()
    labels = update.payload.i64("classes").tolist()
    owned = [(c, n) for c, n in zip(labels, counts, strict=True) if n >= h.min_count_upload]
    gaussians = unpack_gaussians(update.payload, [n for _, n in owned], h.cov, h.cov_rank, device)
    return [
        ClassEntry(task, c, str(update.client), g)
        for (c, _), g in zip(owned, gaussians, strict=True)
    ]
