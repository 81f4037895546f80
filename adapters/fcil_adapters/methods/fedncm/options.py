"""FedNCM's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.contract import LateHparams


class FedncmHparams(LateHparams):
    """The comparison of an image's feature with the class means."""

    metric: Literal["cosine", "euclidean"] = Field(
        default="cosine",
        description="The nearest mean by the angle (paper) or by the distance.",
    )
