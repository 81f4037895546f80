"""FFA-LoRA's server half: average B and the head's rows; the A's stay (torch)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.aggregator import LoraAggregator


class Aggregator(LoraAggregator):
    """The shared LoRA aggregator, unchanged."""
