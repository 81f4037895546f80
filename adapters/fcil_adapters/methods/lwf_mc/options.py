"""FedLwF.MC's hyper-parameters (torch-free)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.options import LoraHparams, PastRows


class LwfMcHparams(LoraHparams):
    """Fed-TaLoRA's placement and optimiser; the loss has no option."""

    @property
    def keeps_teacher(self) -> bool:
        """The last task's model is a part, also for clients that join late."""
        return True

    @property
    def past_rows(self) -> PastRows:
        """All rows are trained, the past ones towards the teacher's scores."""
        return "together"
