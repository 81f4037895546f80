"""Options of the prototype re-weighting that PILoRA and PLoRA share (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.contract import Hparams


class ReweightOptions(Hparams):
    """How the server combines the clients' prototypes of one class (`reweighting`)."""

    enabled: bool = Field(
        default=True,
        description="False: plain averages with the clients' sample weights (the ablation).",
    )
    temperature: Literal["div", "mul"] = Field(
        default="div",
        description="softmax(a / eta) as in the published code, or softmax(eta * a) as printed.",
    )
    eta: float = Field(default=0.2, gt=0, description="Temperature or factor of the softmax.")
    distance: Literal["plain", "squared"] = Field(
        default="plain", description="Euclidean distance to the owners' means, or its square."
    )
    empty: Literal["keep", "uniform"] = Field(
        default="keep",
        description="A class that nobody has this round: keep its prototype, or average all.",
    )
    owners_only: bool = Field(
        default=False, description="Combine only prototypes of clients that have the class."
    )
    count_weighted: bool = Field(
        default=False, description="Weight the distance to an owner's mean by its image count."
    )
    min_count: int = Field(
        default=1, ge=1, description="Images from which on a client counts as owner of a class."
    )
