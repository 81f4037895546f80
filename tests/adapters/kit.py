"""What the tests of methods share: the federation of `fcil_adapters.testing`, on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fcil_adapters.testing import (
    DIM,
    SIZE,
    ToyFederation,
    ToyImages,
    client_id,
    make_tasks,
    toy_backbone,
    toy_images,
)
from fcil_protocol.payloads.payload import Payload

__all__ = [
    "DIM",
    "SIZE",
    "Federation",
    "Images",
    "client_id",
    "make_tasks",
    "needs_peft",
    "now",
    "toy_backbone",
    "toy_images",
]

torch.set_num_threads(1)
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs fcil[peft]")
Federation, Images = ToyFederation, ToyImages


def now(parts: Mapping[str, Payload]) -> dict[str, Any]:
    """Return all tensors of the task being learned, whatever parts they travel in."""
    task = parts["current"].meta["task"]
    chosen = [p for n, p in parts.items() if "/" not in n or n == f"task/{task}"]
    return {name: array for part in chosen for name, array in part.tensors.items()}
