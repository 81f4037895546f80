"""The rule that combines the clients' tensors into one (torch-free; `averaging` computes it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

AveragingRule = Literal["mean", "trimmed_mean", "median", "clip"]


@dataclass(frozen=True)
class Averaging:
    """A rule with its numbers (``[trust]``).

    Attributes:
        rule: ``mean``: weighted; ``trimmed_mean``: the same without the largest and smallest values
            of every entry; ``median``: of every entry; ``clip``: weighted, of steps from the
            round's start that are cut where they are long.
        trim: share of the weight that ``trimmed_mean`` drops at each end, in (0, 0.5). In
            ``trimmed_mean`` and ``median`` no client weighs more than ``max(trim, 1/K)``.
        clip: steps are cut to this many times the clients' median step, >= 1.
    """

    rule: AveragingRule = "mean"
    trim: float = 0.2
    clip: float = 2.0


PLAIN = Averaging()


def mean_only(_hparams: Any) -> tuple[AveragingRule, ...]:
    """Return the rules of a method that declares none."""
    return ("mean",)


def capped(_hparams: Any) -> str:
    """Return an empty text: the method obeys ``[trust] max_weight_share``."""
    return ""


def every_rule(_hparams: Any) -> tuple[AveragingRule, ...]:
    """Return the rules of a method that averages with `averaging.average` alone."""
    return ("mean", "trimmed_mean", "median", "clip")
