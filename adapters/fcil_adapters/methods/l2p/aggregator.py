"""L2P's server half: draw the pool once, average the clients' trained tensors (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.methods.l2p.options import NAMES, L2pHparams
from fcil_adapters.numerics.task_parts import current_task
from fcil_adapters.toolkit.prompts.parts import head_parts, pool_part
from fcil_adapters.toolkit.prompts.server import averaged, no_rows, start_of, with_new_rows

_POOL = 1  # purpose of the random stream


class Aggregator:
    """The state: ``prompt.pool`` (M, L, d), ``key.pool`` (M, d), the head (`prompts.server`)."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return no_rows(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the new head rows, at first the pool."""
        if ctx.task.index > 0:
            return with_new_rows(ctx, state)
        h: L2pHparams = ctx.hparams
        rng, d = ctx.rng(_POOL), ctx.backbone_info.dim
        drawn = {
            "prompt.pool": rng.uniform(-h.spread, h.spread, (h.pool_size, h.length, d)),
            "key.pool": rng.uniform(-h.spread, h.spread, (h.pool_size, d)),
        }
        return with_new_rows(ctx, state, ctx.forms.commit_named(drawn))

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the pool, keys and rows that clients train."""
        return start_of(ctx, state, NAMES)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average the clients' pools, keys and rows."""
        return averaged(ctx, state, updates, NAMES)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the head's rows task by task, and the pool."""
        del ctx
        if current_task(state) < 0:
            return ()
        return (*head_parts(state), pool_part(state, NAMES))
