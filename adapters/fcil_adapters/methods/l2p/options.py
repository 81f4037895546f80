"""L2P's hyper-parameters, presets and the names of its tensors (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.prompts.options import PromptHparams

NAMES = ("prompt.pool", "key.pool")


class L2pHparams(PromptHparams):
    """Defaults are those of the PyTorch port and of the federated code (NOTES.md)."""

    pool_size: int = Field(default=10, ge=1, description="Prompts M in the pool.")
    length: int = Field(default=5, ge=1, description="Tokens of a prompt.")
    top_k: int = Field(default=5, ge=1, description="Prompts that lead an image's tokens.")
    pull: float = Field(
        default=0.5,
        ge=0,
        description="Weight of the term that pulls chosen keys to their queries (paper: 0.5). "
        "Nothing else trains keys, so any weight above 0 does nearly the same.",
    )
    batchwise: bool = Field(
        default=False,
        description="Choose one set of prompts for all images that are scored together, by "
        "votes. Test images of one task then help each other; results are inflated.",
    )
    feature: Literal["prompts", "token", "token_and_prompts"] = Field(
        default="prompts",
        description="Input of the head: the mean of the prompts' outputs (paper), the class "
        "token, or the mean of both (federated code).",
    )
    spread: float = Field(
        default=1.0, gt=0, description="First prompts and keys are drawn from U[-spread, spread]."
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.top_k > self.pool_size:
            raise ValueError(
                f"top_k = {self.top_k} prompts cannot be chosen from a pool of {self.pool_size}"
            )
        return self


# The federated code as run; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "repo": {
            "query": "view",
            "schedule": "constant",
            "pull": 0.0,
            "feature": "token_and_prompts",
        },
        "short": {"batch_size": 16, "lr": 1e-2, "augment": "jitter", "feature": "token"},
    }
)

ECONOMIES = (
    Economy("prompts of 3 tokens", "two of five tokens of a prompt", {"length": 3}),
    Economy("6 prompts in the pool", "most of the choice", {"pool_size": 6}),
)
