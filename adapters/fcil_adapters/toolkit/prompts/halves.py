"""Halves that methods with prompts share, whole (torch; `prompts.manifest`).

Two kinds: one *pool* of prompts in each block for all tasks (HePCo's client), and *components* that
each task adds (CODA-Prompt). A manifest names them where a method has none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import (
    Array,
    Context,
    ImageSet,
    Part,
    Payload,
    Predictor,
    State,
    Updates,
)
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.prompts.client import component_scorer, learn_pools, pool_scorer
from fcil_adapters.toolkit.prompts.initial import draw_uniform_pools
from fcil_adapters.toolkit.prompts.parts import (
    component_names,
    head_parts,
    pool_names,
    pool_part,
    prompt_parts,
    read_parts,
    upload,
)
from fcil_adapters.toolkit.prompts.server import (
    averaged,
    no_rows,
    start_of,
    with_new_components,
    with_new_rows,
)
from fcil_adapters.toolkit.training.optimise import class_counts

_POOLS = 1  # purpose of the random stream


class PoolLearner:
    """The learner of methods that train pools by cross-entropy alone.

    Stateless: all that a round starts from is in the broadcast.
    """

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train pools, keys and the task's head rows on local images."""
        trained = learn_pools(ctx, ctx.hparams, read_parts(broadcast), data)
        counts = class_counts(data, ctx.task.classes)
        return state, upload(trained, ctx.task.classes, counts)


class PoolAggregator:
    """The state: ``prompt.<block>``, ``key.<block>``, and the head (`prompts.server`)."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return no_rows(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the new head rows, at first the pools."""
        if ctx.task.index > 0:
            return with_new_rows(ctx, state, {})
        drawn = draw_uniform_pools(ctx.rng(_POOLS), ctx.hparams, ctx.backbone_info.dim)
        return with_new_rows(ctx, state, ctx.forms.commit_named(drawn))

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the pools, keys and rows that clients train."""
        return start_of(ctx, state, pool_names(ctx.hparams.blocks))

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' pools and rows."""
        return averaged(ctx, state, updates, pool_names(ctx.hparams.blocks))

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the head's rows task by task, and the pools."""
        if current_task(state) < 0:
            return ()
        return (*head_parts(state), pool_part(state, pool_names(ctx.hparams.blocks)))


class ComponentAggregator:
    """The state: ``task.<t>.prompt.<block>`` and keys of each task, the head (`prompts.server`)."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return no_rows(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw components orthogonal to all past ones, and head rows."""
        return with_new_components(ctx, with_new_rows(ctx, state))

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the components and rows that clients train."""
        names = component_names(ctx.hparams.blocks)
        return start_of(ctx, state, names, f"task.{ctx.task.index}.")

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' components and rows."""
        names = component_names(ctx.hparams.blocks)
        return averaged(ctx, state, updates, names, f"task.{ctx.task.index}.")

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the head's rows and the components, task by task."""
        if current_task(state) < 0:
            return ()
        return (*head_parts(state), *prompt_parts(state, component_names(ctx.hparams.blocks)))


class PoolModel:
    """Builds the classifier of one pool for each block from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Attach the pools to a view; candidates are the classes that anybody had."""
        return pool_scorer(ctx, ctx.hparams, read_parts(broadcast), backbone)


class ComponentModel:
    """Builds the classifier with the components of all tasks from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Sum the components of all tasks; candidates are the classes that anybody had."""
        return component_scorer(ctx, ctx.hparams, read_parts(broadcast), backbone)
