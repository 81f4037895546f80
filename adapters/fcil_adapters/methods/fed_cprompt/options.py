"""Fed-CPrompt's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field

from fcil_adapters.toolkit.prompts.options import ComponentHparams

FIRST = "first"  # the part with the first head rows of the current task's classes


class FedCPromptHparams(ComponentHparams):
    """The options of a client with components, and of the contrast."""

    epochs: int = Field(default=10, ge=1, description="Local epochs per round.")
    contrast: float = Field(
        default=1.0, ge=0, description="Weight of the contrastive term; 0: none (the ablation)."
    )
    near: float = Field(
        default=1e3,
        ge=0,
        description="Scale of the squared distance to the logits of the round's server.",
    )
    far: float = Field(
        default=1e1,
        ge=0,
        description="Scale of the squared distance to the logits of the previous task's server.",
    )
    margin: float = Field(
        default=1.0,
        ge=0,
        description="Margin by which the second must exceed the first, over a batch.",
    )


# Few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "repo": {"query": "view"},
        "short": {
            "epochs": 5,
            "batch_size": 16,
            "lr": 1e-2,
            "augment": "jitter",
            "contrast": 1e-5,
        },
    }
)
