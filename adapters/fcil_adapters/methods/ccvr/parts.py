"""The calibrated head in CCVR's state and broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import Context, Part, Payload, State
from fcil_adapters.toolkit.heads.rows import HEAD_TENSORS, HeadRows

CALIBRATED = "calibrated"  # the part, and the prefix of its tensors in the state


def calibrated_rows(state: State) -> HeadRows | None:
    """Return the rows of the last calibration; None before the first."""
    if f"{CALIBRATED}.head.weight" not in state.tensors:
        return None
    return HeadRows.of({n: state.tensors[f"{CALIBRATED}.{n}"] for n in HEAD_TENSORS})


def with_calibrated(ctx: Context, state: State, rows: HeadRows) -> State:
    """Return the state with these rows as the calibrated head, as clients will decode them."""
    named = {f"{CALIBRATED}.{n}": a for n, a in rows.committed(ctx).named().items()}
    return State({**state.tensors, **named}, state.meta)


def calibrated_parts(state: State) -> tuple[Part, ...]:
    """Return the part with the calibrated head, if there was a calibration."""
    rows = calibrated_rows(state)
    return () if rows is None else (Part(CALIBRATED, Payload(rows.named())),)


def scoring_rows(broadcast: Mapping[str, Payload], current: HeadRows) -> HeadRows:
    """Return the calibrated head, and below it the current rows that it lacks."""
    if CALIBRATED not in broadcast:
        return current
    return joined(HeadRows.of(broadcast[CALIBRATED].tensors), current)


def joined(known: HeadRows | None, rows: HeadRows) -> HeadRows:
    """Return the known rows, and below them those of other classes."""
    if known is None:
        return rows
    return HeadRows.joined((known, rows.chosen(~np.isin(rows.classes, known.classes))))
