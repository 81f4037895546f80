"""The options of adapt_once (torch-free)."""

from __future__ import annotations

from pydantic import Field

from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.lora.options import LoraHparams


class AdaptHparams(LoraHparams):
    """Training of the LoRA in the first task: the options of `fedavg_lora`, and its length."""

    rounds: int = Field(
        default=10,
        ge=0,
        description="Training rounds of the first task; 0: none, and the method is analytic.",
    )
    skip_rounds: int = Field(
        default=3,
        ge=0,
        description="If so many first rounds bring no update, as where no client has torch, the "
        "others are skipped and the backbone stays as it is; 0: never.",
    )
    epochs: int = Field(default=2, ge=1, description="Local epochs per round.")


class AdaptOnceHparams(AnalyticHparams):
    """The options of `analytic`, and those of the training before its sums."""

    adapt: AdaptHparams = Field(
        default_factory=AdaptHparams, description="Training of the LoRA in the first task."
    )

    @property
    def adapts(self) -> bool:
        """True if the first task trains."""
        return self.adapt.rounds > 0

    @property
    def batch_size(self) -> int:
        """Images of an optimiser step."""
        return self.adapt.batch_size
