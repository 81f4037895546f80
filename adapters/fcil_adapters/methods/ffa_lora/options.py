"""FFA-LoRA's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.economies import Economy
from fcil_adapters.lora_head_options import CrossEntropyHparams


class FfaLoraHparams(CrossEntropyHparams):
    """FedAvg-LoRA's, so that the two differ by what is trained alone."""

    @property
    def trained_factors(self) -> str:
        """A stays as the server drew it."""
        return "B"


ECONOMIES = (
    Economy("q and v alone", "the LoRA of the MLPs", {"modules": ["q", "v"]}),
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
)
