"""Sizes in people's notation: ``2 MB``, ``500kB``, ``1.5 GiB``."""

from __future__ import annotations

import re

from fcil_protocol.errors import UsageError

_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", re.IGNORECASE | re.ASCII)


def read_size(text: str, what: str, examples: str, action: str) -> int:
    """Return a size in bytes.

    Args:
        text: the given size.
        what: the sized thing, as an error calls it: ``a budget``.
        examples: two sizes, for the error.
        action: remedy, for the error.

    Raises:
        UsageError: it is no size, or not above zero.
    """
    found = _SIZE.fullmatch(text)
    size = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if not 1 <= size < float("inf"):
        raise UsageError(
            f"{what} is a size such as {examples}, got {text[:40]!r}.",
            action=action,
        )
    return round(size)


def show_size(size: int) -> str:
    """Return a size in the notation of `read_size`, rounded."""
    if size >= 10**10:
        return f"{size / 1e9:.0f} GB"
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.0f} MB"
