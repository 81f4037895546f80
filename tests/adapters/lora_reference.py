"""LoRA and a linear head once more, in float64: features, losses and their gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch.func import functional_call

from adapters.kit import DIM

LAYERS = {"q": ("attn.qkv", 0), "v": ("attn.qkv", 2), "fc1": ("mlp.fc1", 0), "fc2": ("mlp.fc2", 0)}


def parameters(parts) -> dict[str, torch.Tensor]:
    """All LoRA tensors and the current head rows of a broadcast, to be differentiated."""
    found = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True)
        for part in ("fixed", "current")
        if part in parts
        for name, array in parts[part].tensors.items()
        if name.startswith(("lora.", "head."))
    }
    return dict(sorted(found.items()))


def features(backbone, values, images, scale=1.0) -> torch.Tensor:
    """Features (N, d) of the transformer whose weights have all products added."""
    weights = {n: p.detach().double() for n, p in backbone.module.state_dict().items()}
    for name in [n for n in values if n.startswith("lora.") and n.endswith(".B")]:
        _, block, module, _ = name.split(".")
        layer, third = LAYERS[module]
        key = f"blocks.{block}.{layer}.weight"
        product = scale * values[name] @ values[f"{name[:-1]}A"]
        padded = torch.zeros_like(weights[key])
        first = third * DIM
        rows = torch.arange(first, first + len(product))
        weights[key] = weights[key] + padded.index_copy(0, rows, product)
    x = (torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    module = backbone.module
    tokens = functional_call(_Features(module), {f"inner.{n}": w for n, w in weights.items()}, x)
    return tokens[:, 0]


class _Features(torch.nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner.forward_features(x)


def cross_entropy(backbone, values, images, classes) -> torch.Tensor:
    """Mean cross-entropy over the rows of ``classes``, written out."""
    f = features(backbone, values, images)
    z = f @ values["head.weight"].T + values["head.bias"]  # (N, c)
    own = torch.tensor([list(classes).index(int(c)) for c in images.labels])
    log_sum = torch.log(torch.exp(z - z.max()).sum(1)) + z.max()
    return (log_sum - z[torch.arange(len(own)), own]).mean()


def plain(payloads, name) -> np.ndarray:
    return np.stack([p.tensors[name].astype(np.float64) for p in payloads])
