"""LoRM's options (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.lora.manifest import SHORT
from fcil_adapters.toolkit.lora.options import LoraHparams, Module


class LormHparams(LoraHparams):
    """The optimiser of the other methods with LoRA, on all Linears of a block (NOTES.md)."""

    rank: int = Field(default=16, ge=1, description="Rank r of every LoRA.")
    modules: tuple[Module, ...] = Field(
        default=("qkv", "proj", "fc1", "fc2"),
        min_length=1,
        description="Adapted modules of each block: qkv as one matrix (or q, v), proj "
        "(attention); fc1, fc2 (MLP).",
    )
    head_average: Literal["samples"] = Field(
        default="samples",
        description="The head's biases, and where a merge falls back to the mean: averaged with "
        "the clients' weights.",
    )
    train: Literal["alternate", "B"] = Field(
        default="alternate",
        description="Train B in the even rounds of a task and A in the odd ones, or B alone.",
    )
    task_merge: Literal["regmean", "mean"] = Field(
        default="regmean",
        description="Tasks' updates of a weight: merged column by column with the squares of its "
        "inputs, for which a task has one more round; or their mean.",
    )
    head_alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Factor of the products of different features in the head's Gram matrix.",
    )
    eps: float = Field(
        default=1e-6,
        ge=1e-10,
        le=1,
        description="Pull of a merge towards the plain mean, as a share of its Gram matrix's mean "
        "diagonal.",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images from which on a client describes the inputs of its layers (and sends "
        "its mean feature in a task of a single class); with fewer it sends zeros, and its LoRA "
        "counts in the plain mean alone.",
    )

    @property
    def fresh_lora(self) -> bool:
        """Each task has a LoRA of its own."""
        return True

    def factors_of(self, round_: int) -> str:
        """B first, since it begins at zero and A has no gradient until it has moved."""
        return "A" if self.train == "alternate" and round_ % 2 else "B"


# The published batches; few rounds on a small backbone. With SHORT's own steps, training A against
# a B that has grown diverges after five rounds of a task.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"paper": {"batch_size": 16}, "short": {**SHORT, "lr_lora": 5e-3, "lr_head": 0.03}}
)

ECONOMIES = (
    Economy("rank 4", "three quarters of each LoRA's rank", {"rank": 4}),
    Economy("attention alone", "the LoRA of the MLPs", {"modules": ["qkv", "proj"]}),
    Economy("the mean of tasks", "the round after each task", {"task_merge": "mean"}),
)
