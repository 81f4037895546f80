"""The calibrated head in CCVR's state and broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import Array, Context, Payload, State
from fcil_adapters.numerics.task_parts import kept
from fcil_adapters.toolkit.heads.rows import HEAD_TENSORS, HeadRows

CALIBRATED = "calibrated"  # the part, and the prefix of its tensors in the state


def calibrated_rows(state: State) -> HeadRows | None:
    """Return the rows of the last calibration; None before the first."""
    if f"{CALIBRATED}.head.weight" not in state.tensors:
        return None
    return HeadRows.of({n: state.tensors[f"{CALIBRATED}.{n}"] for n in HEAD_TENSORS})


def with_calibrated(ctx: Context, state: State, rows: HeadRows) -> State:
    """Return the state with these rows as the calibrated head, as clients will decode them."""
    return with_head(state, rows.committed(ctx).named())


def with_head(state: State, tensors: Mapping[str, Array]) -> State:
    """Return the state with the tensors of the calibrated head, of rows or of a discriminant."""
    return State({**state.tensors, **kept(CALIBRATED, tensors)}, state.meta)


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
