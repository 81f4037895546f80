"""FedCLM's server half: average, and merge the class means at the end of a task (torch)."""

from __future__ import annotations

from fcil_adapters.contract import Context, Part, State, Updates
from fcil_adapters.toolkit.lora.class_means import means_parts
from fcil_adapters.toolkit.lora.halves import LoraAggregator
from fcil_adapters.toolkit.lora.nearest_mean import merge_reports


class Aggregator(LoraAggregator):
    """The state of `lora.server`, with ``means.<t>...`` of every finished task."""

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average with the clients' weights, or merge the means over all their images."""
        if ctx.kind == "finish":
            return merge_reports(ctx, state, updates)
        return super().aggregate(ctx, state, updates)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return LoRA and the current rows, and the means of every finished task."""
        return (*super().broadcast(ctx, state), *means_parts(state))
