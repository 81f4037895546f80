"""File names that are not UTF-8: the system allows them, partitions and watchfiles do not."""

from __future__ import annotations


def is_text(name: str) -> bool:
    """Return True if a name is UTF-8; watchfiles accepts no others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_about_a_name(error: BaseException) -> bool:
    """Return True if events have ended because of a non-UTF-8 name, which watchfiles rejects."""
    return isinstance(error, RuntimeError) and "Unable to decode path" in str(error)
