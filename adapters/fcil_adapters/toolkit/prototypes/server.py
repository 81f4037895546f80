"""A round of PILoRA's and PLoRA's servers with a task's prototypes (torch)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Updates
from fcil_adapters.numerics.class_reports import ClassReports, federated_means
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.prototypes.options import ReweightOptions
from fcil_adapters.toolkit.prototypes.reweighting import reweight
from fcil_adapters.toolkit.prototypes.rows import PrototypeRows
from fcil_protocol.payloads.schema import Kind


def committed(ctx: Context, rows: PrototypeRows) -> PrototypeRows:
    """Return rows with their prototypes as clients will decode them."""
    return replace(rows, proto=ctx.forms.commit(Kind.PROTOTYPE, rows.proto))


def start_at_means(ctx: Context, updates: Updates, rows: PrototypeRows) -> PrototypeRows:
    """Move the prototypes to the federated class means (PILoRA's variant with HeadTune).

    A class without images keeps its random start. The means are streamed.
    """
    means, totals = federated_means(updates, ctx.task.classes, ctx.max_weight_share)
    owned = totals > 0  # (c,)
    proto = np.where(owned[:, None], means, rows.proto).astype(np.float32)
    return replace(rows, proto=proto, seen=rows.seen | owned)


def combine(
    ctx: Context,
    updates: Updates,
    rows: PrototypeRows,
    weights: NDArray[np.float64],
    options: ReweightOptions,
) -> PrototypeRows:
    """Combine the clients' prototypes, all classes and clients at once on ``ctx.device``.

    Args:
        ctx: task and device.
        updates: with reports (`class_reports`) and ``proto`` (c, d).
        rows: the prototypes before this round.
        weights: (K,), the clients' sample weights.
        options: of the combination.
    """
    reports = ClassReports.of(updates, ctx.task.classes)
    protos, _ = reweight(
        to_torch(reports.protos, ctx.device),
        to_torch(reports.means, ctx.device),
        to_torch(reports.counts, ctx.device),
        to_torch(rows.proto, ctx.device),
        to_torch(weights, ctx.device),
        options=options,
        max_share=ctx.max_weight_share,
    )
    owned: NDArray[np.bool_] = np.any(reports.counts >= options.min_count, axis=0)  # (c,)
    return replace(rows, proto=to_numpy(protos), seen=rows.seen | owned)
