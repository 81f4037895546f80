"""PILoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.contract import Hparams
from fcil_adapters.reweight_options import ReweightOptions

Compose = Literal["sum_of_products", "product_of_sums", "task0_plus_current", "task0_only"]


class PiloraHparams(Hparams):
    """Defaults are the published settings where they work as described (NOTES.md)."""

    rank: int = Field(default=4, ge=1, description="Rank r of every LoRA.")
    blocks: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="Transformer blocks whose q and v get a LoRA."
    )
    scale: float = Field(default=1.0, gt=0, description="Factor of B A x.")
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_prototype: float = Field(default=2e-3, gt=0, description="Adam's step for prototypes.")
    lr_lora: float = Field(default=1e-5, ge=0, description="Adam's step for LoRA; 0: frozen.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="L2 term inside Adam (published code: 1e-5)."
    )
    schedule: Literal["cosine", "cosine_repeat", "constant"] = Field(
        default="cosine",
        description="Steps over the rounds of a task; cosine_repeat uses the first factor twice, "
        "as the published code does.",
    )
    lambda_pl: float = Field(default=0.001, ge=0, description="Weight of the pull term l_pl.")
    gamma_ort: float = Field(
        default=0.5, ge=0, description="Weight of the orthogonality to past A's, l_ort."
    )
    delta: float = Field(default=1.0, gt=0, description="Factor of distances in the softmax.")
    l1: float = Field(
        default=0.0, ge=0, description="Weight of ||A_q||_1 + ||A_v||_1 (published code: 0.01)."
    )
    dce: Literal["rms", "sq", "sq_over_d"] = Field(
        default="rms",
        description="Distance in both losses: sqrt(sq / d) (published code), squared (paper), "
        "sq / d.",
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
    init: Literal["class_means", "random"] = Field(
        default="class_means",
        description="New prototypes: federated class means (one more exchange), or 0.1 N(0, I).",
    )
    candidates: Literal["seen", "all"] = Field(
        default="seen",
        description="Columns of the training softmax: seen classes, or also prototypes of "
        "classes still to come, as fixed negatives (published code).",
    )
    total_classes: int | None = Field(
        default=None, ge=1, description="Classes of the whole run; needed by candidates = 'all'."
    )
    mean_from: Literal["eval", "training"] = Field(
        default="eval",
        description="Mean features from a pass after training, or from all training batches "
        "(published code).",
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
        if self.candidates == "all" and self.total_classes is None:
            raise ValueError("candidates = 'all' needs total_classes = <classes of the whole run>")
        return self


# The paper's letter; the published code as it runs; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {
            "dce": "sq",
            "compose": "product_of_sums",
            "train_with": "current_only",
            "init": "random",
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
