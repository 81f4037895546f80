"""The discriminant head of methods that keep Gaussians: options, tensors, specs (torch-free).

`discriminants` computes it, `heads.scorer` scores with it.
"""

from __future__ import annotations

from pydantic import Field

from fcil_adapters.contract import Hparams, Kind, TensorSpec
from fcil_adapters.numerics.class_reports import count_spec

DISCRIMINANT = "discriminant"  # the part, and the prefix of its tensors, beside a trained head
_LARGEST = 1e12  # of a head: classes with nearly equal images have steep posteriors


class QuadraticHparams(Hparams):
    """The options of ``head = "quadratic"``."""

    own_rank: int = Field(
        default=8, ge=1, description="Directions of its own that 'quadratic' gives each class."
    )
    own_share: float = Field(
        default=0.1,
        ge=0,
        description="Factor of a class's own covariance in 'quadratic'; 0 for a class of fewer "
        "than 8 images.",
    )
    pooled_share: float = Field(
        default=1.0, ge=0, description="Factor of the classes' mean covariance in 'quadratic'."
    )
    identity_share: float = Field(
        default=0.3,
        gt=0,
        description="Factor of the identity in 'quadratic', in units of the mean variance.",
    )

    @property
    def shares(self) -> tuple[float, float, float]:
        """The factors of a class's own covariance, of the mean one, and of the identity."""
        return self.own_share, self.pooled_share, self.identity_share


def linear_specs() -> tuple[TensorSpec, ...]:
    """Return the specs of a linear head of the described classes (``known``, width ``d``)."""
    return (
        _spec("weight", ("known", "d")),
        _spec("bias", ("known",)),
        count_spec("classes", "known"),
    )


def quadratic_specs() -> tuple[TensorSpec, ...]:
    """Return the specs of a quadratic head; its classes have ``own_rank`` directions each."""
    return (
        *linear_specs(),
        _spec("turn", ("known", "own_rank", "d")),
        _spec("offset", ("known", "own_rank")),
    )


def _spec(name: str, shape: tuple[str, ...]) -> TensorSpec:
    """Return a spec of the head's exact numbers: differences of large ones decide a class."""
    return TensorSpec(name, Kind.HEAD, shape, max_abs=_LARGEST, exact=True)
