"""A server's rounds with prompts and a linear head: new rows, averages, the row of a lone class.

The state of such a method holds the head's rows of all classes in order of their tasks
(``head.weight``, ``head.bias``, ``classes``, ``task_of``, ``seen``), and its prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from fcil_adapters.contract import Context, State, Updates
from fcil_adapters.numerics.averaging import average
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_adapters.numerics.task_parts import current_task, tagged, with_task
from fcil_adapters.toolkit.heads.distances import draw_linear, mean_row
from fcil_adapters.toolkit.heads.rows import F32, HEAD
from fcil_adapters.toolkit.prompts.initial import draw_pool
from fcil_adapters.toolkit.prompts.options import ComponentHparams, PromptHparams
from fcil_adapters.toolkit.prompts.parts import component_names
from fcil_protocol.payloads.payload import Array
from fcil_protocol.payloads.schema import Kind

_COMPONENTS, _HEAD = 1, 2  # purposes of the random streams


def no_rows(ctx: Context) -> State:
    """Return the state before the first task: no class, and nothing drawn."""
    none = np.zeros(0, dtype=np.int64)
    head = {HEAD[0]: np.zeros((0, ctx.backbone_info.dim), dtype=np.float32),
            HEAD[1]: np.zeros(0, dtype=np.float32)}  # fmt: skip
    return tagged({**head, "classes": none, "task_of": none, "seen": none}, -1)


def with_new_rows(
    ctx: Context, state: State, more: Mapping[str, Array] = MappingProxyType({})
) -> State:
    """Open a task: draw the head's rows of its classes with torch's Linear initialisation.

    Args:
        ctx: of the opening.
        state: of the last task.
        more: further tensors that the method has drawn and committed, by their names in the state.
    """
    task = ctx.task
    assert task.index == current_task(state) + 1, "tasks open one after the other"
    c = len(task.classes)
    drawn = draw_linear(ctx.rng(_HEAD), c, ctx.backbone_info.dim)
    new: dict[str, Array] = {
        **{n: ctx.forms.commit(Kind.HEAD, rows) for n, rows in zip(HEAD, drawn, strict=True)},
        "classes": np.asarray(task.classes, dtype=np.int64),
        "task_of": np.full(c, task.index, dtype=np.int64),
        "seen": np.zeros(c, dtype=np.int64),
    }
    joined = {n: np.concatenate([state.tensors[n], rows]) for n, rows in new.items()}
    return tagged({**state.tensors, **more, **joined}, task.index)


def with_new_components(ctx: Context, state: State) -> State:
    """Draw a task's components, orthonormal and orthogonal to those of past tasks.

    Args:
        ctx: of the opening; its options are `ComponentHparams`.
        state: with the head's rows of the task (`with_new_rows`).
    """
    h: ComponentHparams = ctx.hparams
    t, d = ctx.task.index, ctx.backbone_info.dim
    drawn = {}
    for i, name in enumerate(component_names(h.blocks)):
        prompt = name.startswith("prompt.")
        shape = (h.components, h.length, d) if prompt else (h.components, d)
        past = [state.f32(f"task.{s}.{name}") for s in range(t)]
        drawn[name] = draw_pool(ctx.rng(_COMPONENTS, i), shape, past)
    return with_task(state, t, ctx.forms.commit_named(drawn))


def averaged(
    ctx: Context, state: State, updates: Updates, names: Iterable[str], prefix: str = ""
) -> State:
    """Average prompts, keys and the task's head rows (FedAvg); record the classes seen.

    The row of a class without images in the round stays; that of a task's only class is made of the
    clients' means.

    Args:
        ctx: options, weights' cap, rule of averaging.
        state: as the round began.
        updates: at least one.
        names: of the prompts and keys in the updates.
        prefix: of the same names in the state.
    """
    h: PromptHparams = ctx.hparams
    c = len(ctx.task.classes)
    start = {name: state.tensors[prefix + name] for name in names}
    rows = _rows_of(ctx, state)
    weights = np.full(len(updates), 1 / len(updates))  # (K,)
    if h.average == "samples":
        weights = sample_weights(updates.samples, ctx.max_weight_share)
    mean = average(ctx, updates, (*start, *HEAD), weights, {**start, **rows})
    counts = np.stack([u.payload.i64("count") for u in updates])  # (K, c)
    owned = counts.sum(axis=0, dtype=np.int64) > 0  # (c,)
    weight, bias = mean[HEAD[0]], mean[HEAD[1]]
    if c == 1:
        weight, bias = _lone_row(ctx, state, updates), np.zeros(1, dtype=np.float32)
    new = {HEAD[0]: np.where(owned[:, None], weight, rows[HEAD[0]]),
           HEAD[1]: np.where(owned, bias, rows[HEAD[1]])}  # fmt: skip
    seen = state.i64("seen").copy()
    seen[-c:] |= owned
    head = {n: np.concatenate([state.f32(n)[:-c], ctx.forms.commit(Kind.HEAD, new[n])])
            for n in HEAD}  # fmt: skip
    prompts = ctx.forms.commit_named({name: mean[name] for name in start})
    kept = {prefix + name: array for name, array in prompts.items()}
    return State({**state.tensors, **kept, **head, "seen": seen}, state.meta)


def start_of(
    ctx: Context, state: State, names: Iterable[str], prefix: str = ""
) -> dict[str, Array]:
    """Return the prompts, keys and rows that clients train; a lone class's row is a mean.

    Args:
        ctx: the task.
        state: as in `averaged`, with ``names`` and ``prefix``.
        names: of the prompts and keys in the updates.
        prefix: of the same names in the state.
    """
    trained = {name: state.tensors[prefix + name] for name in names}
    return trained if len(ctx.task.classes) == 1 else {**trained, **_rows_of(ctx, state)}


def _rows_of(ctx: Context, state: State) -> dict[str, Array]:
    return {name: state.tensors[name][-len(ctx.task.classes) :] for name in HEAD}


def _lone_row(ctx: Context, state: State, updates: Updates) -> F32:
    """Return the row (1, d) of a task's only class: its mean, as long as known past rows are."""
    share = sample_weights(updates.samples, ctx.max_weight_share)  # (K,)
    means = np.stack([u.payload.f32(HEAD[0])[0].astype(np.float64) for u in updates])  # (K, d)
    known = (state.i64("task_of") < ctx.task.index) & (state.i64("seen") > 0)
    return mean_row((share @ means)[None], state.f32(HEAD[0])[known]).astype(np.float32)
