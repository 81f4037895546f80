"""PLoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.contract import Hparams
from fcil_adapters.reweight_options import ReweightOptions


class PloraHparams(Hparams):
    """Defaults are the published settings where they work as described (NOTES.md)."""

    rank: int = Field(default=4, ge=1, description="Rank r of every LoRA.")
    blocks: tuple[int, ...] = Field(
        default=(0, 1, 2, 3, 4),
        min_length=1,
        description="Transformer blocks whose q and v get a LoRA; distillation compares the "
        "class token after the last of them.",
    )
    scale: float = Field(default=1.0, gt=0, description="Factor of B A x.")
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_prototype: float = Field(default=2e-3, gt=0, description="Adam's step for prototypes.")
    lr_lora: float = Field(default=1e-5, ge=0, description="Adam's step for LoRA; 0: frozen.")
    weight_decay: float = Field(default=0.0, ge=0, description="L2 term inside Adam.")
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="Steps over the rounds of a task."
    )
    lambda_pl: float = Field(default=0.001, ge=0, description="Weight of the pull term l_pl.")
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
    delta: float = Field(default=1.0, gt=0, description="Factor of distances in the softmax.")
    dce: Literal["rms", "sq", "sq_over_d"] = Field(
        default="rms",
        description="Distance in both prototype losses: sqrt(sq / d), squared (paper), sq / d.",
    )
    init: Literal["class_means", "random"] = Field(
        default="class_means",
        description="New prototypes: federated class means (one more exchange), or 0.1 N(0, I).",
    )
    mean_from: Literal["eval", "training"] = Field(
        default="eval",
        description="Mean features from a pass after training, or from all training batches.",
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="flip_jitter",
        description="Random views in training; use jitter where mirror images differ (digits).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images of a class from which on its mean feature leaves a client; the mean "
        "of one image is that image's feature.",
    )
    reweight: ReweightOptions = Field(
        default_factory=ReweightOptions, description="How the server combines prototypes."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.blocks)) != len(self.blocks) or min(self.blocks) < 0:
            raise ValueError(f"blocks must be different numbers >= 0, got {list(self.blocks)}")
        return self


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
