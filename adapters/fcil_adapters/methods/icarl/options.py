"""iCaRL's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.toolkit.lora.options import LoraHparams, PastRows


class IcarlHparams(LoraHparams):
    """Fed-TaLoRA's placement and optimiser; exemplars and means are iCaRL's."""

    memory: int = Field(
        default=200,
        ge=1,
        description="Exemplars of a client, all past classes together; the customary 2,000 are "
        "those of ten such clients.",
    )
    means_from: Literal["images", "exemplars"] = Field(
        default="images",
        description="A new class's mean: over all images at the end of its task, or over its "
        "exemplars alone (paper). Past classes have exemplars only.",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images from which on a client sends a class's mean feature; the mean of one "
        "image is that image's feature.",
    )

    @property
    def keeps_teacher(self) -> bool:
        """The last task's model is a part, also for clients that join late."""
        return True

    @property
    def past_rows(self) -> PastRows:
        """All rows are trained."""
        return "together"
