"""The probe pictures, whose features client and server compare before learning (torch-free)."""

from __future__ import annotations

import importlib.resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.images.decoding import decode, preprocess
from fcil_protocol.errors import BackboneMismatch

PROBES = ("probe_0.png", "probe_1.png", "probe_2.png", "probe_3.png")

TOLERANCE = 1e-3  # largest relative error of their features between two devices or engines

_FOLDER = importlib.resources.files("fcil_adapters") / "data" / "probe"


def probe_images(info: BackboneInfo) -> NDArray[np.uint8]:
    """Return the four probe pictures that ship with the package, preprocessed: (4, S, S, 3)."""
    pictures = [(_FOLDER / name).read_bytes() for name in PROBES]
    return np.stack([preprocess(decode(data), info.preprocessing) for data in pictures])


def probe_features(backbone: Any) -> NDArray[np.float32]:
    """Return the features of the probe pictures, (4, d), computed as those of every image.

    Client and server compare them (`compare_probes`) before they learn together.
    """
    features: NDArray[np.float32] = backbone.features(probe_images(backbone.info))
    return features


def compare_probes(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the distance between two computations of the probe features.

    Args:
        a: features that one side computed, (P, d).
        b: features that the other side computed, the reference, (P, d).

    Returns:
        The largest ``||a_i - b_i|| / ||b_i||`` over the probe images; infinity if a value is not
            finite. Equal backbones on different machines give about 1e-6.

    Raises:
        BackboneMismatch: the shapes differ.
    """
    if a.shape != b.shape:
        raise BackboneMismatch(
            f"probe features: expected shape {b.shape}, got {a.shape}.",
            action="Use the same backbone on both sides.",
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    left, right = a.astype(np.float64), b.astype(np.float64)
    norms = np.maximum(np.linalg.norm(right, axis=1), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(left - right, axis=1) / norms))
