"""Msgpack maps of the wire: encoded plainly, parsed within limits, read field by field.

Unknown fields are tolerated; a known one with another type or length is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from fcil_protocol.errors import TooLarge, WireError

MAX_FIELDS = 64


def pack_map(fields: Mapping[str, object]) -> bytes:
    """Encode a map; the same fields in the same order give the same bytes."""
    packed: bytes = msgpack.packb(dict(fields), use_bin_type=True)
    return packed


def unhex(text: str, length: int, what: str) -> bytes:
    """Turn lower-case hex digits into ``length`` bytes.

    Raises:
        WireError: the text is something else.
    """
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != length or data.hex() != text:
        raise WireError(f"{what}: expected {2 * length} hex digits, got {text[:80]!r}.")
    return data


class Fields:
    """A msgpack map from outside.

    Args:
        data: the bytes of one map.
        what: its name in messages.
        max_bytes: longest encoding; checked before parsing.

    Raises:
        TooLarge: longer than that.
        WireError: not one msgpack map with names as keys.
    """

    def __init__(self, data: bytes, what: str, *, max_bytes: int) -> None:
        self.what = what
        if len(data) > max_bytes:
            raise TooLarge(f"{what} of {len(data)} bytes exceeds {max_bytes}.")
        try:
            fields = msgpack.unpackb(
                data,
                raw=False,
                strict_map_key=True,
                max_str_len=len(data),
                max_bin_len=len(data),
                max_array_len=MAX_FIELDS,
                max_map_len=MAX_FIELDS,
                max_ext_len=0,
            )
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"{what} is not msgpack: {str(error)[:100]}.") from error
        if not isinstance(fields, dict) or not all(isinstance(k, str) for k in fields):
            raise WireError(f"{what} is not a map of names.")
        self._fields: dict[str, object] = fields

    def get(self, name: str) -> object:
        """Return a field unchecked; None if it is missing."""
        return self._fields.get(name)

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer of ``low..high``."""
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._fault(name, f"an integer of {low} to {high}", value)
        return value

    def text(self, name: str, max_chars: int, default: str | None = None) -> str:
        """Return a printable text of 1 to ``max_chars`` characters."""
        value = self._fields.get(name, default)
        if value is default and default is not None:
            return default
        if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
            raise self._fault(name, f"a text of 1 to {max_chars} characters", value)
        if not value.isprintable():
            raise self._fault(name, "a printable text", value)
        return value

    def binary(self, name: str, *lengths: int) -> bytes:
        """Return bytes of one of the lengths; of any length if none is given."""
        value = self._fields.get(name)
        if not isinstance(value, bytes) or (lengths and len(value) not in lengths):
            wanted = " or ".join(str(n) for n in lengths)
            raise self._fault(name, f"{wanted} bytes" if lengths else "bytes", value)
        return value

    def _fault(self, name: str, expected: str, value: object) -> WireError:
        if value is None:
            got = "nothing"
        elif isinstance(value, bytes | str):
            got = f"{type(value).__name__} of length {len(value)}"
        elif isinstance(value, int):
            got = str(value)
        else:
            got = type(value).__name__
        return WireError(f"{self.what}, field {name!r}: expected {expected}, got {got}.")
