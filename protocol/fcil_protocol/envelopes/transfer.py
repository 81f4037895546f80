"""How envelopes flow, the same in both directions: the receiver asks, in bytes.

What one connection has asked for and not yet got is bounded by its window, and the window
follows the link (`window`). It asks again when half of it has come. The sender of an update
sends the first `UNASKED_BYTES` without being asked, which saves a round trip, and says so.
A chunk is what has a hash in the header; a message carries one or more that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Header
from fcil_protocol.envelopes.window import MAX_SPAN_BYTES, Pace
from fcil_protocol.errors import WireError
from fcil_protocol.messages.messages import MAX_WANTED, Want

UNASKED_BYTES = 128 << 10
UNASKED_SPAN_BYTES = 64 << 10  # of their messages while nothing is known: 13 s at 5 kB/s
MAX_SPOILED = 3  # messages of an envelope that do not fit and are asked for again at once


def runs(header: Header, indices: Iterable[int], span: int) -> Iterator[range]:
    """Group chunks that follow each other into messages.

    Args:
        header: whose chunks they are.
        indices: all of them exist.
        span: most chunks of one message; it has at most `MAX_SPAN_BYTES` in any case.
    """
    most = max(1, min(span, MAX_SPAN_BYTES // header.chunk_bytes))
    run = range(0)
    for index in indices:
        if run and index == run.stop and len(run) < most:
            run = range(run.start, index + 1)
            continue
        if run:
            yield run
        run = range(index, index + 1)
    if run:
        yield run


def unasked(header: Header) -> int:
    """Return how many chunks the sender of an update sends without being asked."""
    return min(max(1, UNASKED_BYTES // header.chunk_bytes), len(header.hashes))


class Receiving:
    """One envelope on its way in.

    Args:
        header_bytes, signature, wrap: as received; kept with the body.
        assembly: where verified chunks are kept.

    Attributes:
        asked_bytes: of the chunks that were asked for and have not come.
        spoiled: messages that did not fit: a bit that fell over in somebody's memory, or a lie.
    """

    def __init__(
        self, header: Header, header_bytes: bytes, signature: bytes, wrap: bytes, assembly: Assembly
    ) -> None:
        self.header = header
        self.header_bytes = header_bytes
        self.signature = signature
        self.wrap = wrap
        self.assembly = assembly
        self.asked_bytes = 0
        self.spoiled = 0
        self._asked: set[int] = set()

    def put(self, index: int, data: bytes) -> bool:
        """Store the chunks of a message, the first of which has this number.

        Returns:
            Whether one of them is new.

        Raises:
            WireError: one does not fit; those before it are kept. A few times the others count
                as not asked for, so that they are asked for again.
            DiskFull, StorageError: they could not be written.
        """
        count = max(1, -(-len(data) // self.header.chunk_bytes))
        came = [i for i in self._asked if index <= i < index + count]
        try:
            new = self.assembly.put(index, data)
        except WireError:
            self.spoiled += 1
            self._answered(came if self.retries else [i for i in came if self.assembly.has(i)])
            raise
        self._answered(came)
        return new

    @property
    def retries(self) -> bool:
        """Whether what did not fit may be asked for again at once."""
        return self.spoiled <= MAX_SPOILED

    def _answered(self, indices: list[int]) -> None:
        self._asked.difference_update(indices)
        self.asked_bytes -= sum(map(self.header.chunk_size, indices))

    def want(self, limit_bytes: int) -> list[int]:
        """Return the next chunks to ask for, ascending; they count as asked for."""
        wanted: list[int] = []
        for index in self.assembly.missing(len(self._asked) + MAX_WANTED):
            if index in self._asked:
                continue
            size = self.header.chunk_size(index)
            if limit_bytes < size or len(wanted) == MAX_WANTED:
                break
            limit_bytes -= size
            wanted.append(index)
        self.expect(wanted)
        return wanted

    def expect(self, indices: Iterable[int]) -> int:
        """Count chunks as asked for, those that are there apart; return their bytes."""
        new = [i for i in indices if not self.assembly.has(i) and i not in self._asked]
        self._asked.update(new)
        size = sum(map(self.header.chunk_size, new))
        self.asked_bytes += size
        return size

    def forget_asked(self) -> None:
        """What was in flight is lost."""
        self._asked.clear()
        self.asked_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.assembly.complete


class Inflow:
    """All envelopes on their way in over one connection: they share its window, in order.

    Args:
        most_bytes: largest window.

    Attributes:
        under_way: the envelopes by digest, the oldest first.
        pace: of the connection.
    """

    def __init__(self, most_bytes: int) -> None:
        self.under_way: dict[str, Receiving] = {}
        self.pace = Pace(most_bytes)

    def begin(self, receiving: Receiving, now: float, *, unasked: int = 0) -> None:
        """Take up an envelope, of which so many chunks come unasked."""
        self.under_way[receiving.header.update_id] = receiving
        size = receiving.expect(range(min(unasked, len(receiving.header.hashes))))
        if size:
            self.pace.asked(size, now, unasked=True)

    def put(self, digest: str, index: int, data: bytes, now: float) -> Receiving | None:
        """Store the chunks of a message; None if they are of no envelope under way.

        Raises:
            WireError, DiskFull, StorageError: as in `Receiving.put`.
        """
        receiving = self.under_way.get(digest)
        if receiving is not None:
            asked = receiving.asked_bytes
            try:
                receiving.put(index, data)
            finally:
                if asked > receiving.asked_bytes:
                    self.pace.arrived(asked - receiving.asked_bytes, now)
        return receiving

    def end(self, digest: str) -> Receiving | None:
        """Wait for an envelope no more; return what there was of it."""
        receiving = self.under_way.pop(digest, None)
        if receiving is not None and receiving.asked_bytes:
            self.pace.dropped(receiving.asked_bytes)
            receiving.forget_asked()
        return receiving

    def wants(self, now: float) -> list[Want]:
        """Return what to ask for now; it counts as asked for."""
        found: list[Want] = []
        free = self.pace.free_bytes
        for digest, receiving in self.under_way.items():
            if free <= 0:
                break
            chunk_bytes = receiving.header.chunk_bytes
            if not self.pace.in_flight:
                free = max(free, chunk_bytes)  # a window smaller than a chunk must not stop it
            wanted = receiving.want(free)
            if wanted:
                size = sum(map(receiving.header.chunk_size, wanted))
                free -= size
                self.pace.asked(size, now)
                span = max(1, self.pace.span_bytes // chunk_bytes)
                found.append(Want(digest=digest, chunks=wanted, span=span))
        return found

    def revive(self, now: float) -> bool:
        """If what was asked for never came, count it as lost, so that `wants` asks again."""
        if self.pace.stalled(now):
            self.lose()
            return True
        return False

    def lose(self) -> None:
        """Count all that was asked for as lost; what has come stays."""
        self.pace.begin_anew()
        for receiving in self.under_way.values():
            receiving.forget_asked()
