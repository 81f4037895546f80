"""A backbone's weights as arrays and as a safetensors file, and their digest (torch-free)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import DataError

HEAD = "head."  # tensors of a classifier, which a backbone leaves out
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def weights_digest(named: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return the SHA-256 over (name, shape, float32 little-endian bytes) in the given order, hex.

    A backbone's digest has its tensors sorted by name, without those of a head.
    """
    sha = hashlib.sha256()
    for name, values in named:
        sha.update(name.encode())
        sha.update(str(tuple(values.shape)).encode())
        sha.update(values.astype("<f4", copy=False).tobytes())
    return sha.hexdigest()


def digest_at(digest: str, image_size: int | None) -> str:
    """Return the digest of a backbone whose position embedding is resampled (hex).

    The size stands for the resampled embedding, whose last bits differ between machines.

    Args:
        digest: of the weights as they are in their file.
        image_size: side of its images in pixels; None: the model's own, nothing is resampled.
    """
    if image_size is None:
        return digest
    return hashlib.sha256(f"{digest} image_size={image_size}".encode()).hexdigest()


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a safetensors file.

    Attributes:
        dtype: as safetensors calls it, ``F32`` for example.
        offset, length: bytes from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file: raw numbers behind a header with the place of each tensor.

    Attributes:
        tensors: by name, without those of a head.
    """

    path: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> WeightsFile:
        """Read the header.

        Raises:
            DataError: the file is missing, cut short, or not a safetensors file.
        """
        try:
            header, start = _header(path)
            size = path.stat().st_size
            tensors = {
                name: _stored(entry, start)
                for name, entry in header.items()
                if name != "__metadata__" and not name.startswith(HEAD)
            }
        except OSError as error:
            raise DataError(
                f"the weights file {path} cannot be read: {error.strerror}.",
                action="Give the path of a safetensors file.",
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"the weights file {path} is not a safetensors file.",
                action="Give the path of a safetensors file.",
            ) from error
        if any(t.offset + t.length > size for t in tensors.values()):
            raise DataError(
                f"the weights file {path} is cut short: it has {size} bytes but declares more.",
                action="Copy it again.",
            )
        return cls(path, tensors)

    def digest(self) -> str:
        """Return the backbone's digest; one tensor at a time is in memory.

        Raises:
            DataError: a tensor's type is not a floating-point type of numpy.
        """
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        return weights_digest((name, self._read(name, data)) for name in sorted(self.tensors))

    def tensors_f32(self) -> dict[str, NDArray[np.float32]]:
        """Return the tensors as views of the file, which is not read yet.

        Raises:
            DataError: one is not float32.
        """
        others = [name for name, tensor in self.tensors.items() if tensor.dtype != "F32"]
        if others:
            raise DataError(
                f"{self.path}: {others[0]} has the type {self.tensors[others[0]].dtype}, expected "
                "F32.",
                action="Export the backbone again: fcil-client backbone export",
            )
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        return {name: self._read(name, data) for name in self.tensors}

    def _read(self, name: str, data: NDArray[np.uint8]) -> NDArray[Any]:
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise DataError(
                f"{self.path}: {name} has the type {tensor.dtype}, expected {', '.join(_DTYPES)}.",
                action="Convert the weights: fcil-client backbone convert FILE OUT.safetensors",
            )
        raw = data[tensor.offset : tensor.offset + tensor.length]
        values = raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return np.require(values, requirements="A")  # copies data at an odd offset


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(size)
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise TypeError
    return header, 8 + size


def _stored(entry: Any, start: int) -> StoredTensor:
    first, end = (int(number) for number in entry["data_offsets"])
    if not 0 <= first <= end:
        raise ValueError(entry)
    dtype, shape = str(entry["dtype"]), tuple(int(number) for number in entry["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(entry)
    if dtype in _DTYPES and math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != end - first:
        raise ValueError(entry)
    return StoredTensor(dtype, shape, start + first, end - first)
