"""Offers of updates, and the line in which they wait while many others arrive.

A thousand updates of one round, all requested at once, would fill the server's memory before the
first is opened. So at most `MOST_ARRIVING` arrive at the same time; of the others the server has
the header alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fcil_protocol.envelopes.header import Header
from fcil_protocol.envelopes.transfer import Receiver
from fcil_protocol.envelopes.window import MIN_WINDOW_BYTES, TOTAL_BYTES
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_server.sessions.peers import Peer

# Clients whose updates arrive, or wait to be opened, at the same time: 128 MiB with the least
# window each, and as much again for stalled ones.
MOST_ARRIVING = TOTAL_BYTES // MIN_WINDOW_BYTES // 2
IDLE_S = 5.0  # without data: then the next in line need not wait for this update


@dataclass(frozen=True)
class UploadOffer:
    """An envelope that a client has, and whose header the server has checked.

    Attributes:
        blobs: header, signature and wrap as received.
        unasked: first chunks that arrive without a request.
        relay: the one that has taken it, to add it up.
    """

    peer: Peer
    header: Header
    blobs: Sequence[bytes]
    unasked: int
    relay: ClientId | None = None

    @property
    def may_wait(self) -> bool:
        """True unless its first chunks are on their way, or it is a list of classes, or a sum."""
        return not (self.unasked or self.header.core.kind == INVENTORY or self.peer.sums)


class OfferLine:
    """Offers that wait for their turn: at most one of a client, in the order in which they came."""

    def __init__(self) -> None:
        self._offers: dict[ClientId, UploadOffer] = {}
        self._most = MOST_ARRIVING

    def is_full(self, arriving: int) -> bool:
        """Return True if an update has to wait while this many others arrive, or wait already."""
        return bool(self._offers) or arriving >= self._most

    def put(self, offer: UploadOffer) -> None:
        """Let an offer wait. A client that had one in line keeps its place."""
        self._offers[offer.peer.client] = offer

    def leave(self, client: ClientId, digest: str = "") -> None:
        """Forget a client's offer, or only that of this update."""
        waiting = self._offers.get(client)
        if waiting is not None and digest in ("", waiting.header.update_id):
            del self._offers[client]

    def next(self, arriving: int) -> UploadOffer | None:
        """Return the first offer, which leaves the line; None if there is no room for it."""
        if not self._offers or arriving >= self._most:
            return None
        return self._offers.pop(next(iter(self._offers)))

    def look(self, receivers: Iterable[Receiver], now: float) -> None:
        """Let as many more arrive as connections have sent nothing for a while, and no more.

        Twice as many, with the least window each, have the whole memory for transfers.
        """
        idle = sum(one.pace.idle_s(now) >= IDLE_S for one in receivers) if self._offers else 0
        self._most = MOST_ARRIVING + min(idle, MOST_ARRIVING)

    def sweep(self, continues: RoundKey | None) -> None:
        """Forget the offers of a round that is over.

        Args:
            continues: the round, if updates of its task and kind can count later.
        """
        kept = () if continues is None else continues[:3]
        for client, offer in list(self._offers.items()):
            core = offer.header.core
            if (core.run, core.task, core.kind) != kept:
                del self._offers[client]
