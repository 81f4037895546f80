"""Fed-TaLoRA's formulas once more, in float64 and by loops, from the parts of a broadcast."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from adapters.kit import DIM

MODULES = ("q", "v", "fc1", "fc2")
MLP = 4 * DIM
SHAPES = {"q": (DIM, DIM), "v": (DIM, DIM), "fc1": (MLP, DIM), "fc2": (DIM, MLP)}


def f64(payload, name) -> np.ndarray:
    return payload.tensors[name].astype(np.float64)


def base_change(parts, place) -> np.ndarray:
    """W_cum: the dense base and all factors that the broadcast names."""
    W = np.zeros(SHAPES[place.split(".")[1]])
    for name, payload in parts.items():
        if name.startswith("base/"):
            W = W + f64(payload, place)
        elif name.startswith("residual/"):
            W = W + f64(payload, f"{place}.L") @ f64(payload, f"{place}.R")
    return W


def factors(payloads, place) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a place, wherever among the payloads they are."""
    found = [
        next(f64(p, n) for p in payloads if n in p.tensors)
        for n in (f"lora.{place}.A", f"lora.{place}.B")
    ]
    return found[0], found[1]


def effective_change(parts, place) -> np.ndarray:
    """W_cum + B A."""
    A, B = factors(list(parts.values()), place)
    return base_change(parts, place) + B @ A


def features(backbone, parts, images, blocks=(0, 1), modules=MODULES, scale=1.0) -> np.ndarray:
    """Features of a float64 copy of the transformer with everything merged: (N, d)."""
    module = copy.deepcopy(backbone.module).double()
    with torch.no_grad():
        for b in blocks:
            block = module.blocks[b]
            rows = {
                "q": block.attn.qkv.weight[:DIM],
                "v": block.attn.qkv.weight[2 * DIM :],
                "fc1": block.mlp.fc1.weight,
                "fc2": block.mlp.fc2.weight,
            }
            for m in modules:
                rows[m] += torch.tensor(scale * effective_change(parts, f"{b}.{m}"))
        x = (torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
        return module.forward_features(x)[:, 0].numpy()


def head(parts) -> tuple[np.ndarray, np.ndarray, list[int], list[bool]]:
    """All rows: finished tasks in order, then the current part's."""
    tasks = sorted((n for n in parts if n.startswith("task/")), key=lambda n: int(n[5:]))
    ordered = [parts[n] for n in tasks] + [parts["current"]]
    joined = [np.concatenate([p.tensors[n] for p in ordered])
              for n in ("head.weight", "head.bias", "classes", "seen")]  # fmt: skip
    W, b, classes, seen = joined
    return W.astype(np.float64), b.astype(np.float64), classes.tolist(), seen.astype(bool).tolist()


def cross_entropy(f, parts, labels, columns) -> float:
    """Mean cross-entropy over the given class ids, by loops."""
    W, bias, classes, _ = head(parts)
    rows = [classes.index(c) for c in columns]
    total = 0.0
    for x, label in zip(f, labels, strict=True):
        z = [float(W[i] @ x + bias[i]) for i in rows]
        top = max(z)
        total += top + math.log(sum(math.exp(v - top) for v in z)) - z[columns.index(int(label))]
    return total / len(labels)


def mean_effective_change(updates, weights, parts, place) -> np.ndarray:
    """What the exact average of all clients' weights adds: W_cum before + sum_k w_k B_k A_k."""
    W = base_change(parts, place)
    for w, update in zip(weights, updates, strict=True):
        A, B = factors([update.payload, *parts.values()], place)
        W = W + w * B @ A
    return W
