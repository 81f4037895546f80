"""CODA-Prompt's presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# The paper's letter; the federated code as run; few rounds on a small backbone (NOTES.md).
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {"query": "view", "orthogonality": 0.1},
        "repo": {"query": "view", "schedule": "constant"},
        "short": {"batch_size": 16, "lr": 1e-2, "augment": "jitter"},
    }
)
