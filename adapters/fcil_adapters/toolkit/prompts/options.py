"""Shared options of methods whose clients train prompts and a linear head (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.backbones.blocks import Blocks
from fcil_adapters.contract import Hparams


class PromptHparams(Hparams):
    """A client's training: Adam on the cross-entropy over the classes of the current task."""

    epochs: int = Field(default=5, ge=1, description="Local epochs per round.")
    batch_size: int = Field(default=64, ge=1, description="Images per optimiser step.")
    lr: float = Field(default=1e-3, gt=0, description="Adam's step on clients.")
    schedule: Literal["cosine", "cosine_repeat", "constant"] = Field(
        default="cosine",
        description="Steps over the local epochs of a round; cosine_repeat uses the first factor "
        "twice, as HePCo's published code does.",
    )
    augment: Literal["flip_jitter", "jitter", "crop_flip", "none"] = Field(
        default="crop_flip",
        description="Random views in training; use jitter where mirror images differ (digits).",
    )
    query: Literal["canonical", "view"] = Field(
        default="canonical",
        description="Prompts chosen by the frozen feature of the image as it is (computed once), "
        "or of each augmented view (paper).",
    )
    pixels: Literal["normalised", "unit"] = Field(
        default="normalised",
        description="Input of the backbone: normalised as it was pre-trained, or plain [0, 1].",
    )
    average: Literal["samples", "uniform"] = Field(
        default="samples", description="Weights of the clients in the server's averages."
    )


class PoolHparams(PromptHparams):
    """HePCo's client: in some blocks a pool of prompts for all tasks, mixed by cosines."""

    pool_size: int = Field(default=100, ge=1, description="Prompts M in each block's pool.")
    prompt_length: int = Field(
        default=20, ge=2, multiple_of=2, description="Rows L of a prompt; half go to the keys."
    )
    blocks: Blocks = Field(
        default=(0, 1, 2, 3, 4), description="Transformer blocks that take prompts."
    )
    epochs: int = Field(default=10, ge=1, description="Local epochs per round.")
    lr: float = Field(
        default=1e-3, gt=0, description="Adam's step on clients (published code: 5e-3)."
    )
    pixels: Literal["normalised", "unit"] = Field(
        default="unit",
        description="Input of the backbone: plain [0, 1] (paper, published code), or normalised "
        "as it was pre-trained.",
    )
    average: Literal["uniform", "samples"] = Field(
        default="uniform", description="Weights of the clients in the provisional server."
    )


class ComponentHparams(PromptHparams):
    """CODA-Prompt's client: each task adds components to some blocks; past ones are fixed."""

    components: int = Field(default=10, ge=1, description="Components that each task adds.")
    length: int = Field(
        default=8,
        ge=2,
        multiple_of=2,
        description="Rows of a component's prompt: half go to the keys, half to the values.",
    )
    blocks: Blocks = Field(
        default=(0, 1, 2, 3, 4), description="Transformer blocks that take prompts."
    )
    orthogonality: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the penalty on components that are not orthonormal (paper: 0.1; "
        "published code in federations: 0).",
    )
