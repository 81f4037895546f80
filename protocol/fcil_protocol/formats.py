"""Sizes, durations, ages, dates and shares as people write and read them."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from fcil_protocol.errors import UsageError

# Fields of command output in unix seconds, beside those that end in _at.
MOMENTS = frozenset({"at", "expires", "last_seen", "not_after"})
NOTHING = "-"  # for undefined values
_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", re.IGNORECASE | re.ASCII)

# --- bytes ------------------------------------------------------------------------------------


def read_size(text: str, what: str, examples: str, action: str) -> int:
    """Return a size in bytes, of a text such as ``2 MB``, ``500kB`` or ``1.5 GiB``.

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
    """Return a size in the notation of `read_size`, rounded to MB or GB."""
    if size >= 10**10:
        return f"{size / 1e9:.0f} GB"
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.0f} MB"


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits and a decimal unit (1 kB = 1,000 B)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or unit == "GB":
            break
        count /= 1000
    digits = 0 if unit == "B" or abs(count) >= 99.95 else 1 if abs(count) >= 9.995 else 2
    return f"{count:,.{digits}f} {unit}"


# --- time -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format seconds as clocks do from a minute on: ``42.9 s``, ``1 min 43 s``, ``2 h 5 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def ago(moment: float | None) -> str:
    """Return how long ago a moment was (unix seconds); None: it never was."""
    if moment is None:
        return "never"
    seconds = max(0, int(time.time() - moment))
    if seconds < 120:
        return f"{seconds} s ago"
    return f"{seconds // 60} min ago" if seconds < 7200 else f"{seconds // 3600} h ago"


def day(moment: float) -> str:
    """Return the date of a moment (unix seconds), in UTC."""
    return f"{datetime.fromtimestamp(min(moment, 2**37), UTC):%Y-%m-%d}"


def minute(moment: float | None) -> str:
    """Return date and time of a moment (unix seconds; None: now), in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def second(moment: float) -> str:
    """Return date and time of a moment (unix seconds) to the second, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def iso_time(moment: float) -> str:
    """Return a moment (unix seconds) in ISO 8601: UTC, whole seconds."""
    return f"{datetime.fromtimestamp(min(moment, 2**37), UTC):%Y-%m-%dT%H:%M:%SZ}"


def with_iso_times(data: Any) -> Any:
    """Return JSON-ready data with its moments as text.

    A moment is a number under a name in `MOMENTS`, or under one that ends in ``_at``.
    """
    if isinstance(data, dict):
        return {name: _read(name, value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [with_iso_times(value) for value in data]
    return data


def _read(name: object, value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and isinstance(name, str) and (name in MOMENTS or name.endswith("_at")):
        return iso_time(value)
    return with_iso_times(value)


# --- results ----------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """Format an accuracy."""
    return NOTHING if value is None else f"{value:.1f} %"


def points(value: float | None) -> str:
    """Format a difference of accuracies."""
    return NOTHING if value is None else f"{value:.1f} pp"


def loss(value: float | None) -> str:
    """Format a mean training loss."""
    return NOTHING if value is None else f"{value:.4g}"
