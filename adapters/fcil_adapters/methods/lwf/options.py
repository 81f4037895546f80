"""LwF's hyper-parameters (torch-free)."""

from __future__ import annotations

from pydantic import Field

from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class LwfHparams(CrossEntropyHparams):
    """Fed-TaLoRA's placement, optimiser and loss; LwF adds the distillation."""

    alpha: float = Field(default=1.0, ge=0, description="Weight of the distillation.")
    temperature: float = Field(default=2.0, gt=0, description="T of the softened scores.")

    @property
    def keeps_teacher(self) -> bool:
        """The last task's model is a part, also for clients that join late."""
        return self.alpha > 0
