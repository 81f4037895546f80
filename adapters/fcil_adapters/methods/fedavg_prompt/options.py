"""FedAvg-Prompt's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fcil_adapters.contract.traffic import Economy
from fcil_adapters.toolkit.prompts.options import PoolHparams


class FedAvgPromptHparams(PoolHparams):
    """The options of HePCo's client."""


# The published code as run; few rounds on a small backbone.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "repo": {"lr": 5e-3, "query": "view"},
        "short": {
            "pixels": "normalised",
            "pool_size": 20,
            "prompt_length": 8,
            "epochs": 3,
            "batch_size": 16,
            "lr": 1e-2,
        },
    }
)

ECONOMIES = (
    Economy("50 prompts in a pool", "prompts", {"pool_size": 50}),
    Economy("20 prompts in a pool", "prompts", {"pool_size": 20}),
    Economy("8 rows in a prompt", "most of a prompt's length", {"prompt_length": 8}),
)
