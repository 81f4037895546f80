"""Features of the frozen backbone by image content, kept from round to round (torch-free)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

MEMORY_BYTES = 64 << 20  # 21,000 features of ViT-B, 131,000 of the embedded backbone


class FeatureMemory:
    """Features by the SHA-256 of the preprocessed pixels and a tap; the least used go first.

    Each belongs to one loaded backbone, so weights, engine and device are no part of a key; the
    pixels stand for image and preprocessing. Features of private images stay in memory and are
    never written to a disk.

    Args:
        bytes_: most that the features take.
    """

    def __init__(self, bytes_: int = MEMORY_BYTES) -> None:
        self._most = bytes_
        self._used = 0
        self._kept: OrderedDict[tuple[str, bytes], F32] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, images: U8, tap: str, compute: Callable[[U8], F32]) -> F32:
        """Return the features (B, d) of images (B, S, S, 3).

        Args:
            images: preprocessed, not augmented; at least one.
            tap: name of the kind of feature.
            compute: computes the missing ones, in their order.
        """
        keys = [
            (tap, hashlib.sha256(np.ascontiguousarray(image).data).digest()) for image in images
        ]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        missing = [i for i, key in enumerate(keys) if key not in found]
        if missing:
            fresh = compute(images[np.array(missing)])
            found.update(zip((keys[i] for i in missing), fresh, strict=True))
        for key in keys:
            self._keep(key, found[key])
        return np.stack([found[key] for key in keys])

    def _keep(self, key: tuple[str, bytes], feature: F32) -> None:
        if key not in self._kept:
            # A row of a batch is a view that keeps the entire batch in memory.
            self._kept[key] = feature if feature.base is None else feature.copy()
            self._used += feature.nbytes
        self._kept.move_to_end(key)
        while self._used > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._used -= oldest.nbytes
