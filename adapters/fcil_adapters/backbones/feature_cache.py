"""Features of the frozen backbone by image content, kept from round to round (torch-free)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
FeatureKey = tuple[str, bytes]  # tap, SHA-256 of the preprocessed pixels

MEMORY_BYTES = 64 << 20  # 21,000 features of ViT-B, 131,000 of the embedded backbone


def plain_tap(info: BackboneInfo) -> str:
    """Return the name of the feature that a backbone without adapters gives for a plain image.

    It has the digest of weights and image size, so a module with other weights has other names,
    even if it shares the memory of the backbone that it was made of.
    """
    p = info.preprocessing
    return f"cls {info.digest} {p.mean} {p.std}"


class FeatureStore(Protocol):
    """Features outside of this process, which computes those that the store lacks."""

    def get(self, keys: Sequence[FeatureKey]) -> Mapping[FeatureKey, F32]:
        """Return the stored features (d,) among these keys."""
        ...

    def put(self, features: Mapping[FeatureKey, F32]) -> None:
        """Store computed features (d,)."""
        ...


class FeatureMemory:
    """Features by the SHA-256 of the preprocessed pixels and a tap; the least used go first.

    Engine and device are no part of a key: the memory belongs to one loaded backbone. The pixels
    stand for image and preprocessing. Features of private images stay in memory and are not written
    to a disk; only an experiment on this machine adds a store.

    Args:
        bytes_: most that the features take.

    Attributes:
        store: asked for features that are not in memory; None: there is none.
    """

    def __init__(self, bytes_: int = MEMORY_BYTES) -> None:
        self.store: FeatureStore | None = None
        self._most = bytes_
        self._used = 0
        self._kept: OrderedDict[FeatureKey, F32] = OrderedDict()

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
        if self.store is not None:
            found.update(self.store.get([key for key in dict.fromkeys(keys) if key not in found]))
        missing = [i for i, key in enumerate(keys) if key not in found]
        if missing:
            fresh = compute(images[np.array(missing)])
            computed = dict(zip((keys[i] for i in missing), fresh, strict=True))
            found.update(computed)
            if self.store is not None:
                self.store.put(computed)
        for key in keys:
            self._keep(key, found[key])
        return np.stack([found[key] for key in keys])

    def _keep(self, key: FeatureKey, feature: F32) -> None:
        if key not in self._kept:
            # A row of a batch is a view that keeps the entire batch in memory.
            self._kept[key] = feature if feature.base is None else feature.copy()
            self._used += feature.nbytes
        self._kept.move_to_end(key)
        while self._used > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._used -= oldest.nbytes
