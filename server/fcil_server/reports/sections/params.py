"""A visitor's parameters for a section: length, page of a list, and search text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fcil_protocol.errors import UsageError

LAST = ("50", "200", "all")
ROWS = 50  # of a list at a time
_FIND_LIMIT = 100  # characters
_PAGE_LIMIT = 100_000

T = TypeVar("T")


@dataclass(frozen=True)
class Params:
    """Parameters of a section.

    Attributes:
        last: number of newest rounds or tasks.
        page: of a list, from 1.
        find: part of a name; empty: all.
    """

    last: str = "50"
    page: int = 1
    find: str = ""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Params:
        """Read the parameters from an address; others are ignored.

        Raises:
            UsageError: one of them is invalid.
        """
        last, page, find = query.get("last", "50"), query.get("page", "1"), query.get("find", "")
        if last not in LAST:
            raise UsageError(
                f"expected last to be one of {', '.join(LAST)}, got {last[:20]!r}.",
                action="Choose one of them on the dashboard.",
            )
        if not (page.isascii() and page.isdigit() and 1 <= len(page) <= 6 and int(page) > 0):
            raise UsageError(
                f"expected page to be a number from 1 to {_PAGE_LIMIT}, got {page[:20]!r}.",
                action="Turn the pages on the dashboard.",
            )
        if len(find) > _FIND_LIMIT:
            raise UsageError(
                f"expected at most {_FIND_LIMIT} characters to find, got {len(find)}.",
                action="Search for a shorter part of the name.",
            )
        return cls(last, min(int(page), _PAGE_LIMIT), find)

    @property
    def most(self) -> int | None:
        """Number of newest items; None: all."""
        return None if self.last == "all" else int(self.last)


@dataclass(frozen=True)
class Cut(Generic[T]):
    """One page of a list.

    Attributes:
        number, pages: its number, from 1, and the number of pages.
        total: number of items on all pages.
    """

    items: Sequence[T]
    number: int
    pages: int
    total: int


def cut(items: Sequence[T], number: int, size: int = ROWS) -> Cut[T]:
    """Return a page of a list, the last one if there are fewer pages."""
    pages = max(1, -(-len(items) // size))
    number = min(number, pages)
    return Cut(items[(number - 1) * size : number * size], number, pages, len(items))


def matches(find: str, *texts: str) -> bool:
    """Return True if the search text is in one of the texts, ignoring case."""
    wanted = find.strip().casefold()
    return not wanted or any(wanted in text.casefold() for text in texts)
