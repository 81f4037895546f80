"""Descriptions of a backbone: torch-free types, and plain fields for messages and the ledger."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from fcil_protocol.errors import WireError
from fcil_protocol.ids import is_digest

MOST_PIXELS = 4096  # side of the largest images that a backbone may have


@dataclass(frozen=True)
class Preprocessing:
    """Steps from a decoded picture to the backbone's input, the same on every device.

    The picture becomes RGB, its shorter side ``round(size / crop_pct)`` pixels, then the central
    ``size`` x ``size`` square, uint8; the backbone normalises with mean and std (of values in [0,
    1]).
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0


@dataclass(frozen=True)
class BackboneInfo:
    """Torch-free description of the frozen backbone.

    Attributes:
        digest: SHA-256 over sorted (name, shape, fp32 little-endian bytes) of the headless state
            dict, before casting or merging (hex); with the image size if that is not the model's
            own (`backbones.weights.digest_at`).
    """

    name: str
    dim: int  # d, width of the CLS feature
    depth: int  # number of blocks
    heads: int
    mlp_dim: int
    preprocessing: Preprocessing
    digest: str


# Stands for the backbone in runs of methods that need none; it fixes the image size.
NO_BACKBONE = BackboneInfo(
    name="none",
    dim=1,
    depth=0,
    heads=0,
    mlp_dim=0,
    preprocessing=Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    digest="0" * 64,
)


def backbone_fields(info: BackboneInfo) -> dict[str, Any]:
    """Return a backbone's description as JSON-ready fields."""
    fields = asdict(info)
    preprocessing = fields["preprocessing"]
    preprocessing["mean"] = list(preprocessing["mean"])
    preprocessing["std"] = list(preprocessing["std"])
    return fields


def backbone_from_fields(fields: dict[str, Any]) -> BackboneInfo:
    """Rebuild a description from fields that may come from outside.

    Raises:
        WireError: a field is missing or out of range.
    """
    try:
        p = fields["preprocessing"]
        preprocessing = Preprocessing(
            size=_within(p["size"], 1, MOST_PIXELS),
            mean=_triple(p["mean"]),
            std=_triple(p["std"]),
            interpolation=str(p["interpolation"])[:32],
            crop_pct=float(p["crop_pct"]),
        )
        info = BackboneInfo(
            name=str(fields["name"])[:128],
            dim=_within(fields["dim"], 1, 65536),
            depth=_within(fields["depth"], 0, 1024),
            heads=_within(fields["heads"], 0, 1024),
            mlp_dim=_within(fields["mlp_dim"], 0, 1 << 20),
            preprocessing=preprocessing,
            digest=str(fields["digest"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the description of the backbone is malformed: {error!r}.") from error
    if not is_digest(info.digest):
        raise WireError("the description of the backbone has no digest.")
    return info


def preprocessing_digest(preprocessing: Preprocessing) -> str:
    """Return the SHA-256 of a preprocessing (hex)."""
    text = json.dumps(asdict(preprocessing), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _within(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(value)
    return value


def _triple(values: Any) -> tuple[float, float, float]:
    a, b, c = (float(v) for v in values)
    return a, b, c
