"""CCVR's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.gaussians.discriminant_head import QuadraticHparams
from fcil_adapters.toolkit.lora.manifest import LORA_ECONOMIES, SHORT
from fcil_adapters.toolkit.lora.options import LoraHparams, PastRows


class CcvrHparams(LoraHparams, QuadraticHparams):
    """FedAvg-LoRA's training, with HGP's names for the options of Gaussians and head."""

    cov: Literal["lowrank", "full", "diag"] = Field(
        default="lowrank",
        description="Covariance of a class: its largest eigenvalues and the diagonal of the "
        "rest; all of it (as triangle or exact factor, whichever is smaller); its diagonal.",
    )
    cov_rank: int = Field(default=16, ge=1, description="Eigenvalues that 'lowrank' keeps.")
    cov_scale: float = Field(
        default=1.0, gt=0, description="Factor of the covariances in sampling."
    )
    head: Literal["trained", "quadratic"] = Field(
        default="trained",
        description="The server retrains the head on samples; or makes a quadratic discriminant "
        "of all Gaussians, in closed form.",
    )
    combine: Literal["mixture", "pooled"] = Field(
        default="mixture",
        description="Source of the samples: the clients' Gaussians of a class, or one Gaussian "
        "with the mean and covariance of all their images (paper).",
    )
    calibrate: Literal["seen", "current"] = Field(
        default="seen",
        description="Retrain the rows of all seen classes, past Gaussians kept, or of the task's "
        "classes only (fed-mammoth's code).",
    )
    class_weights: Literal["counts", "uniform"] = Field(
        default="counts",
        description="How often a class is sampled: in proportion to its images, or all alike "
        "(paper, fed-mammoth's code).",
    )
    head_loss: Literal["ce", "ce_logit_norm"] = Field(
        default="ce",
        description="The server's loss: cross-entropy of the logits, or of logits / (0.1 norm) "
        "(fed-mammoth's code).",
    )
    resample: Literal["epoch", "round"] = Field(
        default="epoch", description="Draw new samples in each epoch, or once."
    )
    samples_per_class: int = Field(
        default=256, ge=1, description="Samples per class on average, in each epoch."
    )
    server_epochs: int = Field(default=5, ge=1, description="Epochs of the head on samples.")
    server_batch: int = Field(default=256, ge=1, description="Samples per step of the head.")
    server_lr: float = Field(default=0.01, gt=0, description="SGD's first step for the head.")
    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum.")

    @property
    def past_rows(self) -> PastRows:
        """The calibrated head scores; it is a part of its own."""
        return "none"

    @property
    def sampling_scale(self) -> float:
        """The factor s of the covariances in sampling."""
        return self.cov_scale


# The paper's letter; fed-mammoth's code; few rounds on a small backbone.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {
            "cov": "full",
            "combine": "pooled",
            "class_weights": "uniform",
            "min_count_upload": 2,
            "resample": "round",
        },
        "repo": {
            "cov": "diag",
            "calibrate": "current",
            "class_weights": "uniform",
            "head_loss": "ce_logit_norm",
            "min_count_upload": 2,
        },
        "short": SHORT,
    }
)

# Ordered by the losses in HGP's ablations with the same Gaussians
# (docs/benchmarks/paper-claims.md).
ECONOMIES = (
    Economy("low-rank covariances", "all but their largest eigenvalues", {"cov": "lowrank"}),
    Economy("covariances of rank 4", "all but 4 eigenvalues", {"cov_rank": 4}),
    Economy("diagonal covariances", "how features vary together", {"cov": "diag"}),
    *LORA_ECONOMIES,
)
