"""Chunks that a relay has requested from the server, and the clients that wait for them.

Several clients want the same chunk at about the same time: the relay requests it once. It sends
requests of its own, since it cannot take a chunk out of the list that a client has signed, at the
pace of its own link. Chunks that it cannot fetch it leaves to its clients, by passing on their own
messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fcil_protocol.envelopes.header import Header
from fcil_protocol.envelopes.transfer import requests
from fcil_protocol.envelopes.window import Pace
from fcil_protocol.messages.messages import MAX_WANTED, Want

MAX_HASHES = 1 << 20  # of all known headers together: 32 MiB
MAX_PARTS = 2048  # most are small: each masked round brings one for each client


@dataclass
class _FetchedPart:
    """One part: its header, the lanes that wait for its chunks, and the requested chunks."""

    header: Header
    waiting: OrderedDict[int, set[int]] = field(default_factory=OrderedDict)  # chunk -> lanes
    asked: set[int] = field(default_factory=set)

    def want(self, limit_bytes: int) -> list[int]:
        """Return the next chunks to request, ascending; they count as requested."""
        most = min(limit_bytes // self.header.chunk_bytes, MAX_WANTED)
        wanted = sorted([i for i in self.waiting if i not in self.asked][:most])
        self.asked.update(wanted)
        return wanted


class Fetches:
    """Parts whose headers have passed the relay.

    Args:
        most_bytes: largest window of the uplink.

    Attributes:
        pace: of the uplink.
    """

    def __init__(self, most_bytes: int) -> None:
        self.pace = Pace(most_bytes)
        self._parts: OrderedDict[str, _FetchedPart] = OrderedDict()
        self._hashes = 0  # of all of them
        self._awaited: dict[str, _FetchedPart] = {}  # with chunks that lanes wait for

    def learn(self, header: Header) -> None:
        """Store a verified header; headers unused for long are forgotten."""
        if header.update_id not in self._parts:
            self._parts[header.update_id] = _FetchedPart(header)
            self._hashes += len(header.hashes)
        self._parts.move_to_end(header.update_id)
        if self._is_full():
            idle = [d for d, p in self._parts.items() if not p.waiting and not p.asked]
            for digest in idle:
                if not self._is_full():
                    break
                if digest != header.update_id:
                    self._forget(digest)

    def _is_full(self) -> bool:
        return self._hashes > MAX_HASHES or len(self._parts) > MAX_PARTS

    def _forget(self, digest: str) -> _FetchedPart | None:
        part = self._parts.pop(digest, None)
        self._awaited.pop(digest, None)
        if part is not None:
            self._hashes -= len(part.header.hashes)
        return part

    def header_of(self, digest: str) -> Header | None:
        """Return the header of a part; None if it is unknown."""
        part = self._parts.get(digest)
        return part.header if part else None

    def wait(self, lane: int, digest: str, chunks: Iterable[int]) -> None:
        """Note the lane that waits for chunks of a known part."""
        part = self._parts[digest]
        for index in chunks:
            part.waiting.setdefault(index, set()).add(lane)
            self._awaited[digest] = part

    def wants(self, now: float) -> list[Want]:
        """Return the requests to send to the server now, and count them as sent."""
        return requests(self.pace, ((p.header, p.want) for p in self._awaited.values()), now)

    def arrived(self, digest: str, chunks: Iterable[int], now: float) -> dict[int, list[int]]:
        """Return, for each lane, the received chunks that it waits for."""
        part = self._parts.get(digest)
        found: dict[int, list[int]] = {}
        if part is None:
            return found
        for index in chunks:
            if index in part.asked:
                part.asked.discard(index)
                self.pace.arrived(part.header.chunk_size(index), now)
            for lane in part.waiting.pop(index, ()):
                found.setdefault(lane, []).append(index)
        if not part.waiting:
            self._awaited.pop(digest, None)
        return found

    def refused(self, digest: str) -> set[int]:
        """Forget a part that the server does not give; return the lanes that waited for it."""
        part = self._forget(digest)
        if part is None:
            return set()
        self.pace.dropped(sum(map(part.header.chunk_size, part.asked)))
        return set().union(*part.waiting.values())

    def left(self, lane: int) -> None:
        """Drop a lane, and chunks that only it waits for and that were not requested yet."""
        for digest, part in list(self._awaited.items()):
            for index, lanes in list(part.waiting.items()):
                lanes.discard(lane)
                if not lanes:
                    del part.waiting[index]
            if not part.waiting:
                del self._awaited[digest]

    def revive(self, now: float) -> bool:
        """Count requests as lost if their chunks never came, so that `wants` repeats them."""
        if not self.pace.stalled(now):
            return False
        self.pace.begin_anew()
        for part in self._parts.values():
            part.asked.clear()
        return True
