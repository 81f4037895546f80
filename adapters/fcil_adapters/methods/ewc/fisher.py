"""The diagonal Fisher information of LoRA, one image at a time, in one pass for many (torch).

A transformer's forward pass keeps images separate, so the gradient of a sum of log-likelihoods with
respect to a layer's output holds each image's own. It gives, with the layer's input, the gradients
of the image with respect to B and A: for ``y = W x + s B A x`` and ``g = d log p / dy`` over tokens
t, ``dB = s sum_t g_t (A x_t)^T`` and ``dA = s sum_t (B^T g_t) x_t^T``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fcil_adapters.toolkit.lora.client import LoraSetup
from fcil_adapters.toolkit.lora.layer import LoRALinear
from fcil_adapters.toolkit.lora.tensors import PLACES


def squared_gradients(bench: LoraSetup, pixels: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Return ``sum_x p(y|x) (d log p(y|x))^2`` for every trained LoRA tensor of a bench.

    Args:
        bench: of an unchanged broadcast; the task's classes are its columns.
        pixels: images (b, S, S, 3).
        rows: each one's own column, (b,).
    """
    with torch.enable_grad(), _watched(bench) as passed:
        logits = bench.logits(bench.features(pixels))  # (b, columns)
        own = functional.log_softmax(logits, 1)[torch.arange(len(rows)), rows]  # (b,)
        grads = torch.autograd.grad(own.sum(), [y for *_, y in passed])
    weight = own.detach().exp()  # p(y|x), (b,)
    found: dict[str, Tensor] = {}
    for (block, layer, x, _), grad in zip(passed, grads, strict=True):
        for name, each in _per_image(layer, x, grad):
            scaled = each.square() * weight[:, None, None]
            found[f"{block}.{name}"] = scaled.sum(0, dtype=torch.float64)
    assert set(found) == set(bench.lora), "each trained tensor has its importance"
    return found


@contextmanager
def _watched(bench: LoraSetup) -> Iterator[list[tuple[int, LoRALinear, Tensor, Tensor]]]:
    """Record inputs and outputs of the adapted layers of each block."""
    passed: list[tuple[int, LoRALinear, Tensor, Tensor]] = []
    hooks = []
    for block in bench.h.blocks:
        for place in PLACES:
            layer = getattr(getattr(bench.view.blocks[block], place.owner), place.name)
            if isinstance(layer, LoRALinear):

                def note(owner: Any, given: Any, y: Tensor, block: int = block) -> None:
                    passed.append((block, owner, given[0].detach(), y))

                hooks.append(layer.register_forward_hook(note))
    try:
        yield passed
    finally:
        for hook in hooks:
            hook.remove()


def _per_image(layer: LoRALinear, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of each image: (b, out, r) and (b, r, in)."""
    trained = layer.trained()
    thirds = dict(zip(layer.slices, grad.chunk(len(layer.slices), dim=-1), strict=True))
    for module in layer.pairs:
        pair: Any = layer.pairs[module]
        g = layer.scale * thirds[module]  # (b, T, out)
        if f"{module}.B" in trained:
            low = functional.linear(x, pair["A"].detach())  # (b, T, r)
            yield f"{module}.B", torch.einsum("bto,btr->bor", g, low)
        if f"{module}.A" in trained:
            back = g @ pair["B"].detach()  # (b, T, r)
            yield f"{module}.A", torch.einsum("btr,bti->bri", back, x)
