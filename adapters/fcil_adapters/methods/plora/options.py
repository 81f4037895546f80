"""PLoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from fcil_adapters.backbones.blocks import Blocks
from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.prototypes.options import PrototypeHparams


class PloraHparams(PrototypeHparams):
    """Defaults are the published settings where they work as described (NOTES.md)."""

    blocks: Blocks = Field(
        default=(0, 1, 2, 3, 4),
        description="Transformer blocks whose q and v get a LoRA; distillation compares the "
        "class token after the last of them.",
    )
    gamma_kd: float = Field(
        default=5.0,
        ge=0,
        description="Weight of the distillation l_kd; 0: no teacher is sent or used.",
    )
    kd_reduction: Literal["sum_d", "mean_d"] = Field(
        default="sum_d",
        description="Squared distance to the teacher, summed over the width (paper) or its mean "
        "over it (then gamma_kd must be d times larger for the same effect).",
    )


# The paper's letter; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {
            "dce": "sq",
            "init": "random",
            "reweight": {"temperature": "mul", "distance": "squared", "empty": "uniform"},
        },
        "short": {"epochs": 3, "lr_prototype": 5e-2, "lr_lora": 2e-3},
    }
)

ECONOMIES = (
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
    Economy("rank 1", "three quarters of each LoRA's rank", {"rank": 1}),
)
