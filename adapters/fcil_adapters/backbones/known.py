"""The backbone that ships with the package, and sizes of common ones by name (torch-free)."""

from __future__ import annotations

import importlib.resources
import re
from dataclasses import replace
from pathlib import Path

from fcil_adapters.contract import BackboneInfo, Preprocessing
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_protocol.errors import ConfigError

EMBEDDED = "vit_nano_patch4_32"
EMBEDDED_NAMES = ("embedded", EMBEDDED)
EMBEDDED_SIZE = (128, 6, 4)  # width, blocks, heads
EMBEDDED_PREPROCESSING = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def embedded_file(suffix: str) -> Path:
    """Return one of its files, such as ``.safetensors``; all are in one folder on disk."""
    return Path(str(importlib.resources.files("fcil_adapters") / "data" / f"{EMBEDDED}{suffix}"))


# Not in the code: a result names the digest of a method's code, of which this module is a part, and
# does not become stale because another backbone ships.
EMBEDDED_DIGEST = embedded_file(".digest").read_text("ascii").strip()


_MLP_RATIO = 4
# name in timm -> width, blocks, heads
_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
# timm's names of plain transformers with a class token: vit_base_patch16_224.dino,
# deit3_small_patch16_384, vit_large_patch14_clip_336, vit_small_patch14_reg4_dinov2.
_NAME = re.compile(
    r"(?:vit|deit|deit3)_(?P<size>tiny|small|base|large|huge)_patch\d+"
    r"_(?:\d+|clip_(?:quickgelu_)?\d+|(?:reg4_)?dinov2)(?:\.\w+)?"
)


def backbone_by_name(name: str) -> BackboneInfo:
    """Return a backbone's name, width, depth, heads and MLP width; the rest stays unknown.

    The sizes follow timm's naming convention; timm may lack the model.

    Raises:
        ConfigError: the name does not give the sizes.
    """
    if name in EMBEDDED_NAMES:
        name, size = EMBEDDED, EMBEDDED_SIZE
    elif found := _NAME.fullmatch(name):
        size = _SIZES[found["size"]]
    else:
        raise ConfigError(
            f"the sizes of the backbone {name[:80]!r} cannot be derived from its name.",
            action="Known are 'embedded' and names such as vit_base_patch16_224.dino: vit, deit "
            f"or deit3; {', '.join(_SIZES)}; patch and image size, clip_ and image size, or "
            "dinov2.",
        )
    dim, depth, heads = size
    return replace(
        NO_BACKBONE, name=name, dim=dim, depth=depth, heads=heads, mlp_dim=_MLP_RATIO * dim
    )
