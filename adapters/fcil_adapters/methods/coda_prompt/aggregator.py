"""CODA-Prompt's server half: draw a task's components apart from past ones, average (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.prompts.parts import component_names, head_parts, prompt_parts
from fcil_adapters.toolkit.prompts.server import (
    averaged,
    no_rows,
    start_of,
    with_new_components,
    with_new_rows,
)


class Aggregator:
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
