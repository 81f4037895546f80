"""A round's updates in memory: a masked sum, or those of a test; others come from a spool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fcil_adapters.contract import Update
from fcil_protocol.ids import ClientId


@dataclass(frozen=True)
class UpdateList:
    """Updates in memory."""

    updates: tuple[Update, ...]

    @classmethod
    def of(cls, updates: Iterable[Update]) -> UpdateList:
        """Sort by client and drop updates without samples.

        As a server does (docs/methods/README.md, "The updates that count").
        """
        kept = [u for u in updates if int(u.payload.i64("n").sum()) > 0]
        return cls(tuple(sorted(kept, key=lambda u: u.client)))

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that contributed, sorted."""
        return tuple(u.client for u in self.updates)

    @property
    def samples(self) -> tuple[int, ...]:
        """n_k of each."""
        return tuple(int(u.payload.i64("n").sum()) for u in self.updates)

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Update]:
        return iter(self.updates)
