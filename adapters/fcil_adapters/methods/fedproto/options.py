"""FedProto's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FedprotoHparams(CrossEntropyHparams):
    """Fed-TaLoRA's placement, optimiser and loss; FedProto adds the pull."""

    pull: float = Field(
        default=0.1, ge=0, description="Weight of the squared distance to global prototypes."
    )
    inference: Literal["head", "prototypes"] = Field(
        default="head",
        description="Classify by the head (fed-mammoth) or by the nearest prototype (paper).",
    )
    min_count_upload: int = Field(
        default=1,
        ge=1,
        description="Images from which on a client sends a class's mean feature; the mean of one "
        "image is that image's feature.",
    )
