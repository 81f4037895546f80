"""The analytic method's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fcil_adapters.contract import Hparams


class AnalyticHparams(Hparams):
    """Defaults from measurements on small backbones (NOTES.md)."""

    features: Literal["relu_projection", "linear"] = Field(
        default="relu_projection",
        description="Features of the classifier: ReLU of a fixed random projection, or the "
        "frozen feature itself.",
    )
    projection: int = Field(
        default=2000, ge=1, le=10_000, description="Width D of the random projection."
    )
    rho: float = Field(
        default=1e-3,
        ge=1e-9,
        le=1e3,
        description="Ridge: lambda is rho times the mean of G's diagonal, tr(G) / D.",
    )
    balance: Literal["server", "plain"] = Field(
        default="server",
        description="Every class weighs alike (its sums are divided by its images on the server), "
        "or every image does.",
    )
    truncate: int = Field(
        default=0,
        ge=0,
        description="Directions of its feature products that a client sends, the strongest; "
        "0: all, and the result is exact.",
    )
    precision: Literal["single", "double"] = Field(
        default="single",
        description="Sums travel as one float32 for each number, or as two, which add up to twice "
        "its digits.",
    )
    weights: Literal["images", "capped"] = Field(
        default="images",
        description="Every image counts once, which is exact; or a client above [trust] "
        "max_weight_share in its round counts with less.",
    )

    def width(self, d: int) -> int:
        """Return D, the length of a feature in the sums (d: of the backbone's)."""
        return d if self.features == "linear" else self.projection
