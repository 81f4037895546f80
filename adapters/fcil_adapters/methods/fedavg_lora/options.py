"""FedAvg-LoRA's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.economies import Economy
from fcil_adapters.lora_head_options import CrossEntropyHparams


class FedavgLoraHparams(CrossEntropyHparams):
    """Fed-TaLoRA's placement, optimiser and loss, so that the two differ by the residual alone."""


ECONOMIES = (
    Economy("q and v alone", "the LoRA of the MLPs", {"modules": ["q", "v"]}),
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
)
