"""HGP's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from fcil_adapters.backbones.blocks import Blocks
from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.gaussians.discriminant_head import QuadraticHparams

SHARED = "shared"  # name of the one pool of ``pool_sharing = "shared"``


class HgpHparams(QuadraticHparams):
    """Defaults are the published settings where they are stated (NOTES.md)."""

    prompts: int = Field(default=10, ge=1, description="Prompts that each task adds to a pool.")
    length: int = Field(
        default=8,
        ge=2,
        multiple_of=2,
        description="Rows of a prompt: half go before the keys, half before the values.",
    )
    blocks: Blocks = Field(
        default=(0, 1, 2, 3, 4), description="Transformer blocks that take prompts."
    )
    pool_sharing: Literal["per_layer", "shared"] = Field(
        default="per_layer", description="A pool for each block, or one pool for all of them."
    )
    score: Literal["cosine", "softmax"] = Field(
        default="cosine", description="Weights of the prompts: plain cosines, or their softmax."
    )
    query: Literal["canonical", "view"] = Field(
        default="canonical",
        description="The frozen feature that chooses prompts in training: of the image as it is, "
        "computed once per round, or of each augmented view (paper), one more pass per batch.",
    )
    pixels: Literal["normalised", "unit"] = Field(
        default="normalised",
        description="Input of the backbone: normalised as it was pre-trained, or plain [0, 1] "
        "(paper).",
    )
    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr_prompt: float = Field(
        default=1e-3, ge=0, description="Adam's step for prompts and their keys; 0: frozen."
    )
    lr_head: float = Field(default=1e-3, gt=0, description="Adam's step for the head's rows.")
    schedule: Literal["cosine", "constant"] = Field(
        default="cosine", description="Steps over the local training of one round."
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        description="Largest length of a batch's gradient (published code: 1). None: no bound.",
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="crop_flip",
        description="Random views: scaled crop and mirror (published); brightness and mirror or "
        "not; or none.",
    )
    cov: Literal["lowrank", "full", "diag"] = Field(
        default="lowrank",
        description="Covariance of a class: its largest eigenvalues and the diagonal of the "
        "rest; all of it (as triangle or exact factor, whichever is smaller); its diagonal.",
    )
    cov_rank: int = Field(default=16, ge=1, description="Eigenvalues that 'lowrank' keeps.")
    cov_scale: float | None = Field(
        default=None,
        gt=0,
        description="Factor of the covariances in sampling. None: 3, and 1 for 'diag' "
        "(published code: 3 for its diagonals).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Classes with fewer local images keep their Gaussian at home. 2 or more: no "
        "single image's feature leaves a client.",
    )
    drop_stale: bool = Field(
        default=False,
        description="Forget a class's Gaussians of earlier rounds once a client sends new ones "
        "(published code), also of clients that are absent.",
    )
    head: Literal["trained", "quadratic"] = Field(
        default="trained",
        description="The server rebalances the head on samples ('rebalance'); or scores with a "
        "quadratic discriminant of all Gaussians, in closed form, and rebalances nothing.",
    )
    rebalance: Literal["seen", "current", "off"] = Field(
        default="seen",
        description="Retrain the head on samples of all seen classes, of the current task's "
        "classes only, or not at all (the ablation).",
    )
    class_weights: Literal["counts", "uniform"] = Field(
        default="counts",
        description="How often a class is sampled: in proportion to its images, or all alike "
        "(published code).",
    )
    head_loss: Literal["ce", "ce_logit_norm"] = Field(
        default="ce",
        description="Cross-entropy of the logits, or of logits / (0.1 norm) (published code).",
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
    def pools(self) -> tuple[str, ...]:
        """The names of the prompt pools: block numbers, or one for all blocks."""
        if self.pool_sharing == "shared":
            return (SHARED,)
        return tuple(str(b) for b in sorted(self.blocks))

    @property
    def sampling_scale(self) -> float:
        """The factor s of the covariances in sampling."""
        if self.cov_scale is not None:
            return self.cov_scale
        return 1.0 if self.cov == "diag" else 3.0


# The paper's letter; the authors' code as it runs; CCVR's server from the same repository; few
# rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {"cov": "full", "query": "view", "pixels": "unit", "resample": "round"},
        "repo": {
            "query": "view",
            "schedule": "constant",
            "clip_norm": 1.0,
            "cov": "diag",
            "cov_scale": 3.0,
            "min_count_upload": 2,
            "drop_stale": True,
            "class_weights": "uniform",
            "head_loss": "ce_logit_norm",
        },
        "ccvr": {
            "cov": "diag",
            "min_count_upload": 2,
            "drop_stale": True,
            "rebalance": "current",
            "class_weights": "uniform",
            "head_loss": "ce_logit_norm",
        },
        "short": {
            "epochs": 5,
            "batch_size": 16,
            "lr_prompt": 1e-3,
            "lr_head": 1e-2,
            "augment": "jitter",
        },
    }
)

# By what the ablations lost (docs/benchmarks/paper-claims.md); what was not measured comes last.
ECONOMIES = (
    Economy("low-rank covariances", "all but their largest eigenvalues", {"cov": "lowrank"}),
    Economy("covariances of rank 4", "all but 4 eigenvalues", {"cov_rank": 4}),
    Economy("diagonal covariances", "how features vary together", {"cov": "diag"}),
    Economy("one pool of prompts", "prompts of each block's own", {"pool_sharing": "shared"}),
    Economy("5 prompts a task", "half of the prompts", {"prompts": 5}),
)
