"""A client's choice of precision on its device, and the context that applies it (torch)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from fcil_adapters.backbones.precision import Precision, check_choice


def precision_of(choice: str, device: str) -> Precision:
    """Return the precision that a choice means on a device.

    ``auto``: fp32, as long as ``amp`` is untested on a GPU. ``amp``: bf16 where the device computes
    with it, else fp16 with scaled losses.

    Raises:
        ConfigError: the choice is unknown.
    """
    check_choice(choice)
    if choice != "amp":
        return "fp32"
    if not device.startswith("cuda"):
        return "bf16"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def mixed(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Return the context in which a training step's forward pass runs."""
    if precision == "fp32":
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.partition(":")[0], dtype)
