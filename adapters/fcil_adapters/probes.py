"""The probe pictures that two sides compare before they learn together (torch-free)."""

from __future__ import annotations

import importlib.resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.images import decode, preprocess

PROBES = ("probe_0.png", "probe_1.png", "probe_2.png", "probe_3.png")

TOLERANCE = 1e-3  # largest relative error of their features between two devices or engines

_FOLDER = importlib.resources.files("fcil_adapters") / "data" / "probe"


def probe_images(info: BackboneInfo) -> NDArray[np.uint8]:
    """Return the four probe pictures that ship with the package, preprocessed: (4, S, S, 3)."""
    pictures = [(_FOLDER / name).read_bytes() for name in PROBES]
    return np.stack([preprocess(decode(data), info.preprocessing) for data in pictures])


def probe_features(backbone: Any) -> NDArray[np.float32]:
    """Return the features of the probe pictures, (4, d): the way of every image, end to end.

    Two sides compare them (`statistics.compare_probes`) before they learn together.
    """
    features: NDArray[np.float32] = backbone.features(probe_images(backbone.info))
    return features
