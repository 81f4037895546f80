"""The analytic method's hyper-parameters (torch-free)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from fcil_adapters.contract import LateHparams

GCV: Literal["gcv"] = "gcv"
LEAST_RHO, MOST_RHO = 1e-9, 1e3


class AnalyticHparams(LateHparams):
    """Defaults from measurements on small backbones (methods/analytic/NOTES.md)."""

    features: Literal["both", "relu_projection", "linear"] = Field(
        default="both",
        description="Features of the classifier: the frozen feature itself and the ReLU of a fixed "
        "random projection side by side, or one of them.",
    )
    projection: int = Field(
        default=2000, ge=1, le=10_000, description="Width of the random projection."
    )
    rho: Literal["gcv"] | float = Field(
        default=GCV,
        description="Ridge: lambda is rho times the mean of G's diagonal, tr(G) / D; gcv: chosen "
        "after each round by generalised cross-validation, from the sums alone.",
    )
    form: Literal["within", "ridge"] = Field(
        default="within",
        description="Scatter that the ridge is added to: of the features within their classes "
        "(nearest class means for a large ridge, LDA for a small one), or G (regression on "
        "one-hot labels).",
    )
    prior: Literal["counts", "none"] = Field(
        default="counts",
        description="Correction of the form within for unequal numbers of images: means of few "
        "images are less certain, and frequent classes likelier; or none.",
    )
    balance: Literal["server", "plain"] = Field(
        default="server",
        description="In the form ridge every class weighs alike (its sums are divided by its "
        "images on the server), or every image does.",
    )
    group: int = Field(
        default=0,
        ge=0,
        description="Images whose sum replaces them in G, drawn at random within a class; a class "
        "of fewer stays at home. 0: every image by itself.",
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

    pseudo: Literal["off", "margin"] = Field(
        default="off",
        description="Unlabelled images that clients offer: left alone, or counted once as images "
        "of the class with the nearest mean, if the second nearest is clearly farther. Images of "
        "classes that the federation does not know are counted wrongly.",
    )
    pseudo_margin: float = Field(
        default=0.1,
        gt=0,
        le=2,
        description="Least difference of the cosines to the two nearest means, all centred.",
    )
    pseudo_accuracy: float = Field(
        default=0.4,
        ge=0,
        le=1,
        description="Unlabelled images are counted after a task only if its evaluation finds at "
        "least this share of at least 200 test images classified rightly.",
    )

    pseudo_images: int = Field(
        default=2000,
        ge=1,
        description="Unlabelled images that a client looks at after a task, drawn at random from "
        "those not counted yet.",
    )

    @field_validator("rho", mode="plain")
    @classmethod
    def _read_rho(cls, value: object) -> object:
        if value == GCV:
            return value
        if not isinstance(value, bool) and isinstance(value, int | float):
            number = float(value)
            if LEAST_RHO <= number <= MOST_RHO:
                return number
        raise ValueError(f"expected 'gcv' or a number from {LEAST_RHO:g} to {MOST_RHO:g}")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.group == 1:
            raise ValueError("group: expected 0 or at least 2 images, got 1")
        if self.form == "within" and self.balance == "plain":
            raise ValueError("balance = 'plain' has no effect unless form = 'ridge'")
        if self.form == "ridge" and "prior" in self.model_fields_set and self.prior == "none":
            raise ValueError("prior = 'none' has no effect unless form = 'within'")
        if self.counts_late and self.truncate:
            raise ValueError(
                "late = 'count' needs truncate = 0: truncated parts do not add up to the whole"
            )
        if self.counts_late and self.weights == "capped":
            raise ValueError("late = 'count' needs weights = 'images': every image counts once")
        for name in ("pseudo_margin", "pseudo_accuracy", "pseudo_images"):
            given = getattr(self, name) != type(self).model_fields[name].default
            if self.pseudo == "off" and given:
                raise ValueError(f"{name} has no effect unless pseudo = 'margin'")
        return self

    @property
    def counts_unlabelled(self) -> bool:
        """True if unlabelled images are counted by pseudo-labels."""
        return self.pseudo != "off"

    @property
    def least_images(self) -> int:
        """Images of the smallest group."""
        return max(self.group, 1)

    def width(self, d: int) -> int:
        """Return D, the length of a feature in the sums (d: of the backbone's)."""
        own = 0 if self.features == "relu_projection" else d
        return own + (0 if self.features == "linear" else self.projection)
