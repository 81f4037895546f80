"""FFA-LoRA's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FfaLoraHparams(CrossEntropyHparams):
    """The options of FedAvg-LoRA, so that only the trained factors differ."""

    @property
    def trained_factors(self) -> str:
        """A stays as the server drew it."""
        return "B"
