"""Fed-CPrompt's server half: CODA-Prompt's, and the first rows of a task (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Context, Part, Payload, State
from fcil_adapters.methods.fed_cprompt.options import FIRST, FedCPromptHparams
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.prompts.halves import ComponentAggregator


class Aggregator(ComponentAggregator):
    """The state: components of each task, the head (`prompts.server`), ``first.head.*`` (c, ...).

    ``first`` completes the previous task's server: its rows, as drawn, of classes that it never
    saw.
    """

    def open_task(self, ctx: Context, state: State) -> State:
        """Freeze the last task; draw components and head rows, and remember these rows."""
        opened = super().open_task(ctx, state)
        h: FedCPromptHparams = ctx.hparams
        if h.contrast == 0 or ctx.task.index == 0:
            return opened
        c = len(ctx.task.classes)
        first = {f"{FIRST}.{name}": opened.tensors[name][-c:] for name in HEAD}
        return State({**opened.tensors, **first}, opened.meta)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return rows and components, task by task, and the current task's first rows."""
        parts = super().broadcast(ctx, state)
        if f"{FIRST}.{HEAD[0]}" not in state.tensors:
            return parts
        first = {name: state.tensors[f"{FIRST}.{name}"] for name in HEAD}
        return (*parts, Part(FIRST, Payload(first)))
