"""The backbone that ships with the package: its name, digest, preprocessing and files.

Torch-free.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from fcil_adapters.contract import Preprocessing

EMBEDDED = "vit_nano_patch4_32"
EMBEDDED_NAMES = ("embedded", EMBEDDED)
EMBEDDED_DIGEST = "41ad1890e0360a9ee54df454ffdbe190d1f93133e11aed6343784a8940f61329"
EMBEDDED_PREPROCESSING = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def embedded_file(suffix: str) -> Path:
    """Return one of its files, ``.safetensors`` or ``.onnx``; they lie side by side on disk."""
    return Path(str(importlib.resources.files("fcil_adapters") / "data" / f"{EMBEDDED}{suffix}"))
