"""Sums in fixed point of 64 bits: the order of additions leaves no trace (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract.averaging import F64, SumSpec
from fcil_protocol.errors import DataError, InternalError

I64 = NDArray[np.int64]


def to_fixed_point(values: F64, spec: SumSpec, members: int) -> I64:
    """Return rint(x 2^bits) as integers.

    Args:
        values: one client's sum.
        spec: its bits and bound.
        members: number of clients that may take part; each has an equal part of the bound.

    Raises:
        DataError: a value is beyond that part, so that the sum could overflow.
    """
    most = spec.bound / members
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= most:  # also for NaN
        raise DataError(
            f"the sum {spec.name!r} of one client reaches {largest:.3g}, and its part of the bound "
            f"is {most:.3g}.",
            action="Use fewer images in a task, or ask the operator to run without privacy.secure "
            "and privacy.relay_sums.",
        )
    return np.rint(np.ldexp(values, spec.bits)).astype(np.int64)


def from_fixed_point(total: I64, spec: SumSpec) -> F64:
    """Return the real numbers of a sum.

    Raises:
        InternalError: a number is beyond the bound: a mask is left, or a sender lied.
    """
    values: F64 = np.ldexp(total.astype(np.float64), -spec.bits)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > spec.bound:
        raise InternalError(
            f"the sum {spec.name!r} reaches {largest:.3g}, and its bound is {spec.bound:.3g}: a "
            "client or a relay has sent numbers beyond its part."
        )
    return values


def added(vectors: Iterable[Mapping[str, I64]]) -> dict[str, I64]:
    """Return the sum of vectors modulo 2^64."""
    total: dict[str, I64] = {}
    for vector in vectors:
        for name, array in vector.items():
            if name in total:
                total[name] += array
            else:
                total[name] = array.astype(np.int64)  # a copy
    return total
