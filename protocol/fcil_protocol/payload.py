"""Payload: named tensors and typed metadata, and their one form as bytes (safetensors)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fcil_protocol.errors import SchemaMismatch, TooLarge, WireError

Array = NDArray[np.generic]
MetaValue = bool | int | float | str | list[int] | list[float] | list[str]

# The dtypes that may travel, by their safetensors names (bf16 has no numpy type).
WIRE_DTYPES: Mapping[str, np.dtype[np.generic]] = MappingProxyType(
    {
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "U8": np.dtype("u1"),
    }
)
MAX_HEADER_BYTES = 1 << 20  # a payload of 1,000 tensors needs about 90 kB
MAX_TENSORS = 4096
MAX_META_BYTES = 1 << 18
_META_KEY = "fcil"


@dataclass(frozen=True)
class Payload:
    """Named tensors plus small typed metadata; what learners and aggregators exchange.

    Attributes:
        tensors: name -> C-contiguous array of a wire dtype (`WIRE_DTYPES`).
        meta: name -> number, string or flat list. Schemas decide which are allowed.
    """

    tensors: Mapping[str, Array] = field(default_factory=dict)
    meta: Mapping[str, MetaValue] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors alone, without names or framing."""
        return sum(int(a.nbytes) for a in self.tensors.values())

    def f32(self, name: str) -> NDArray[np.float32]:
        """Return one tensor as float32 (exact for F16, identity for F32)."""
        return np.asarray(self.tensors[name], dtype=np.float32)

    def i64(self, name: str) -> NDArray[np.int64]:
        """Return one tensor as int64."""
        return np.asarray(self.tensors[name], dtype=np.int64)


def dtype_name(array: Array) -> str:
    """Return the safetensors name of the array's dtype, or raise if it may not travel."""
    for name, dtype in WIRE_DTYPES.items():
        if array.dtype == dtype:
            return name
    raise SchemaMismatch(
        f"dtype {array.dtype} may not travel; allowed are {', '.join(WIRE_DTYPES)}.",
        action="Convert the tensor to float32.",
    )


def pack(payload: Payload) -> bytes:
    """Encode a payload as safetensors bytes; the same payload gives the same bytes."""
    arrays: dict[str, Array] = {}
    for name in sorted(payload.tensors):
        array = np.asarray(payload.tensors[name], order="C")  # keeps a scalar's shape ()
        dtype_name(array)
        arrays[name] = array
    meta = json.dumps(dict(sorted(payload.meta.items())), ensure_ascii=True, allow_nan=False)
    return safetensors.numpy.save(arrays, metadata={_META_KEY: meta})


def unpack(data: bytes) -> Payload:
    """Decode safetensors bytes that come from outside.

    Limits are checked before parsing. Tensors are views of ``data`` where possible.

    Raises:
        TooLarge: the header announces more than the limits allow.
        WireError: the bytes are not safetensors as `pack` makes them.
    """
    if len(data) < 8:
        raise WireError(f"payload of {len(data)} bytes is shorter than its 8-byte length field.")
    (header_bytes,) = struct.unpack_from("<Q", data)
    if header_bytes > MAX_HEADER_BYTES:
        raise TooLarge(f"payload header of {header_bytes} bytes exceeds {MAX_HEADER_BYTES}.")
    if header_bytes > len(data) - 8:
        raise WireError(f"payload header of {header_bytes} bytes in {len(data)} bytes of data.")
    # The header is parsed here once, to know dtypes before numpy is asked for them.
    try:
        header = json.loads(data[8 : 8 + header_bytes])
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError("payload header is not JSON.") from error
    if not isinstance(header, dict):
        raise WireError("payload header is not a JSON object.")
    meta_fields = header.pop("__metadata__", {})
    if len(header) > MAX_TENSORS:
        raise TooLarge(f"payload of {len(header)} tensors exceeds {MAX_TENSORS}.")
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in WIRE_DTYPES:
            raise SchemaMismatch(
                f"tensor {name[:80]!r} has dtype {str(dtype)[:20]!r}; "
                f"allowed are {', '.join(WIRE_DTYPES)}.",
            )
    meta = _parse_meta(meta_fields)
    try:
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise WireError(f"payload is not valid safetensors: {str(error)[:200]}.") from error
    return Payload(tensors, meta)


def _parse_meta(fields: object) -> dict[str, MetaValue]:
    if not isinstance(fields, dict):
        raise WireError("payload metadata is not a JSON object.")
    text = fields.get(_META_KEY, "{}")
    if not isinstance(text, str):
        raise WireError("payload metadata is not a string.")
    if len(text) > MAX_META_BYTES:
        raise TooLarge(f"payload metadata of {len(text)} bytes exceeds {MAX_META_BYTES}.")
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("payload metadata is not JSON.") from error
    if not isinstance(meta, dict) or not all(_is_meta(v) for v in meta.values()):
        raise WireError("payload metadata holds something else than numbers, names and lists.")
    return meta


def _is_meta(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, int | float | str) for v in value)
    return isinstance(value, bool | int | float | str)
