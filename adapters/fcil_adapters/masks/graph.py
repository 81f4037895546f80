"""Neighbours of each client, and the numbers of clients that a masked round needs.

Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020,
https://eprint.iacr.org/2020/704. Up to `FULL` clients all are neighbours; beyond, each has some
four times the logarithm, next to it on a circle whose order follows from the list's digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from functools import lru_cache

from fcil_protocol.ids import ClientId

FULL = 30
LEAST_MEMBERS = 3


def degree(members: int) -> int:
    """Return the number of neighbours of each of some clients."""
    return members - 1 if members <= FULL else 2 * math.ceil(2 * math.log2(members))


def threshold(neighbours: int) -> int:
    """Return t, the number of neighbours whose shares open a secret.

    An honest neighbour gives the share of one of a client's two secrets, a dishonest one both. Both
    secrets take 2 t shares, so up to 2 t - k - 1 of the k neighbours may work for the server: about
    a third.
    """
    return min(neighbours, math.ceil(2 * neighbours / 3) + 1)


def votes_needed(members: int) -> int:
    """Return the number of votes for one set of survivors; no other set can have as many.

    Two sets would need more than 4/3 of the votes, and that is all there are if a third of the
    clients vote twice.
    """
    return 2 * members // 3 + 1


@lru_cache(maxsize=8)
def circle(clients: tuple[ClientId, ...], digest: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each client's neighbours, ascending.

    Args:
        clients: the list, sorted.
        digest: of the list; it shuffles the circle.
    """
    n, k = len(clients), degree(len(clients))
    if k == n - 1:
        return tuple(tuple(i for i in range(n) if i != own) for own in range(n))
    order = sorted(range(n), key=lambda i: hashlib.sha256(digest + clients[i].encode()).digest())
    steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0)]
    around = {
        client: tuple(sorted(order[(place + step) % n] for step in steps))
        for place, client in enumerate(order)
    }
    return tuple(around[own] for own in range(n))


def is_connected(around: Sequence[Collection[int]], some: Collection[int]) -> bool:
    """Return True if masks join some clients to one group, whose sum alone can be opened."""
    left = set(some)
    reached = [left.pop()] if left else []
    while reached:
        near = left.intersection(around[reached.pop()])
        left -= near
        reached.extend(near)
    return not left


def is_together(around: Sequence[Collection[int]], stayed: Collection[int]) -> bool:
    """Return True if clients open a sum of these: one group, with half of each one's neighbours."""
    some = set(stayed)
    thin = any(2 * len(some.intersection(around[i])) < len(around[i]) for i in some)
    return not thin and is_connected(around, some)


def with_enough_holders(around: Sequence[Collection[int]], delivered: Collection[int]) -> set[int]:
    """Return the clients whose secrets enough of the others can open, without the rest."""
    kept = set(delivered)
    least = threshold(degree(len(around)))
    while poor := {i for i in kept if len(kept.intersection(around[i])) < least}:
        kept -= poor
    return kept
