"""FedCLM's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.toolkit.lora.options import LoraHparams, PastRows


class FedclmHparams(LoraHparams):
    """The training options of FedAvg-LoRA; the head serves training alone."""

    metric: Literal["euclidean", "cosine"] = Field(
        default="euclidean",
        description="The nearest mean by distance, or by angle.",
    )

    @property
    def past_rows(self) -> PastRows:
        """Past rows are dropped, since the means score."""
        return "none"
