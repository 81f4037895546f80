"""FFA-LoRA: federated LoRA with A frozen, so that averages of B are exact.

Youbang Sun, Zitao Li, Yaliang Li, Bolin Ding: Improving LoRA in Privacy-preserving Federated
Learning. ICLR 2024. https://arxiv.org/abs/2403.12313

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from fcil_adapters.toolkit.lora.manifest import SHORT, lora_method
from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FfaLoraHparams(CrossEntropyHparams):
    """FedAvg-LoRA's options, so that the two methods differ in the trained factors alone."""

    @property
    def trained_factors(self) -> str:
        """A stays as the server drew it."""
        return "B"


METHOD = lora_method(
    "ffa_lora",
    "FFA-LoRA: federated LoRA with frozen A",
    "Y. Sun, Z. Li, Y. Li, B. Ding. ICLR 2024. https://arxiv.org/abs/2403.12313",
    FfaLoraHparams,
    presets={"short": SHORT, "paper": {"init_a": "gaussian"}},
)
