"""Let timm be imported where torchvision's compiled operators are missing.

timm imports torchvision. The public torchvision wheel cannot load its C++ operators on a
CPU-only torch, and then fails while it describes one of them ("operator torchvision::nms
does not exist"). fcil never calls these operators, so declaring them is enough.
"""

from __future__ import annotations

import importlib
import sys

import torch

_SYMPTOM = "operator torchvision::nms does not exist"
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_MISSING = ("nms", "qnms")

# torch.library takes declarations back when the library object is collected.
_kept: list[torch.library.Library] = []


def ensure_torchvision() -> bool:
    """Import torchvision; declare its missing operators when, and only when, that fails.

    Call it before ``import timm``.

    Returns:
        Whether the operators had to be declared now.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if _SYMPTOM not in str(error):
            raise
    else:
        return False
    _forget_half_imported()
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _MISSING:
        library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
    _kept.append(library)
    importlib.import_module("torchvision")
    return True


def _forget_half_imported() -> None:
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
