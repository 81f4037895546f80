"""Local images of some classes, as a learner and an evaluator read them (torch-free)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
