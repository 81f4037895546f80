"""Hyper-parameters of the Gaussian head (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.contract import LateHparams
from fcil_adapters.toolkit.gaussians.discriminant_head import QuadraticHparams


class GaussianHeadHparams(QuadraticHparams, LateHparams):
    """Names as in HGP, of which this is the half without prompts (NOTES.md)."""

    cov: Literal["lowrank", "full", "diag"] = Field(
        default="lowrank",
        description="Covariance of a class: its largest eigenvalues and the diagonal of the "
        "rest; all of it (as triangle or exact factor, whichever is smaller); its diagonal.",
    )
    cov_rank: int = Field(default=16, ge=1, description="Eigenvalues that 'lowrank' keeps.")
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Classes with fewer local images keep their Gaussian at home. 2 or more: no "
        "single image's feature leaves a client.",
    )
    head: Literal["trained", "lda", "quadratic"] = Field(
        default="trained",
        description="The server fits a linear head to features drawn from the Gaussians; or "
        "computes linear or quadratic discriminant analysis from their moments.",
    )
    shrinkage: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Share of the identity, of the same trace, in the covariance that 'lda' "
        "inverts; 'trained' begins there.",
    )
    class_weights: Literal["counts", "uniform"] = Field(
        default="counts",
        description="Classes weigh in proportion to their images, or all alike.",
    )
    cov_scale: float | None = Field(
        default=None,
        gt=0,
        description="Factor of the covariances in sampling. None: 3, and 1 for 'diag'.",
    )
    head_loss: Literal["ce", "ce_logit_norm"] = Field(
        default="ce", description="Cross-entropy of the logits, or of logits / (0.1 norm)."
    )
    resample: Literal["epoch", "round"] = Field(
        default="epoch", description="Draw new samples in each epoch, or once per round."
    )
    samples_per_class: int = Field(
        default=256, ge=1, description="Samples per class on average, in each epoch."
    )
    server_epochs: int = Field(default=5, ge=1, description="Epochs of the head on samples.")
    server_batch: int = Field(default=256, ge=1, description="Samples per step of the head.")
    server_lr: float = Field(default=0.01, gt=0, description="SGD's first step for the head.")
    server_momentum: float = Field(default=0.9, ge=0, lt=1, description="SGD's momentum.")

    @property
    def least_images(self) -> int:
        """Images of the smallest Gaussian that leaves a client."""
        return self.min_count_upload

    @property
    def sampling_scale(self) -> float:
        """The factor s of the covariances in sampling."""
        if self.cov_scale is not None:
            return self.cov_scale
        return 1.0 if self.cov == "diag" else 3.0
