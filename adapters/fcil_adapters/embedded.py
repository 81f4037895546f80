"""The backbone that ships with the package: its name, digest, preprocessing and files.

Torch-free.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from fcil_adapters.contract import Preprocessing

EMBEDDED = "vit_nano_patch4_32"
EMBEDDED_NAMES = ("embedded", EMBEDDED)
EMBEDDED_DIGEST = "072344de5c60bf857e06c8e67c2952ba728fdfa6376f0f6a5be50c3e91192f0c"
EMBEDDED_PREPROCESSING = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def embedded_file(suffix: str) -> Path:
    """Return one of its files, ``.safetensors`` or ``.onnx``; they lie side by side on disk."""
    return Path(str(importlib.resources.files("fcil_adapters") / "data" / f"{EMBEDDED}{suffix}"))
