"""Updates that clients have offered and whose chunks a relay has, to add them up.

The server requests none of them until the relay releases it. A sum counts for those that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fcil_adapters.numerics.relay_sums import updates_of
from fcil_protocol.envelopes.envelope import Core
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Payload
from fcil_server.sessions.offers import UploadOffer
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Accepted

MOST_RELEASED = 10_000  # updates that are remembered as released, the newest of them


class HeldOffers:
    """The offers of a round that relays have taken: at most one of a client."""

    def __init__(self) -> None:
        self._offers: dict[ClientId, UploadOffer] = {}
        self._released: dict[str, None] = {}  # in order

    def hold(self, offer: UploadOffer) -> bool:
        """Keep an offer that its relay has taken; False: the relay has released it already."""
        digest = offer.header.update_id
        if digest in self._released:
            return False
        self._offers[offer.peer.client] = offer
        return True

    def forget(self, client: ClientId, digest: str = "") -> None:
        """Forget a client's offer, or only that of this update."""
        if self._of(client, digest) is not None:
            del self._offers[client]

    def _of(self, client: ClientId, digest: str) -> UploadOffer | None:
        offer = self._offers.get(client)
        return offer if offer and digest in ("", offer.header.update_id) else None

    def release(self, digests: Iterable[str]) -> list[UploadOffer]:
        """Return the offers of updates that their relay does not add up.

        A release may come before the offer, while the client's messages wait.
        """
        given_up = set(digests)
        self._released |= dict.fromkeys(given_up)
        for digest in list(self._released)[:-MOST_RELEASED]:
            del self._released[digest]
        offers = [o for o in self._offers.values() if o.header.update_id in given_up]
        for offer in offers:
            del self._offers[offer.peer.client]
        # The relay has what came.
        return [replace(offer, unasked=0) for offer in offers]

    def of_relay(self, relay: ClientId) -> dict[str, UploadOffer]:
        """Return the offers that one relay has taken, by digest."""
        held = (offer for offer in self._offers.values() if offer.relay == relay)
        return {str(offer.header.update_id): offer for offer in held}

    def counted(self, update: Accepted) -> Peer | None:
        """Forget the offer of an update that counts; return the peer that offered it."""
        offer = self._of(update.client, update.digest)
        if offer is None:
            return None
        del self._offers[update.client]
        return offer.peer

    def offered_by(self, update: Accepted, peer: Peer) -> None:
        """Note that a client has offered an update again, in a newer session."""
        offer = self._of(update.client, update.digest)
        if offer is not None:
            self._offers[update.client] = replace(offer, peer=peer)

    def clear(self) -> None:
        """Forget everything: the round is over."""
        self._offers.clear()
        self._released.clear()


def summed(core: Core, payload: Payload, offers: Mapping[str, UploadOffer]) -> tuple[Accepted, ...]:
    """Return the updates in a sum, each as its client has offered it.

    Args:
        core: the sum's.
        payload: the sum.
        offers: those that its relay has taken.

    Raises:
        SchemaMismatch: an update was not offered, or is not of the sum's round.
    """
    found: list[Accepted] = []
    for update in updates_of(payload):
        offer = offers.get(update.digest)
        if offer is None or _round_of(offer.header.core) != _round_of(core):
            raise SchemaMismatch(
                f"a sum names the update {update.digest[:16]}, which its client has not offered "
                "for this round through the relay.",
                action="The server asks for the updates themselves.",
            )
        found.append(
            Accepted(
                client=offer.peer.client,
                digest=update.digest,
                core=offer.header.core,
                tensor_bytes=update.tensor_bytes,
                sealed_bytes=offer.header.sealed_bytes,
                samples=update.samples,
                metrics=update.metrics,
            )
        )
    return tuple(found)


def _round_of(core: Core) -> tuple[object, ...]:
    return core.run, core.method, core.schema, core.task, core.kind, core.round, core.base
