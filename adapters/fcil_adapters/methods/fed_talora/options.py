"""Fed-TaLoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.contract import Hparams, TaskInfo
from fcil_adapters.economies import Economy
from fcil_adapters.placement import Blocks

Module = Literal["q", "v", "fc1", "fc2"]


class FedTaloraHparams(Hparams):
    """Defaults are the published settings; what the paper leaves open is in NOTES.md."""

    rank: int = Field(default=4, ge=1, description="Rank r of every LoRA.")
    blocks: Blocks = Field(default=(0, 1, 2, 3), description="Transformer blocks that get LoRA.")
    modules: tuple[Module, ...] = Field(
        default=("q", "v", "fc1", "fc2"),
        min_length=1,
        description="What is adapted in each block: q, v (attention), fc1, fc2 (MLP).",
    )
    scale: float = Field(default=1.0, gt=0, description="Factor of B A x.")
    init_a: Literal["uniform", "gaussian"] = Field(
        default="uniform",
        description="A at the start: U(-1/sqrt(in), 1/sqrt(in)), or N(0, 1/in) (paper).",
    )
    freeze_a: bool = Field(
        default=False,
        description="Train and send B alone (FFA-LoRA): half the upload, and plain averages of B "
        "are exact, so there is no residual.",
    )
    residual: Literal["factored", "dense", "off"] = Field(
        default="factored",
        description="How the difference between the mean product and the product of means "
        "reaches the clients: exact factors, a dense sum each round, or not at all.",
    )
    catch_up: Literal["cheapest", "factors"] = Field(
        default="cheapest",
        description="With factors: roll them into one dense sum once that is smaller than their "
        "log (for newcomers), or never (a fleet that is always there).",
    )
    weights: Literal["samples", "uniform"] = Field(
        default="samples", description="Weight of a client: its share of images, or 1 / K."
    )
    head_average: Literal["samples", "rows"] = Field(
        default="samples",
        description="Head rows: averaged with the clients' weights, or each class row with the "
        "clients' images of that class.",
    )
    head_loss: Literal["current", "seen_frozen", "all"] = Field(
        default="current",
        description="Columns of the cross-entropy: the task's classes; all seen classes with past "
        "rows frozen; all seen classes, all rows trained.",
    )
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_lora: float = Field(default=1e-3, ge=0, description="SGD's step for LoRA; 0: frozen.")
    lr_head: float = Field(default=1e-2, gt=0, description="SGD's step for the head.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum.")
    weight_decay: float = Field(default=0.0, ge=0, description="SGD's L2 term.")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="Steps over the rounds of a task."
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="crop_flip",
        description="Random views in training; use jitter where mirror images differ (digits).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images from which on a client sends its mean feature, which only tasks of a "
        "single class need; the mean of one image is that image's feature.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.modules)) != len(self.modules):
            raise ValueError(f"modules must be different, got {list(self.modules)}")
        return self

    @property
    def corrects(self) -> bool:
        """Whether there can be a residual."""
        return self.residual != "off" and not self.freeze_a

    def single_column(self, task: TaskInfo) -> bool:
        """Say whether the cross-entropy of a task has one column, so that it teaches nothing."""
        classes = task.classes if self.head_loss == "current" else task.seen
        return len(classes) == 1


# The paper's letter (Eq. 4, 7 to 9: 1 / K; Gaussian A); few rounds on a small backbone.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {"weights": "uniform", "init_a": "gaussian"},
        "short": {"epochs": 3, "batch_size": 16, "lr_lora": 1e-2, "lr_head": 0.1},
    }
)

# By what the ablations lost (docs/benchmarks.md); what was not measured comes last.
ECONOMIES = (
    Economy(
        "residuals in factors for ever",
        "a bound on what a newcomer fetches",
        {"residual": "factored", "catch_up": "factors"},
    ),
    Economy("no residual", "that the global weights are the exact mean", {"residual": "off"}),
    Economy("A frozen, B alone trained", "half of what is trained", {"freeze_a": True}),
    Economy("q and v alone", "the LoRA of the MLPs", {"modules": ["q", "v"]}),
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
)
