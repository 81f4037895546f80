"""The parts of the analytic method's broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Payload
from fcil_adapters.methods.analytic.lift import I64
from fcil_adapters.numerics.task_parts import find_part

PROJECTION = "projection"  # the part with the seed of the random projection


def read_seed(broadcast: Mapping[str, Payload]) -> I64:
    """Return the numbers that determine the projection.

    Raises:
        SchemaMismatch: their part is missing.
    """
    return find_part(broadcast, PROJECTION).i64("seed")
