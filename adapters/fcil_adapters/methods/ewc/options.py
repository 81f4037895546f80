"""EWC's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.toolkit.lora.options import LoraHparams


class EwcHparams(LoraHparams):
    """Fed-TaLoRA's placement and optimiser; EWC adds the quadratic penalty."""

    ewc_lambda: float = Field(default=1.0, ge=0, description="Weight of F (theta - theta*)^2.")
    gamma: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Share of earlier tasks' F that is kept after each task.",
    )
    fisher: Literal["B", "AB"] = Field(
        default="B",
        description="Factors that are trained and penalised: B on an A that stays as drawn, so "
        "that the penalty acts on the weights; or both factors.",
    )

    @property
    def trained_factors(self) -> str:
        """The factors whose importance is measured."""
        return self.fisher

    @property
    def keeps_teacher(self) -> bool:
        """The last task's LoRA is theta*."""
        return True
