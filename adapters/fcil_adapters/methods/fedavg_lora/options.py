"""FedAvg-LoRA's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FedavgLoraHparams(CrossEntropyHparams):
    """Fed-TaLoRA's placement, optimiser and loss, so that only the residual differs."""
