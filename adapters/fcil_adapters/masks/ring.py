"""The streams that mask sums in fixed point: added modulo 2^64, they cancel exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

_PIECE = 1 << 17  # numbers of a stream that are drawn at once


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
