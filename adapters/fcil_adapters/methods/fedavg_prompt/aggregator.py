"""FedAvg-Prompt's server half: HePCo's provisional server, and nothing after it (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.prompts.initial import draw_uniform_pools
from fcil_adapters.toolkit.prompts.parts import head_parts, pool_names, pool_part
from fcil_adapters.toolkit.prompts.server import averaged, no_rows, with_new_rows

_POOLS = 1  # purpose of the random stream


class Aggregator:
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

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' pools and rows."""
        return averaged(ctx, state, updates, pool_names(ctx.hparams.blocks))

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the head's rows task by task, and the pools."""
        if current_task(state) < 0:
            return ()
        return (*head_parts(state), pool_part(state, pool_names(ctx.hparams.blocks)))
