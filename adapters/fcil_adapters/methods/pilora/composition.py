"""Composition of the tasks' LoRAs in training and at inference (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.methods.pilora.parts import TaskPart, read_parts
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.lora.layer import NONE, Pairs, attach, read_pairs, sum_pairs
from fcil_adapters.toolkit.lora.low_rank import Change, Changes


def inference_view(backbone: Backbone, h: PiloraHparams, tasks: Sequence[TaskPart]) -> Any:
    """Return a view with the LoRAs of all tasks, including the last, merged (Eq. 6)."""
    view = backbone.view()
    for block in h.blocks:
        pairs = [read_pairs(task.lora, block, backbone.device) for task in tasks]
        attach(view, block, past=_composed(h, pairs), scale=h.scale)
    return view


def training_view(backbone: Backbone, h: PiloraHparams, tasks: Sequence[TaskPart]) -> Any:
    """Return a view in which the last task's LoRA is trainable (Eq. 4).

    With ``past_plus_current`` the features are those that inference will produce, except for
    ``task0_only``, where inference never uses what later tasks learn.
    """
    view = backbone.view()
    for block in h.blocks:
        *past, current = (read_pairs(task.lora, block, backbone.device) for task in tasks)
        frozen, offset = _background(h, past)
        attach(view, block, past=frozen, current=current, offset=offset, scale=h.scale)
    return view


def _composed(h: PiloraHparams, pairs: Sequence[Pairs]) -> Sequence[Pairs]:
    if h.compose == "sum_of_products":
        return pairs
    if h.compose == "product_of_sums":
        return [sum_pairs(pairs)]
    if h.compose == "task0_plus_current" and len(pairs) > 1:
        return [sum_pairs([pairs[0], pairs[-1]])]
    return pairs[:1]


def weight_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return the composition of all tasks' LoRAs (Eq. 6) for the export of an adapter."""
    h: PiloraHparams = ctx.hparams
    tasks = read_parts(broadcast)
    places: dict[str, Change] = {}
    for block in h.blocks:
        composed = _composed(h, [read_pairs(task.lora, block, "cpu") for task in tasks])
        for module in composed[0]:
            pairs = ((to_numpy(one[module].A), to_numpy(one[module].B)) for one in composed)
            places[f"{block}.{module}"] = Change(tuple(pairs))
    return Changes(h.scale, places)


def _background(h: PiloraHparams, past: Sequence[Pairs]) -> tuple[Sequence[Pairs], Pairs]:
    """Return the background of the current pair: frozen products, and offsets of A and B."""
    if h.train_with == "current_only" or not past:
        return (), NONE
    if h.compose == "sum_of_products":
        return past, NONE
    if h.compose == "product_of_sums":
        return (), sum_pairs(past)
    if h.compose == "task0_plus_current":
        return (), past[0]
    return past[:1], NONE
