"""Fixed-point numbers of 64 bits, and the streams that mask them.

Sums are added modulo 2^64, so the order of clients leaves no trace and masks cancel exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fcil_adapters.contract.averaging import F64, SumSpec
from fcil_protocol.errors import DataError, InternalError

I64 = NDArray[np.int64]

_PIECE = 1 << 17  # numbers of a stream that are drawn at once


def to_ring(values: F64, spec: SumSpec, members: int) -> I64:
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
            f"the sum {spec.name!r} over this client's images reaches {largest:.3g}, and masked it "
            f"may reach {most:.3g}.",
            action="Nothing was sent. Use fewer images in a task, or ask the operator to run "
            "without privacy.secure.",
        )
    return np.rint(np.ldexp(values, spec.bits)).astype(np.int64)


def from_ring(total: I64, spec: SumSpec) -> F64:
    """Return the real numbers of an unmasked sum.

    Raises:
        InternalError: a number is beyond the bound: a mask is left, or a client lied.
    """
    values: F64 = np.ldexp(total.astype(np.float64), -spec.bits)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > spec.bound:
        raise InternalError(
            f"the unmasked sum {spec.name!r} reaches {largest:.3g}, and its bound is "
            f"{spec.bound:.3g}: a client has sent numbers beyond its part."
        )
    return values


def add_stream(total: Mapping[str, NDArray[Any]], seed: bytes, sign: int) -> None:
    """Add the stream of a seed to all tensors, or subtract it, modulo 2^64, in place.

    The stream is AES-256 in counter mode from 0, read as little-endian integers, through the
    tensors in the order of their names.

    Args:
        total: name -> int64 tensor.
        seed: 32 bytes; never used for another vector.
        sign: 1 or -1.
    """
    encryptor = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    for name in sorted(total):
        flat = total[name].reshape(-1)  # a view: the tensors are contiguous
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            drawn = np.frombuffer(encryptor.update(bytes(8 * len(piece))), "<i8")
            if sign > 0:
                piece += drawn
            else:
                piece -= drawn


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
