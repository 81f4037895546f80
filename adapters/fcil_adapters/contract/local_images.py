"""Local images as learners and evaluators read them, and the digests of those in a learner's state.

A learner's state names images by the SHA-256 of their content: *exemplars* (`contract.exemplars`),
and *counted* images, which a counted update of this client describes. An exchange with
`Exchange.unlabelled` or `Exchange.counts_once` shows a learner only images that the state does not
name. The new state holds once the server has counted the update, so an image is in at most one
counted update of a run. Images and digests stay on the device (torch-free).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import InternalError
from fcil_protocol.payloads.payload import Payload

U8 = NDArray[np.uint8]

COUNTED = "counted"  # the tensor of a learner's state: uint8 (m, 32), one digest a row
DIGEST_BYTES = 32  # of SHA-256


class ImageSet(Protocol):
    """Read access of a learner or evaluator to local images of some classes, decoded once."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Global class ids, (N,)."""
        ...

    @property
    def size(self) -> int:
        """Side of the square images in pixels, S."""
        ...

    def __len__(self) -> int:
        """Number of images, N."""
        ...

    def take(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return images as uint8 (len(index), S, S, 3), RGB, preprocessed, not augmented."""
        ...


def as_digests(hexes: list[str]) -> U8:
    """Return SHA-256 digests in hex as rows of bytes, (len(hexes), 32)."""
    raw = b"".join(bytes.fromhex(one) for one in hexes)
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(hexes), DIGEST_BYTES)


def digests_of(state: Payload, name: str) -> list[str]:
    """Return the digests (hex) in a tensor of a learner's state, in order; none if it is absent."""
    rows = state.tensors.get(name)
    return [] if rows is None else [row.tobytes().hex() for row in rows]


def counted_digests(state: Payload) -> frozenset[str]:
    """Return the digests (hex) of the images that a state names as counted."""
    return frozenset(digests_of(state, COUNTED))


def with_counted(state: Payload, digests: U8) -> Payload:
    """Return a state that names these images (m, 32) as counted, too."""
    before = state.tensors.get(COUNTED, np.zeros((0, DIGEST_BYTES), dtype=np.uint8))
    return Payload({**state.tensors, COUNTED: np.concatenate([before, digests])}, state.meta)


def with_described(
    state: Payload, described: Collection[int], labels: NDArray[np.int64], digests: U8
) -> Payload:
    """Return a state that names the images of some classes as counted, too.

    Args:
        state: before.
        described: ids of the classes that the upload describes.
        labels: (N,), of the images that the learner was shown.
        digests: (N, 32), theirs.
    """
    return with_counted(state, digests[np.isin(labels, sorted(described))])


def check_counted(before: Payload, after: Payload, shown: frozenset[str]) -> None:
    """Check that a learner's new state names only images as counted that it was shown.

    Raises:
        InternalError: it names others, or omits one that it named before.
    """
    named, known = counted_digests(after), counted_digests(before)
    if not (known <= named <= known | shown):
        raise InternalError("the learner's state names other images as counted than it was shown.")
