"""Fed-CPrompt's server half: CODA-Prompt's, and the first rows of a task (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Array, Context, Part, Payload, State, Updates
from fcil_adapters.methods.fed_cprompt.options import FIRST, FedCPromptHparams
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.prompts.parts import component_names, head_parts, prompt_parts
from fcil_adapters.toolkit.prompts.server import (
    averaged,
    no_rows,
    start_of,
    with_new_components,
    with_new_rows,
)


class Aggregator:
    """The state: components of each task, the head (`prompts.server`), ``first.head.*`` (c, ...).

    ``first`` completes the previous task's server: its rows, as drawn, of classes that it never
    saw.
    """

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return no_rows(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw components and head rows, and remember these rows."""
        opened = with_new_components(ctx, with_new_rows(ctx, state))
        h: FedCPromptHparams = ctx.hparams
        if h.contrast == 0 or ctx.task.index == 0:
            return opened
        c = len(ctx.task.classes)
        first = {f"{FIRST}.{name}": opened.tensors[name][-c:] for name in HEAD}
        return State({**opened.tensors, **first}, opened.meta)

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the components and rows that clients train."""
        names = component_names(ctx.hparams.blocks)
        return start_of(ctx, state, names, f"task.{ctx.task.index}.")

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' components and rows."""
        names = component_names(ctx.hparams.blocks)
        return averaged(ctx, state, updates, names, f"task.{ctx.task.index}.")

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return rows and components, task by task, and the current task's first rows."""
        if current_task(state) < 0:
            return ()
        parts = (*head_parts(state), *prompt_parts(state, component_names(ctx.hparams.blocks)))
        if f"{FIRST}.{HEAD[0]}" not in state.tensors:
            return parts
        first = {name: state.tensors[f"{FIRST}.{name}"] for name in HEAD}
        return (*parts, Part(FIRST, Payload(first)))
