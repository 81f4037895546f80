"""Transfer of envelopes, the same in both directions: the receiver requests bytes.

The bytes that one connection has requested and not yet received are bounded by its window, which
follows the link's rate (`window`). It requests more when half of them have arrived. The sender of
an update sends the first `UNASKED_BYTES` without a request, which saves a round trip, and announces
it. A chunk is the unit with a hash in the header; a message carries one or more consecutive chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Header
from fcil_protocol.envelopes.window import MAX_SPAN_BYTES, Pace
from fcil_protocol.errors import WireError
from fcil_protocol.messages.messages import MAX_WANTED, Want

UNASKED_BYTES = 128 << 10
UNASKED_SPAN_BYTES = 64 << 10  # of their messages while the rate is unknown: 13 s at 5 kB/s
MAX_SPOILED = 3  # messages of an envelope that do not fit and are requested again at once


def runs(header: Header, indices: Iterable[int], span: int) -> Iterator[range]:
    """Group consecutive chunks into messages.

    Args:
        header: header of their envelope.
        indices: chunk numbers; all must exist.
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
    """Return the number of chunks that the sender of an update sends without a request."""
    return min(max(1, UNASKED_BYTES // header.chunk_bytes), len(header.hashes))


class Receiving:
    """One incoming envelope.

    Args:
        header_bytes, signature, wrap: as received; kept with the body.
        assembly: store of verified chunks.

    Attributes:
        asked_bytes: bytes of the chunks that were requested and have not arrived.
        spoiled: messages that did not fit: a bit flipped in some memory, or a false chunk.
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
        """Store the chunks of a message, starting with this number.

        Returns:
            True if one of them is new.

        Raises:
            WireError: one does not fit; those before it are stored. A few times the others count as
                not requested, so that they are requested again.
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
        """True if a message that did not fit may be requested again at once."""
        return self.spoiled <= MAX_SPOILED

    def _answered(self, indices: list[int]) -> None:
        self._asked.difference_update(indices)
        self.asked_bytes -= sum(map(self.header.chunk_size, indices))

    def want(self, limit_bytes: int) -> list[int]:
        """Return the next chunks to request, ascending; they count as requested."""
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
        """Count the missing ones of these chunks as requested; return their bytes."""
        new = [i for i in indices if not self.assembly.has(i) and i not in self._asked]
        self._asked.update(new)
        size = sum(map(self.header.chunk_size, new))
        self.asked_bytes += size
        return size

    def forget_asked(self) -> None:
        """Count all chunks in flight as lost."""
        self._asked.clear()
        self.asked_bytes = 0

    @property
    def complete(self) -> bool:
        """True if every chunk is stored."""
        return self.assembly.complete


class Inflow:
    """All incoming envelopes of one connection: they share its window, in order.

    Args:
        most_bytes: largest window.

    Attributes:
        under_way: the envelopes by digest, the oldest first.
        pace: rate and window of the connection.
    """

    def __init__(self, most_bytes: int) -> None:
        self.under_way: dict[str, Receiving] = {}
        self.pace = Pace(most_bytes)

    def begin(self, receiving: Receiving, now: float, *, unasked: int = 0) -> None:
        """Start an envelope, of which this many chunks arrive without a request."""
        self.under_way[receiving.header.update_id] = receiving
        size = receiving.expect(range(min(unasked, len(receiving.header.hashes))))
        if size:
            self.pace.asked(size, now, unasked=True)

    def put(self, digest: str, index: int, data: bytes, now: float) -> Receiving | None:
        """Store the chunks of a message; None if their envelope is not in `under_way`.

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
        """Stop receiving an envelope; return its state, if any."""
        receiving = self.under_way.pop(digest, None)
        if receiving is not None and receiving.asked_bytes:
            self.pace.dropped(receiving.asked_bytes)
            receiving.forget_asked()
        return receiving

    def wants(self, now: float) -> list[Want]:
        """Return the requests to send now; their chunks count as requested."""
        found: list[Want] = []
        free = self.pace.free_bytes
        for digest, receiving in self.under_way.items():
            if free <= 0:
                break
            chunk_bytes = receiving.header.chunk_bytes
            if not self.pace.in_flight:
                free = max(free, chunk_bytes)  # even if the window is smaller
            wanted = receiving.want(free)
            if wanted:
                size = sum(map(receiving.header.chunk_size, wanted))
                free -= size
                self.pace.asked(size, now)
                span = max(1, self.pace.span_bytes // chunk_bytes)
                found.append(Want(digest=digest, chunks=wanted, span=span))
        return found

    def revive(self, now: float) -> bool:
        """Count requested chunks that never arrived as lost, so that `wants` repeats them."""
        if self.pace.stalled(now):
            self.lose()
            return True
        return False

    def lose(self) -> None:
        """Count all requested chunks as lost; stored ones stay."""
        self.pace.begin_anew()
        for receiving in self.under_way.values():
            receiving.forget_asked()
