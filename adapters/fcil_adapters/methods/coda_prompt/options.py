"""CODA-Prompt's presets, and how it sends less (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fcil_adapters.contract import Economy

# The paper's letter; the federated code as run; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {"query": "view", "orthogonality": 0.1},
        "repo": {"query": "view", "schedule": "constant"},
        "short": {"batch_size": 16, "lr": 1e-2, "augment": "jitter"},
    }
)

ECONOMIES = (
    Economy("5 components a task", "half of the components", {"components": 5}),
    Economy("4 rows in a component", "half of a prompt's length", {"length": 4}),
    Economy("components in one block", "four of five blocks", {"blocks": (0,)}),
)
