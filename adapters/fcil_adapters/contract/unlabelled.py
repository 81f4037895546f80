"""Unlabelled images that a client's owner offers, each of which counts at most once (torch-free).

A learner meets them only in the rounds of an exchange that declares `Exchange.unlabelled`, and says
by its new state which of them its update counts. That state holds once the update is counted, so an
image is in at most one counted update of a run. Neither images nor digests leave the device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract.exemplars import DIGEST_BYTES, digests_of
from fcil_protocol.errors import InternalError
from fcil_protocol.payloads.payload import Payload

COUNTED = "counted"  # the tensor of a learner's state: uint8 (m, 32), one SHA-256 a row


def counted_digests(state: Payload) -> frozenset[str]:
    """Return the digests (hex) of the images that a learner's state names as counted."""
    return frozenset(digests_of(state, COUNTED))


def with_counted(state: Payload, digests: NDArray[np.uint8]) -> Payload:
    """Return a state that names these images (m, 32) as counted, too."""
    before = state.tensors.get(COUNTED, np.zeros((0, DIGEST_BYTES), dtype=np.uint8))
    return Payload({**state.tensors, COUNTED: np.concatenate([before, digests])}, state.meta)


def check_counted(before: Payload, after: Payload, shown: frozenset[str]) -> None:
    """Check that a learner's new state names only images as counted that it was shown.

    Raises:
        InternalError: it names others, or omits one that it named before.
    """
    named, known = counted_digests(after), counted_digests(before)
    if not (known <= named <= known | shown):
        raise InternalError("the learner's state names other images as counted than it was shown.")
