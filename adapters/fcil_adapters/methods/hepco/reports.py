"""Clients' reports to HePCo's server in a round, and the teachers made of them (torch)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.contract import Context, State, Updates
from fcil_adapters.methods.hepco.consolidation import Model, Source, new_source
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.parts import image_counts
from fcil_adapters.methods.hepco.teachers import Head, Teachers, capped_counts, label_shares
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.distances import mean_row
from fcil_adapters.toolkit.heads.rows import HEAD

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Reports:
    """The clients' head rows and counts, stacked.

    Attributes:
        weight: (K, c, d), bias: (K, c); in a task of a single class, mean features whose
            lengths were set to that of the past rows, with bias 0.
        counts: (K, c), images, each client's scaled to its allowed share; a client that tells
            only how many it has in all has as many of each class.
        samples: (K,).
        means: (K, d), the mean features as they came; None with more classes.
        past: (P, d), the head's rows of known past classes.
    """

    weight: F64
    bias: F64
    counts: F64
    samples: tuple[int, ...]
    means: F64 | None
    past: F32

    @classmethod
    def of(cls, ctx: Context, state: State, updates: Updates) -> Reports:
        """Read all updates of a round."""
        sent = [
            (*(u.payload.f32(name).astype(np.float64) for name in HEAD), image_counts(u.payload))
            for u in updates
        ]
        weight, bias, counts = (np.stack(column) for column in zip(*sent, strict=True))
        single = weight.shape[1] == 1
        past = _past_rows(ctx, state)
        return cls(
            weight=mean_row(weight, past) if single else weight,
            bias=bias * (not single),
            counts=capped_counts(counts, ctx.max_weight_share),
            samples=updates.samples,
            means=weight[:, 0] if single else None,
            past=past,
        )

    def provisional_head(
        self, ctx: Context, state: State, mean: Mapping[str, F32]
    ) -> dict[str, F32]:
        """Put in the average rows; in a task of a single class, one made of the class's mean."""
        if self.means is None:
            return _with_rows(state, mean[HEAD[0]], mean[HEAD[1]])
        share = sample_weights(self.samples, ctx.max_weight_share)
        row = mean_row((share @ self.means)[None], self.past)  # (1, d)
        return _with_rows(state, row, np.zeros(1))


def task_source(
    ctx: Context, state: State, updates: Updates, reports: Reports, known: NDArray[np.bool_]
) -> Source:
    """Collect the teachers of the task's classes: the clients and, at need, the round's start."""
    h: HepcoHparams = ctx.hparams
    c = reports.counts.shape[1]
    total = max(h.total_classes or 0, len(known))
    shares, labels = label_shares(
        reports.counts, state.i64("recent")[-c:].astype(np.float64), total - c, h,
        ctx.max_weight_share,
    )  # fmt: skip
    keeps = bool(shares[-1].any())
    if not keeps:
        shares = shares[:-1]

    def on_columns(values: F64) -> F64:
        """Put values (..., c) of the task's classes into the known columns (..., C)."""
        wide = np.zeros((*values.shape[:-1], len(known)))
        wide[..., -c:] = values
        return wide[..., known]

    def models() -> Iterable[Model]:
        for update in updates:
            yield update.payload.tensors
        if keeps:
            yield state.tensors

    teachers = Teachers(
        _heads(state, reports, known, ctx.device, with_start=keeps),
        to_torch(on_columns(shares), ctx.device, torch.float64),
        to_torch(on_columns(labels), ctx.device, torch.float64),
    )
    return new_source(h, teachers, models)


def _heads(
    state: State, reports: Reports, known: NDArray[np.bool_], device: str, *, with_start: bool
) -> Head:
    """Stack the clients' heads over the known classes: past rows as they were, then their own.

    With ``with_start`` the head that the round began with is the last one.
    """
    columns = to_torch(known, device)

    def all_rows(name: str, own: F64) -> Tensor:
        start = to_torch(state.f32(name), device, torch.float64)  # (C, ...)
        rows = to_torch(own, device)  # (K, c, ...)
        past = start[: -rows.shape[1]]
        heads = torch.cat([past.expand(len(rows), *past.shape), rows], 1)  # (K, C, ...)
        return torch.cat([heads, start[None]] if with_start else [heads])[:, columns]

    return Head(all_rows(HEAD[0], reports.weight), all_rows(HEAD[1], reports.bias))


def _with_rows(state: State, rows: F32 | F64, bias: F32 | F64) -> dict[str, F32]:
    """Return the head with the task's rows replaced: (C, d) and (C,), float32."""
    head = {name: state.f32(name).copy() for name in HEAD}
    head[HEAD[0]][-len(rows) :] = rows
    head[HEAD[1]][-len(rows) :] = bias
    return head


def with_counts(ctx: Context, state: State, counts: F64) -> dict[str, I64]:
    """Add this round's images (K, c) to the classes' counts, at least 1 where there are any."""
    totals = counts.sum(0)
    now = np.where(totals > 0, np.maximum(np.rint(totals), 1), 0).astype(np.int64)  # (c,)
    rows = state.i64("task_of") == ctx.task.index
    counted, recent = state.i64("counted").copy(), state.i64("recent").copy()
    counted[rows] += now
    recent[rows] = np.where(now > 0, now, recent[rows])
    return {"counted": counted, "recent": recent}


def _past_rows(ctx: Context, state: State) -> F32:
    """Return the head's rows of known past classes, (P, d)."""
    past = (state.i64("task_of") < ctx.task.index) & (state.i64("counted") > 0)
    return state.f32(HEAD[0])[past]
