"""Transfer of envelopes, the same in both directions: the receiver requests bytes.

The bytes that one connection has requested and not yet received are bounded by its window, which
follows the link's rate (`window`). It requests more when half of them have arrived. The sender of
an update sends the first `UNASKED_BYTES` without a request, which saves a round trip, and announces
it. A chunk is the unit with a hash in the header; a message carries one or more consecutive chunks.

Nothing here knows a connection: the receiver stores chunks in an `Assembly` and returns requests,
the sender reads chunks by a function and yields messages, and the time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Header
from fcil_protocol.envelopes.window import MAX_SPAN_BYTES, Pace
from fcil_protocol.errors import WireError
from fcil_protocol.messages.messages import MAX_WANTED, Chunk, Want

UNASKED_BYTES = 128 << 10
UNASKED_SPAN_BYTES = 64 << 10  # of their messages while the rate is unknown: 13 s at 5 kB/s
OBJECT_BYTES = 1 << 20  # least size of a part that is worth an address in an object store
MAX_SPOILED = 3  # messages of an envelope that do not fit and are requested again at once


def unrequested_chunks(header: Header) -> int:
    """Return the number of chunks that the sender of an update sends without a request."""
    return min(max(1, UNASKED_BYTES // header.chunk_bytes), len(header.hashes))


def requests(
    pace: Pace, envelopes: Iterable[tuple[Header, Callable[[int], list[int]]]], now: float
) -> list[Want]:
    """Return the requests that a connection sends now; they count as sent.

    Args:
        pace: of the connection.
        envelopes: in the order in which they use its window: the header of each, and a function
            that chooses the next chunks to request, ascending, within a number of bytes.
        now: the time.
    """
    found: list[Want] = []
    free = pace.free_bytes
    for header, choose in envelopes:
        if not pace.in_flight:
            free = max(free, header.chunk_bytes)  # even if the window is smaller
        if free > 0 and (chunks := choose(free)):
            size = sum(map(header.chunk_size, chunks))
            free -= size
            pace.asked(size, now)
            span = max(1, pace.span_bytes // header.chunk_bytes)
            found.append(Want(digest=header.update_id, chunks=chunks, span=span))
    return found


def granted(header: Header, chunks: Iterable[int], most_bytes: int) -> list[int]:
    """Return the requested chunks to send: each once, within this many bytes, and at least one."""
    return list(dict.fromkeys(chunks))[: max(1, most_bytes // header.chunk_bytes)]


class Sender(NamedTuple):
    """The sending side of one envelope: ``read`` returns consecutive chunks of its body."""

    header: Header
    read: Callable[[range], bytes]

    def messages(self, chunks: Iterable[int], span: int) -> Iterator[tuple[Chunk, bytes]]:
        """Yield the messages that carry these chunks, in this order; all must exist.

        A message has consecutive ones, at most ``span`` and at most `MAX_SPAN_BYTES`.
        """
        most = max(1, min(span, MAX_SPAN_BYTES // self.header.chunk_bytes))
        run = range(0)
        for index in (*chunks, -1):  # -1 ends the last message
            if run and (index != run.stop or len(run) == most):
                yield Chunk(digest=self.header.update_id, index=run.start), self.read(run)
                run = range(0)
            run = range(run.start if run else index, index + 1)


class IncomingEnvelope:
    """The receiving side of one envelope.

    Args:
        blobs: header, signature and wrap as received; kept with the body.
        assembly: store of verified chunks.

    Attributes:
        header, digest: the envelope's.
        asked_bytes: bytes of the chunks that were requested and have not arrived.
        spoiled: messages that did not fit: a bit flipped in some memory, or a false chunk.
    """

    def __init__(self, blobs: Sequence[bytes], assembly: Assembly) -> None:
        self.header_bytes, self.signature, self.wrap = blobs
        self.assembly = assembly
        self.header = assembly.header
        self.digest = assembly.header.update_id
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


class Receiver:
    """All incoming envelopes of one connection: they share its window, in order.

    Args:
        most_bytes: largest window.

    Attributes:
        under_way: the envelopes by digest, the oldest first.
        pace: rate and window of the connection.
    """

    def __init__(self, most_bytes: int) -> None:
        self.under_way: dict[str, IncomingEnvelope] = {}
        self.pace = Pace(most_bytes)

    def begin(
        self, blobs: Sequence[bytes], assembly: Assembly, now: float, *, unasked: int = 0
    ) -> IncomingEnvelope:
        """Start an envelope, of which this many chunks arrive without a request."""
        envelope = self.under_way[assembly.header.update_id] = IncomingEnvelope(blobs, assembly)
        size = envelope.expect(range(min(unasked, len(envelope.header.hashes))))
        if size:
            self.pace.asked(size, now, unasked=True)
        return envelope

    def put(self, digest: str, index: int, data: bytes, now: float) -> IncomingEnvelope | None:
        """Store the chunks of a message; None if their envelope is not in `under_way`.

        Raises:
            WireError, DiskFull, StorageError: as in `IncomingEnvelope.put`.
        """
        envelope = self.under_way.get(digest)
        if envelope is not None:
            asked = envelope.asked_bytes
            try:
                envelope.put(index, data)
            finally:
                if asked > envelope.asked_bytes:
                    self.pace.arrived(asked - envelope.asked_bytes, now)
        return envelope

    def end(self, digest: str) -> IncomingEnvelope | None:
        """Stop receiving an envelope; return its state, if any."""
        envelope = self.under_way.pop(digest, None)
        if envelope is not None and envelope.asked_bytes:
            self.pace.dropped(envelope.asked_bytes)
            envelope.forget_asked()
        return envelope

    def wants(self, now: float) -> list[Want]:
        """Return the requests to send now; their chunks count as requested."""
        envelopes = self.under_way.values()
        return requests(self.pace, ((one.header, one.want) for one in envelopes), now)

    def revive(self, now: float) -> bool:
        """Count requested chunks that never arrived as lost, so that `wants` repeats them."""
        if self.pace.stalled(now):
            self.lose()
            return True
        return False

    def lose(self) -> None:
        """Count all requested chunks as lost; stored ones stay."""
        self.pace.begin_anew()
        for envelope in self.under_way.values():
            envelope.forget_asked()
