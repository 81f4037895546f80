"""File names that are not UTF-8: the system allows them, partitions and watchfiles do not."""

from __future__ import annotations


def is_text(name: str) -> bool:
    """Say whether a name is UTF-8; watchfiles cannot take others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_about_a_name(error: BaseException) -> bool:
    """Say whether events have ended over a name that is no UTF-8, which watchfiles cannot take."""
    return isinstance(error, RuntimeError) and "Unable to decode path" in str(error)
