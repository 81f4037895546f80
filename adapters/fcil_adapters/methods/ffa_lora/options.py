"""FFA-LoRA's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FfaLoraHparams(CrossEntropyHparams):
    """FedAvg-LoRA's, so that the two differ by what is trained alone."""

    @property
    def trained_factors(self) -> str:
        """A stays as the server drew it."""
        return "B"
