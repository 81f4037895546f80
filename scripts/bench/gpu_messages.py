"""What a section of `scripts/gpu` is asked, and what it says: JSON objects, one a line."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fcil_adapters.backbones.backbone import Backbone, load_backbone
from fcil_adapters.backbones.known import EMBEDDED_NAMES
from fcil_protocol.errors import FcilError

Message = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What is measured, and where.

    Attributes:
        weights: of the backbone; None: random ones.
        data, experiment, only: of the paper's cell.
        work: folder for everything that is written.
        ends: when the section ends, on the system's monotonic clock.
    """

    device: str
    backbone: str
    weights: str | None
    clients: int
    data: str | None
    experiment: str
    only: str
    work: str
    ends: float

    @property
    def small(self) -> bool:
        """Without a GPU only the way is tried, with the least of everything."""
        return self.device == "cpu"

    def weights_of(self, name: str) -> Path | None:
        """Return a backbone's weights: the given file, or random ones in a file of this run."""
        if name in EMBEDDED_NAMES:
            return None
        if self.weights is not None:
            return Path(self.weights)
        path = Path(self.work) / f"{name}.safetensors"
        if not path.exists():
            import safetensors.torch
            import timm

            torch.manual_seed(0)
            state = timm.create_model(name, pretrained=False, num_classes=0).state_dict()
            half = path.with_suffix(".half")
            safetensors.torch.save_file(state, half)
            half.rename(path)
        return path

    def load(self, name: str, device: str) -> Backbone:
        return load_backbone(name, self.weights_of(name), device)


class TimeUp(BaseException):
    """The section's time is over."""


def head(*cells: str) -> Message:
    return {"head": cells}


def row(*cells: str, fits: bool | None = None) -> Message:
    """Return a row; ``fits``: a comparison is within its tolerance, None: it is none."""
    return {"row": cells, "fits": fits}


def note(text: str) -> Message:
    return {"note": text}


def failed(what: str) -> Message:
    """Return the failure that is being handled, and write its traceback."""
    error = sys.exc_info()[1]
    traceback.print_exc()
    words = error.message if isinstance(error, FcilError) else f"{type(error).__name__}: {error}"
    first = words.strip().splitlines()[0][:400] if words.strip() else type(error).__name__
    return {"failed": f"{what}: {first.rstrip('.')}."}
