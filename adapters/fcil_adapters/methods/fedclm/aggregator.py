"""FedCLM's server half: average, and merge the class means at the end of a task (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Array, Context, Part, State, Updates
from fcil_adapters.toolkit.lora.class_means import means_parts
from fcil_adapters.toolkit.lora.nearest_mean import merge_reports
from fcil_adapters.toolkit.lora.server import (
    average_round,
    first_state,
    open_task,
    parts_of,
    start_of,
)


class Aggregator:
    """The state of `lora.server`, with ``means.<t>...`` of every finished task."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        del ctx
        return first_state()

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the task's head rows, and at first the LoRA."""
        return open_task(ctx, state)

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the LoRA and rows that clients train."""
        return start_of(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average with the clients' weights, or merge the means over all their images."""
        if ctx.kind == "finish":
            return merge_reports(ctx, state, updates)
        return average_round(ctx, state, updates)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return LoRA and the current rows, and the means of every finished task."""
        return (*parts_of(ctx, state), *means_parts(state))
