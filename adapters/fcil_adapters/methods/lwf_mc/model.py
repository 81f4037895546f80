"""The classifier: the merged LoRA's features through the trained head (torch)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.model import LinearModel


class Model(LinearModel):
    """The linear model, unchanged."""
