"""The server's half: averages, and the last task's model as a teacher (torch)."""

from __future__ import annotations

from fcil_adapters.toolkit.lora.aggregator import LoraAggregator


class Aggregator(LoraAggregator):
    """The shared LoRA aggregator, unchanged: it keeps the teacher."""
