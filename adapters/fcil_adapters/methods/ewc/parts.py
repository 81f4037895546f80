"""Names of EWC's tensors and of its part (torch-free)."""

from __future__ import annotations

IMPORTANCE = "importance"  # the part with F of all finished tasks
LARGEST = 1e4  # of F, sent or summed over tasks; larger values hold no more firmly


def fisher_name(lora: str) -> str:
    """Return the name of the Fisher information of ``lora.<place>.<A|B>``."""
    return f"fisher.{lora.removeprefix('lora.')}"
