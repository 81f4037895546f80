"""Exemplars: images of past classes that a client may look at again (torch-free).

They are in the user's folder already, so nothing is copied: a learner's state names them by the
SHA-256 of their content (tensor `EXEMPLARS`), and the worker opens exactly these. Only a method
that declares exemplars gets any. Neither the images nor their digests leave the device.

Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, CVPR 2017,
https://arxiv.org/abs/1611.07725.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract.local_images import DIGEST_BYTES, ImageSet, digests_of
from fcil_protocol.errors import InternalError
from fcil_protocol.payloads.payload import Payload

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

EXEMPLARS = "exemplars"  # the tensor of a learner's state: uint8 (m, 32), one digest a row


def no_exemplars(_hparams: Any) -> int:
    """Return 0: the method keeps no exemplars."""
    return 0


@dataclass(frozen=True)
class Exemplars:
    """Extra input of a learner that keeps exemplars, besides the current task's images.

    Attributes:
        images: those that its state names and that still exist, in the state's order.
        digests: (m, 32), of ``images``.
        current: (N, 32), of the current task's images, which the next state may name.
    """

    images: ImageSet
    digests: U8
    current: U8


@dataclass(frozen=True)
class Joined:
    """The images of two sets as one (`image_set.ImageSet`), the first set's first."""

    first: ImageSet
    second: ImageSet

    @property
    def labels(self) -> I64:
        """Global class ids, (N,)."""
        return np.concatenate([self.first.labels, self.second.labels])

    @property
    def size(self) -> int:
        """Side of the images in pixels, S."""
        return self.first.size

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def take(self, index: I64) -> U8:
        """Return images (len(index), S, S, 3)."""
        out = np.empty((len(index), self.size, self.size, 3), dtype=np.uint8)
        later = index >= len(self.first)
        for images, mine, shift in (
            (self.first, ~later, 0),
            (self.second, later, len(self.first)),
        ):
            if mine.any():
                out[mine] = images.take(index[mine] - shift)
        return out


def exemplar_digests(state: Payload) -> list[str]:
    """Return the digests (hex) that a learner's state names, in order; none for an empty state."""
    return digests_of(state, EXEMPLARS)


def with_exemplars(state: Payload, digests: U8) -> Payload:
    """Return a state that names these exemplars (m, 32), each once, in place of earlier ones."""
    _, first = np.unique(digests, axis=0, return_index=True)
    return Payload({**state.tensors, EXEMPLARS: digests[np.sort(first)]}, state.meta)


def check_state(state: Payload, most: int) -> None:
    """Check the exemplars that a learner's new state names.

    Raises:
        InternalError: exemplars of a method that declares none, more than it declares, or no
            digests.
    """
    rows = state.tensors.get(EXEMPLARS)
    if rows is None:
        return
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != DIGEST_BYTES:
        raise InternalError(
            f"the learner's {EXEMPLARS!r}: expected uint8 (m, {DIGEST_BYTES}), "
            f"got {rows.dtype} {rows.shape}."
        )
    if len(rows) > most:
        raise InternalError(f"the learner keeps {len(rows)} exemplars, its method declares {most}.")


def class_share(most: int, classes: int) -> int:
    """Return how many exemplars each of some classes may have: the memory, evenly divided."""
    return most // classes if classes else 0


def herd(features: NDArray[np.floating[Any]], most: int) -> I64:
    """Choose images whose running mean follows the mean of all (iCaRL, Algorithm 4).

    The k-th is ``argmin_x ||mu - (phi(x) + sum_{j<k} phi(p_j)) / k||`` over images not yet
    chosen; ties go to the first. A shorter list is the beginning of a longer one.

    Args:
        features: phi, (n, d).
        most: how many.

    Returns:
        Positions in ``features``, in the order of choice: (min(n, most),).
    """
    phi = features.astype(np.float64)
    if not len(phi):
        return np.zeros(0, dtype=np.int64)
    mu, total = phi.mean(axis=0), np.zeros(phi.shape[1])
    free = np.ones(len(phi), dtype=bool)
    chosen: list[int] = []
    for k in range(1, min(len(phi), most) + 1):
        distance = np.linalg.norm(mu - (phi + total) / k, axis=1)  # (n,)
        best = int(np.argmin(np.where(free, distance, np.inf)))
        chosen.append(best)
        free[best] = False
        total += phi[best]
    return np.array(chosen, dtype=np.int64)


def exemplar_notice(most: int) -> str:
    """Return a sentence about a method's exemplars for the owner of the images; empty: none."""
    if not most:
        return ""
    return (
        f"re-reads up to {most:,} images of past classes in place; "
        "neither they nor their digests leave this device"
    )
