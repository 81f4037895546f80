"""FedAvg-LoRA's classifier: the merged LoRA's features through the head as it was trained."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.model import LinearModel


class Model(LinearModel):
    """Nothing of its own."""
