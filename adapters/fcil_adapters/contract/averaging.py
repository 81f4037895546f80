"""Combination of updates: by a rule of averaging, or as sums of what stays unseen (torch-free).

`numerics.averaging` computes the first, `fcil_adapters.masks` the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Dim

F64 = NDArray[np.float64]
Sums = Mapping[str, F64]

# Fields of a masked upload beside its sums and its ``n``: a digest of all that they are about, and
# the signature of it and of the clients that their sender hides among.
ABOUT, HIDDEN = "about", "hidden"
_MOST_BITS = 62  # of a sum in 64 bits: one for the sign, one to spare

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


@dataclass(frozen=True)
class SumSpec:
    """One sum of an upload, in fixed point.

    Attributes:
        name: of the tensor.
        shape: numbers, and symbols that the method's ``dims`` have.
        bits: binary digits after the point.
        bound: largest absolute value of the sum over all clients.
    """

    name: str
    shape: tuple[Dim, ...]
    bits: int
    bound: float

    def __post_init__(self) -> None:
        assert math.log2(self.bound) + self.bits <= _MOST_BITS, "a sum fits into 64 bits"


@dataclass(frozen=True)
class NoisedSum:
    """A sum of clipped features, or of their products, to which each client adds a part of a noise.

    Attributes:
        name: of the sum.
        degree: one image changes it by `Privacy.clip` to this power at most.
        made_of: the tensors of an upload that it is made of.
    """

    name: str
    degree: int
    made_of: tuple[str, ...]


@dataclass(frozen=True)
class Additive:
    """The sums of an exchange's uploads.

    Attributes:
        sums: all of them, with shapes that are the same for all clients.
        read: one client's upload -> its sums, by name; an empty array where it has none.
        write: (sums over clients, ids of the task's classes) -> the upload of one client that had
            all their images.
        noised: sums to which clients add a noise together; only if these are made of all protected
            tensors of the upload.
    """

    sums: tuple[SumSpec, ...]
    read: Callable[[Payload], dict[str, F64]]
    write: Callable[[Sums, tuple[int, ...]], Payload]
    noised: tuple[NoisedSum, ...] = ()

    def __post_init__(self) -> None:
        if taken := {"n", ABOUT, HIDDEN} & {one.name for one in self.sums}:
            raise ValueError(f"masked uploads have fields of their own with the names {taken}")
