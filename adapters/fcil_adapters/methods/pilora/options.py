"""PILoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.backbones.blocks import Blocks
from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.prototypes.options import PrototypeHparams

Compose = Literal["sum_of_products", "product_of_sums", "task0_plus_current", "task0_only"]


class PiloraHparams(PrototypeHparams):
    """Defaults are the published settings where they work as described (NOTES.md)."""

    blocks: Blocks = Field(default=(0,), description="Transformer blocks whose q and v get a LoRA.")
    gamma_ort: float = Field(
        default=0.5, ge=0, description="Weight of the orthogonality to past A's, l_ort."
    )
    l1: float = Field(
        default=0.0, ge=0, description="Weight of ||A_q||_1 + ||A_v||_1 (published code: 0.01)."
    )
    compose: Compose = Field(
        default="sum_of_products",
        description="How the tasks' LoRAs form one weight: sum of B_i A_i; (sum B)(sum A) "
        "(paper); (B_0 + B_t)(A_0 + A_t); B_0 A_0 alone (published code as run).",
    )
    train_with: Literal["past_plus_current", "current_only"] = Field(
        default="past_plus_current",
        description="LoRAs active in training: as at inference, or the current one alone "
        "(paper, published code).",
    )
    candidates: Literal["seen", "all"] = Field(
        default="seen",
        description="Columns of the training softmax: seen classes, or also prototypes of "
        "classes still to come, as fixed negatives (published code).",
    )
    total_classes: int | None = Field(
        default=None, ge=1, description="Classes of the whole run; needed by candidates = 'all'."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.candidates == "all" and self.total_classes is None:
            raise ValueError("candidates = 'all' needs total_classes = <classes of the whole run>")
        return self


# The paper's letter; the published code as run; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {
            "dce": "sq",
            "compose": "product_of_sums",
            "train_with": "current_only",
            "init": "random",
            "init_a": "gaussian",
            "reweight": {"temperature": "mul", "distance": "squared", "empty": "uniform"},
        },
        "repo": {
            "epochs": 10,
            "weight_decay": 1e-5,
            "schedule": "cosine_repeat",
            "l1": 0.01,
            "compose": "task0_only",
            "train_with": "current_only",
            "init": "random",
            "mean_from": "training",
            "reweight": {"empty": "uniform"},
        },
        "short": {"epochs": 3, "lr_prototype": 8e-3, "lr_lora": 2e-4, "delta": 30.0},
    }
)

ECONOMIES = (
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
    Economy("rank 1", "three quarters of each LoRA's rank", {"rank": 1}),
)
