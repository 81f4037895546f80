"""Locations of compared runs, and their lines in a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fcil_protocol.errors import UsageError
from fcil_protocol.formats import format_bytes, percent, points
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports.results.round_views import Bytes

HEAD = ("run", "method", "FAA", "AIA", "forgetting", "up", "down", "tensors up", "tensors down")


def locate_run(place: Path) -> tuple[Path, str | None]:
    """Return the federation's directory and the run of a path; None: its newest run.

    Raises:
        UsageError: it is neither a federation's directory nor one of its runs.
    """
    # A run directory is <federation>/runs/<run>.
    directory, run = place, None
    if not (place / LEDGER_NAME).exists():
        directory, run = place.parent.parent, place.name
    if not (directory / LEDGER_NAME).exists():
        raise UsageError(
            f"{place} is neither a federation's directory nor one of its runs.",
            action="Give a directory that holds a ledger, or one of the directories in its runs/.",
        )
    return directory, run


def row(
    name: str,
    method: str,
    headline: tuple[float | None, float | None, float | None],
    ways: Sequence[Bytes],
) -> tuple[str, ...]:
    """Return the line of one run; ``ways`` are its bytes in each `Direction`."""
    faa, aia, lost = headline
    return (
        name,
        method,
        *map(percent, (faa, aia)),
        points(lost),
        *(format_bytes(b.true_wire) for b in ways),
        *(format_bytes(b.tensor) for b in ways),
    )
