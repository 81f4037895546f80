"""The server's half of methods that differ in their losses alone (torch; `lora.manifest`)."""

from __future__ import annotations

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.toolkit.lora.server import average_round, first_state, open_task, parts_of


class LoraAggregator:
    """Aggregator with the shared state of LoRA methods (`lora.server`)."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        del ctx
        return first_state()

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the task's head rows, and at first the LoRA."""
        return open_task(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average LoRA and the head's rows with the clients' weights."""
        return average_round(ctx, state, updates)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the shared parts."""
        return parts_of(ctx, state)
