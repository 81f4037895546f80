"""Sample of the clients with data that a round asks."""

from __future__ import annotations

import hashlib

from fcil_protocol.ids import ClientId


def sample(holders: list[ClientId], limit: int, seed: tuple[int, ...]) -> list[ClientId]:
    """Return at most ``limit`` of the holders (0: all), sorted.

    A ranking by hash depends on the set of clients, not on the order in which they came.
    """
    if not limit or len(holders) <= limit:
        return holders

    def rank(client: ClientId) -> bytes:
        return hashlib.sha256(repr((seed, client)).encode()).digest()

    return sorted(sorted(holders, key=rank)[:limit])
