"""Which LoRAs of which tasks act in training and at inference (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_torch
from fcil_adapters.lora import PROJECTIONS, LoraPair, Pairs, attach_qv, sum_pairs
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.methods.pilora.parts import TaskPart


def inference_view(backbone: Backbone, h: PiloraHparams, tasks: Sequence[TaskPart]) -> Any:
    """Return a view in which the LoRAs of all tasks (the last one included) act, merged."""
    view = backbone.view()
    for block in h.blocks:
        pairs = [task_pairs(task, block, backbone.device) for task in tasks]
        attach_qv(view, block, past=_composed(h, pairs), scale=h.scale)
    return view


def training_view(backbone: Backbone, h: PiloraHparams, tasks: Sequence[TaskPart]) -> Any:
    """Return a view in which the last task's LoRA is trainable.

    With ``past_plus_current`` the features are those that inference will produce, except
    for ``task0_only``, where inference never uses what later tasks learn.
    """
    view = backbone.view()
    for block in h.blocks:
        *past, current = (task_pairs(task, block, backbone.device) for task in tasks)
        frozen, offset = _background(h, past)
        attach_qv(view, block, past=frozen, current=current, offset=offset, scale=h.scale)
    return view


def task_pairs(task: TaskPart, block: int, device: str) -> dict[str, LoraPair]:
    """Return one task's q and v pairs in a block."""
    return {
        p: LoraPair(
            to_torch(task.lora[f"lora.{block}.{p}.A"], device),
            to_torch(task.lora[f"lora.{block}.{p}.B"], device),
        )
        for p in PROJECTIONS
    }


def _composed(h: PiloraHparams, pairs: Sequence[Pairs]) -> Sequence[Pairs]:
    if h.compose == "sum_of_products":
        return pairs
    if h.compose == "product_of_sums":
        return [sum_pairs(pairs)]
    if h.compose == "task0_plus_current" and len(pairs) > 1:
        return [sum_pairs([pairs[0], pairs[-1]])]
    return pairs[:1]


def _background(h: PiloraHparams, past: Sequence[Pairs]) -> tuple[Sequence[Pairs], Pairs | None]:
    """Return what acts beside the current pair: frozen products, and offsets of A and B."""
    if h.train_with == "current_only" or not past:
        return (), None
    if h.compose == "sum_of_products":
        return past, None
    if h.compose == "product_of_sums":
        return (), sum_pairs(past)
    if h.compose == "task0_plus_current":
        return (), past[0]
    return past[:1], None
