"""Updates with values far larger than those of the others in the round (torch-free).

The schema's absolute limits must admit every honest value of every method, so they are wide. The
round's other clients show the honest range here and now: their median, and their spread around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Updates
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema

# Sums over a client's images grow with their number, so a round has no common size of them; counts
# and metrics are not averaged.
NOT_JUDGED = frozenset({Kind.GRAM, Kind.COUNT, Kind.METRIC})

_DEVIATION = 1.4826  # a normal distribution's standard deviation in median absolute ones
# The least spread of sizes, in natural logarithms: clients with similar data send nearly equal
# sizes, which must not make an honest client an outlier. With the default factor it lets every
# update pass that is no larger than e^2.4 = 11 times the median.
_LEAST_SPREAD = 0.4
_LARGEST_EXPONENT = 700.0  # exp stays finite

Sizes = Mapping[Kind, float]


@dataclass(frozen=True)
class OutlierRule:
    """Limits beyond which an update is too far from the others.

    Attributes:
        factor: spreads above the median that are allowed; 0: nothing is judged.
        min_clients: clients that a judgement needs.
    """

    factor: float = 0.0
    min_clients: int = 5


def screen(rule: OutlierRule, updates: Updates, schema: PayloadSchema) -> dict[ClientId, str]:
    """Return the clients to exclude, each with a sentence that gives the reason.

    One pass; one update is in memory at a time.

    Args:
        rule: the limits.
        updates: a round's.
        schema: the upload schema of its exchange, with the kind of each tensor.
    """
    if rule.factor <= 0 or len(updates) < rule.min_clients:
        return {}
    sizes = [kind_sizes(update.payload, schema) for update in updates]
    return outliers(rule, updates.clients, sizes)


def kind_sizes(payload: Payload, schema: PayloadSchema) -> dict[Kind, float]:
    """Return the largest row of each kind of tensor in a payload.

    A row runs along a tensor's last axis (a class's prototype, a token of a prompt); a number of a
    vector is a row of its own. Its size is its root mean square, so neither the width of the
    backbone nor the number of classes changes it, and no row can hide among small ones.
    """
    found: dict[Kind, float] = {}
    for spec in schema.tensors:
        array = payload.tensors.get(spec.name)
        if array is None or array.size == 0 or spec.kind in NOT_JUDGED:
            continue
        found[spec.kind] = max(found.get(spec.kind, 0.0), _largest_row(array))
    return found


def outliers(
    rule: OutlierRule, clients: Sequence[ClientId], sizes: Sequence[Sizes]
) -> dict[ClientId, str]:
    """Return the clients farther above the median than the rule allows, with the reasons.

    Sizes are compared by their ratios: the limit of a kind is ``median x exp(factor x spread)``,
    and the spread is the median absolute deviation of the logarithms, taken as a standard
    deviation. A client with a hundred times the images of another takes a hundred times the steps,
    and where values begin at zero their sizes differ as much; such a round has a wide spread,
    whereas a few liars cannot widen it. Only large updates are judged: one of small values cannot
    pull farther than its weight. Always fewer than half of the clients are excluded, those farthest
    beyond their limits.

    Args:
        rule: the limits.
        clients: K of them.
        sizes: of each, `kind_sizes`; a kind that fewer than ``min_clients`` sent, or whose median
            is zero, is not judged.
    """
    beyond: dict[ClientId, tuple[float, str]] = {}
    for kind in sorted({kind for one in sizes for kind in one}):
        own = {c: one[kind] for c, one in zip(clients, sizes, strict=True) if kind in one}
        values = np.array(list(own.values()))
        median = float(np.median(values))
        if len(own) < rule.min_clients or median <= 0:
            continue
        ratios = np.log(np.maximum(values, np.finfo(np.float64).tiny) / median)
        spread = max(_DEVIATION * float(np.median(np.abs(ratios))), _LEAST_SPREAD)
        limit = median * float(np.exp(min(rule.factor * spread, _LARGEST_EXPONENT)))
        for client, size in own.items():
            times = size / limit
            if times > max(1.0, beyond.get(client, (0.0, ""))[0]):
                beyond[client] = (times, _reason(kind, size, median, limit))
    farthest = sorted(beyond, key=lambda c: (-beyond[c][0], c))[: (len(clients) - 1) // 2]
    return {client: beyond[client][1] for client in sorted(farthest)}


def _reason(kind: Kind, size: float, median: float, limit: float) -> str:
    return (
        f"its {kind} values are far from the round's: size {size:.3g}, where the clients' "
        f"median is {median:.3g} and the limit {limit:.3g}"
    )


def _largest_row(array: Array) -> float:
    rows: NDArray[Any] = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    return float(np.sqrt(squares.max() / rows.shape[1]))
