"""How an envelope's chunks flow, the same in both directions: the receiver asks.

What the receiver has asked for and not yet got is the credit in flight; it asks again when
half of it has arrived. The sender may send the first ``credit`` chunks of an update unasked,
which saves a round trip.
"""

from __future__ import annotations

from fcil_protocol.assembly import Assembly
from fcil_protocol.envelope import Header


class Receiving:
    """One envelope on its way in.

    Args:
        header_bytes, signature, wrap: as received; kept with the body.
        assembly: where verified chunks are kept.
        credit: largest number of chunks in flight.
    """

    def __init__(
        self,
        header: Header,
        header_bytes: bytes,
        signature: bytes,
        wrap: bytes,
        assembly: Assembly,
        credit: int,
    ) -> None:
        self.header = header
        self.header_bytes = header_bytes
        self.signature = signature
        self.wrap = wrap
        self.assembly = assembly
        self._credit = credit
        self._asked: set[int] = set()

    def expect_first(self) -> None:
        """Count the chunks that a sender sends unasked as asked for."""
        self._asked.update(range(min(self._credit, len(self.header.hashes))))

    def put(self, index: int, data: bytes) -> bool:
        """Store a chunk if its hash fits; False if it was there already."""
        new = self.assembly.put(index, data)
        self._asked.discard(index)
        return new

    def want(self) -> list[int]:
        """Return the chunks to ask for now (often none); they count as asked for."""
        self._asked = {i for i in self._asked if i in self._still_missing()}
        if len(self._asked) > self._credit // 2:
            return []
        free = self._credit - len(self._asked)
        wanted = [i for i in self._still_missing() if i not in self._asked][:free]
        self._asked.update(wanted)
        return wanted

    def forget_asked(self) -> None:
        """After a new connection: what was in flight is gone."""
        self._asked.clear()

    def _still_missing(self) -> list[int]:
        return self.assembly.missing(2 * self._credit)

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.assembly.complete
