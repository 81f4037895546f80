"""FedAvg-LoRA's server half: average A, B and the head's rows, each by itself (torch)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.aggregator import LoraAggregator


class Aggregator(LoraAggregator):
    """The shared LoRA aggregator, unchanged."""
