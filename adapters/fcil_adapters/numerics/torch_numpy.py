"""The only conversion between torch tensors and the numpy arrays that travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_torch(
    array: NDArray[Any], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Tensor:
    """Copy an array to a device, with its own dtype unless another is given.

    It always copies: arrays of a payload are read-only views of received bytes.
    """
    return torch.tensor(np.ascontiguousarray(array), device=device, dtype=dtype)


def to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    """Copy a floating-point tensor to a C-contiguous float32 array (bf16 has no numpy type)."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
