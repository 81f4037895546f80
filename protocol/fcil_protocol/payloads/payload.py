"""Payload: named tensors and typed metadata, and their unique byte form (safetensors)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fcil_protocol.errors import SchemaMismatch, TooLarge, WireError

Array = NDArray[np.generic]
MetaValue = bool | int | float | str | list[int] | list[float] | list[str]

# Dtypes that may travel, by their safetensors names (bf16 has no numpy type).
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
_MAX_DIMS = 32  # numpy's own limit until 2.0
_META_KEY = "fcil"
_ORDER = ("I64", "F32", "I32", "F16", "U8")  # order of tensors in the bytes: the library's


@dataclass(frozen=True)
class Payload:
    """Named tensors plus small typed metadata; exchanged by learners and aggregators.

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
        f"dtype {array.dtype} cannot be sent; allowed are {', '.join(WIRE_DTYPES)}.",
        action="Convert the tensor to float32.",
    )


def pack(payload: Payload) -> bytes:
    """Encode a payload as safetensors bytes; the same payload gives the same bytes."""
    return b"".join(pieces(payload))


def pieces(payload: Payload) -> list[bytes | memoryview]:
    """Return the pieces that `pack` joins: the header, then each tensor's own memory, not copied.

    The bytes are those that the safetensors library writes; it would copy them twice.
    """
    names = {name: dtype_name(array) for name, array in payload.tensors.items()}
    order = sorted(names, key=lambda name: (_ORDER.index(names[name]), name))
    arrays = {name: np.asarray(payload.tensors[name], order="C") for name in order}
    meta = json.dumps(dict(sorted(payload.meta.items())), ensure_ascii=True, allow_nan=False)
    header: dict[str, Any] = {"__metadata__": {_META_KEY: meta}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        place = [begin, end]
        header[name] = {"dtype": names[name], "shape": array.shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at aligned addresses
    bodies = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
    return [struct.pack("<Q", len(text)) + text, *bodies]


def unpack(data: bytes | memoryview) -> Payload:
    """Decode safetensors bytes from outside.

    Limits are checked before parsing. Tensors are read-only views of ``data``, which they keep in
    memory: nothing is copied, except a tensor at an unaligned address.

    Raises:
        TooLarge: the header announces more than the limits allow.
        WireError: the bytes are not safetensors as `pack` makes them.
    """
    view = memoryview(data).toreadonly()
    header, start = _parse_header(view)
    meta = _parse_meta(header.pop("__metadata__", {}))
    if len(header) > MAX_TENSORS:
        raise TooLarge(f"payload of {len(header)} tensors exceeds {MAX_TENSORS}.")
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in WIRE_DTYPES:
            raise SchemaMismatch(
                f"tensor {name[:80]!r} has dtype {str(dtype)[:20]!r}; "
                f"allowed are {', '.join(WIRE_DTYPES)}.",
            )
    places = {name: _place(name, entry) for name, entry in header.items()}
    _check_tiling([place for place, _ in places.values()], len(view) - start)
    body = view[start:]
    try:
        tensors = {
            name: _array(body[a:b], WIRE_DTYPES[header[name]["dtype"]], shape)
            for name, ((a, b), shape) in places.items()
        }
    except (ValueError, OverflowError) as error:  # a shape that numpy cannot hold
        raise _invalid(str(error)[:200]) from error
    return Payload(tensors, meta)


def _parse_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Return the JSON header, and the offset of the first tensor."""
    if len(view) < 8:
        raise WireError(f"payload of {len(view)} bytes is shorter than its 8-byte length field.")
    (header_bytes,) = struct.unpack_from("<Q", view)
    if header_bytes > MAX_HEADER_BYTES:
        raise TooLarge(f"payload header of {header_bytes} bytes exceeds {MAX_HEADER_BYTES}.")
    if header_bytes > len(view) - 8:
        raise WireError(f"payload header of {header_bytes} bytes in {len(view)} bytes of data.")
    try:
        header = json.loads(bytes(view[8 : 8 + header_bytes]))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise WireError("payload header is not JSON.") from error
    if not isinstance(header, dict):
        raise WireError("payload header is not a JSON object.")
    return header, 8 + header_bytes


def _place(name: str, entry: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the start and end of a tensor after the header, and its shape, which must agree."""
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _invalid(f"tensor {name[:80]!r} has no shape or no offsets")
    first, last = offsets
    if last - first != math.prod(shape) * WIRE_DTYPES[entry["dtype"]].itemsize:
        raise _invalid(
            f"tensor {name[:80]!r} has {last - first} bytes, which does not match its shape"
        )
    return (first, last), tuple(shape)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    few = isinstance(value, list) and len(value) <= _MAX_DIMS
    return few and all(type(n) is int and n >= 0 for n in value)


def _check_tiling(places: Iterable[tuple[int, int]], size: int) -> None:
    """Refuse tensors that overlap, or bytes that belong to no tensor."""
    end = 0
    for first, last in sorted(places):
        if first != end:
            raise _invalid(f"a tensor begins at {first}, expected {end}")
        end = last
    if end != size:
        raise _invalid(f"its tensors have {end} bytes, but {size} arrived")


def _array(data: memoryview, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _invalid(how: str) -> WireError:
    return WireError(f"payload is not valid safetensors: {how}.")


def _parse_meta(fields: object) -> dict[str, MetaValue]:
    if not isinstance(fields, dict):
        raise WireError("payload metadata is not a JSON object.")
    text = fields.get(_META_KEY, "{}")
    if not all(isinstance(value, str) for value in fields.values()):
        raise WireError("payload metadata is not a string.")
    if len(text) > MAX_META_BYTES:
        raise TooLarge(f"payload metadata of {len(text)} bytes exceeds {MAX_META_BYTES}.")
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("payload metadata is not JSON.") from error
    if not isinstance(meta, dict) or not all(_is_meta(v) for v in meta.values()):
        raise WireError("payload metadata holds something other than numbers, names and lists.")
    return meta


def _is_meta(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, int | float | str) for v in value)
    return isinstance(value, bool | int | float | str)
