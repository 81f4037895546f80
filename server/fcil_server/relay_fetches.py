"""Which chunks a relay has asked the server for, and which of its clients wait for them.

Several clients want the same chunk at about the same time: it is asked for once. A relay asks
for itself, since it cannot take a chunk out of the list that a client has signed. What it
cannot fetch it leaves to its clients, by passing their own messages on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_HASHES = 1 << 20  # of all known headers together: 32 MiB


@dataclass
class _Part:
    """One part: its chunks' hashes, who waits for which, and what is asked for."""

    hashes: tuple[bytes, ...]
    waiting: OrderedDict[int, set[int]] = field(default_factory=OrderedDict)  # chunk -> lanes
    asked: set[int] = field(default_factory=set)


class Fetches:
    """The parts whose headers came by.

    Args:
        credit: chunks of one part that may be in flight.
    """

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self._parts: OrderedDict[str, _Part] = OrderedDict()

    def learn(self, digest: str, hashes: tuple[bytes, ...]) -> None:
        """Take a verified header; long unused ones are forgotten."""
        part = self._parts.setdefault(digest, _Part(hashes))
        self._parts.move_to_end(digest)
        known = sum(len(p.hashes) for p in self._parts.values())
        for other, old in list(self._parts.items()):
            if known <= MAX_HASHES:
                break
            if old is not part and not old.waiting and not old.asked:
                known -= len(old.hashes)
                del self._parts[other]

    def hash_of(self, digest: str, index: int) -> bytes | None:
        """Return the hash that a chunk must have; None for what is not known."""
        part = self._parts.get(digest)
        return part.hashes[index] if part and 0 <= index < len(part.hashes) else None

    def wait(self, lane: int, digest: str, chunks: Iterable[int]) -> list[int]:
        """Note who waits for chunks; return those to ask for now."""
        part = self._parts[digest]
        for index in chunks:
            part.waiting.setdefault(index, set()).add(lane)
        return self._next(part)

    def arrived(self, digest: str, index: int) -> tuple[set[int], list[int]]:
        """Return the lanes that a chunk is for, and the chunks to ask for now."""
        part = self._parts.get(digest)
        if part is None:
            return set(), []
        part.asked.discard(index)
        return part.waiting.pop(index, set()), self._next(part)

    def refused(self, digest: str) -> set[int]:
        """Forget a part that the server does not give; return the lanes that waited for it."""
        part = self._parts.pop(digest, None)
        return set().union(*part.waiting.values()) if part else set()

    def left(self, lane: int) -> None:
        """Drop a lane; what nobody else waits for and was not asked for is not asked for."""
        for part in self._parts.values():
            for index, lanes in list(part.waiting.items()):
                lanes.discard(lane)
                if not lanes:
                    del part.waiting[index]

    def _next(self, part: _Part) -> list[int]:
        if len(part.asked) > self.credit // 2:
            return []
        free = self.credit - len(part.asked)
        wanted = [i for i in part.waiting if i not in part.asked][:free]
        part.asked.update(wanted)
        return wanted
