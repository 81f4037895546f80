"""Fed-TaLoRA's hyper-parameters and presets (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from fcil_adapters.contract import Economy
from fcil_adapters.toolkit.lora.manifest import SHORT
from fcil_adapters.toolkit.lora.options import CrossEntropyHparams


class FedTaloraHparams(CrossEntropyHparams):
    """Defaults are the published settings; NOTES.md lists what the paper leaves open."""

    freeze_a: bool = Field(
        default=False,
        description="Train and send B alone (FFA-LoRA): half the upload, and plain averages of B "
        "are exact, so there is no residual.",
    )
    residual: Literal["factored", "dense", "off"] = Field(
        default="factored",
        description="How the difference between the mean product and the product of means "
        "reaches the clients: exact factors, a dense sum each round, or not at all.",
    )
    catch_up: Literal["cheapest", "factors"] = Field(
        default="cheapest",
        description="With factors: roll them into one dense sum once that is smaller than their "
        "log (for newcomers), or never (a fleet that is always there).",
    )

    @property
    def corrects(self) -> bool:
        """True if there can be a residual."""
        return self.residual != "off" and not self.freeze_a

    @property
    def exact_lora(self) -> bool:
        """True with residuals: rounded averages would widen each by 2 r, more than halves save."""
        return self.corrects

    @property
    def trained_factors(self) -> str:
        """B alone with ``freeze_a``."""
        return "B" if self.freeze_a else "AB"


# The paper's letter (Eq. 4, 7 to 9: 1 / K; Gaussian A); few rounds on a small backbone.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {"weights": "uniform", "init_a": "gaussian"},
        "short": SHORT,
    }
)

# Ordered by the losses in ablations (docs/benchmarks/paper-claims.md); unmeasured ones come last.
ECONOMIES = (
    Economy(
        "residuals always in factors",
        "a bound on what a newcomer fetches",
        {"residual": "factored", "catch_up": "factors"},
    ),
    Economy("no residual", "that the global weights are the exact mean", {"residual": "off"}),
    Economy("A frozen, B alone trained", "half of the trained parameters", {"freeze_a": True}),
    Economy("q and v alone", "the LoRA of the MLPs", {"modules": ["q", "v"]}),
    Economy("rank 2", "half of each LoRA's rank", {"rank": 2}),
)
