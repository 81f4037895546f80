"""HePCo's server half: average, then repair the average by data-free distillation (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fcil_adapters.contract import Array, Context, Kind, Part, Payload, State, Updates
from fcil_adapters.methods.hepco.consolidation import consolidate, old_source
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.reports import Reports, task_source, with_counts
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import CURRENT, current_task, tagged, task_part
from fcil_adapters.toolkit.heads.distances import draw_linear
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.prompts.initial import draw_uniform_pools
from fcil_adapters.toolkit.prompts.parts import POOLS, pool_names
from fcil_protocol.errors import ConfigError

_POOLS, _HEAD = 1, 2  # purposes of the random streams
_PER_CLASS = ("classes", "task_of", "counted", "recent")


class Aggregator:
    """The state holds the model, the previous task's model, and image counts.

    ``prompt.*``, ``key.*``, ``head.*`` (C rows); the same below ``prev.`` from the second task
    on; ``classes`` (C,) and ``task_of`` (C,); ``counted`` (C,), images over all rounds; and
    ``recent`` (C,), images in the last round in which a client had the class.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task: no class, and nothing drawn."""
        d = ctx.backbone_info.dim
        none = np.zeros(0, dtype=np.int64)
        head = {
            HEAD[0]: np.zeros((0, d), dtype=np.float32),
            HEAD[1]: np.zeros(0, dtype=np.float32),
        }
        return tagged({**head, **dict.fromkeys(_PER_CLASS, none)}, -1)

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the new head rows, at first the pools; keep the server as the previous one.

        Raises:
            ConfigError: the run has more classes than ``total_classes``.
        """
        h: HepcoHparams = ctx.hparams
        task = ctx.task
        assert task.index == current_task(state) + 1, "tasks open one after the other"
        c = len(task.classes)
        _check_total(h, len(state.tensors["classes"]) + c)
        tensors: dict[str, Array] = dict(state.tensors)
        if task.index == 0:
            tensors |= ctx.forms.commit_named(
                draw_uniform_pools(ctx.rng(_POOLS), h, ctx.backbone_info.dim)
            )
        drawn = draw_linear(ctx.rng(_HEAD), c, ctx.backbone_info.dim)
        for name, rows in zip(HEAD, drawn, strict=True):
            tensors[name] = np.concatenate([tensors[name], ctx.forms.commit(Kind.HEAD, rows)])
        if task.index > 0 and h.replays:
            for name in (*pool_names(h.blocks), *HEAD):
                tensors[f"prev.{name}"] = tensors[name]
        new = {
            "classes": np.asarray(task.classes, dtype=np.int64),
            "task_of": np.full(c, task.index, dtype=np.int64),
            "counted": np.zeros(c, dtype=np.int64),
            "recent": np.zeros(c, dtype=np.int64),
        }
        for name, numbers in new.items():
            tensors[name] = np.concatenate([tensors[name], numbers])
        return tagged(tensors, task.index)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' pools and rows, then distil clients and past into the average."""
        h: HepcoHparams = ctx.hparams
        reports = Reports.of(ctx, state, updates)
        weights = np.full(len(updates), 1 / len(updates))  # (K,)
        if h.average == "samples":
            weights = sample_weights(updates.samples, ctx.max_weight_share)
        c = reports.weight.shape[1]
        start = {name: state.tensors[name] for name in pool_names(h.blocks)}
        start |= {name: state.tensors[name][-c:] for name in HEAD}
        mean = average(ctx, updates, tuple(start), weights, start)
        provisional: dict[str, Array] = {**mean, **reports.provisional_head(ctx, state, mean)}
        counts = with_counts(ctx, state, reports.counts)
        known = counts["counted"] > 0  # (C,)
        sources = [task_source(ctx, state, updates, reports, known)]
        past = np.where(state.i64("task_of") < ctx.task.index, counts["counted"], 0)
        if past.any() and h.replays:
            sources.append(old_source(ctx, _previous(state), known, past))
        repaired = consolidate(ctx, provisional, known, sources)
        model = ctx.forms.commit_named({**provisional, **repaired})
        return replace(state, tensors={**state.tensors, **model, **counts})

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the pools, the head, and the classes of each finished task."""
        current = current_task(state)
        if current < 0:
            return ()
        task_of = state.i64("task_of")
        parts = []
        for t in range(current + 1):
            rows = task_of == t
            tensors: dict[str, Array] = {
                "classes": state.i64("classes")[rows],
                "seen": (state.i64("counted")[rows] > 0).astype(np.int64),
            }
            if t == current:
                tensors |= {name: state.tensors[name] for name in HEAD}
            parts.append(Part(CURRENT if t == current else task_part(t), tagged(tensors, t)))
        pools = {name: state.tensors[name] for name in pool_names(ctx.hparams.blocks)}
        return (*parts, Part(POOLS, Payload(pools)))


def _check_total(h: HepcoHparams, classes: int) -> None:
    if h.total_classes is not None and classes > h.total_classes:
        raise ConfigError(
            f"total_classes = {h.total_classes}, but the run now has {classes} classes.",
            action="Start a run with a larger total_classes, or without it.",
        )


def _previous(state: State) -> Mapping[str, Array]:
    return {
        name.removeprefix("prev."): array
        for name, array in state.tensors.items()
        if name.startswith("prev.")
    }
