"""PILoRA's formulas once more, in float64 and by loops, and broadcasts made by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from adapters.kit import DIM, Images, now
from fcil_protocol.payloads.payload import Payload

RANK = 2


def hand_made_part(
    task: int, classes: Sequence[int], *, seed: int, blocks=(0,), unseen=()
) -> Payload:
    """A task's part with LoRAs that do something (B is not zero)."""
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=0.3):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    tensors = {}
    for b in blocks:
        for p in ("q", "v"):
            tensors[f"lora.{b}.{p}.A"] = draw(RANK, DIM)
            tensors[f"lora.{b}.{p}.B"] = draw(DIM, RANK)
    tensors["proto"] = draw(len(classes), DIM, scale=1.0)
    tensors["classes"] = np.array(classes, dtype=np.int64)
    tensors["seen"] = np.array([c not in unseen for c in classes], dtype=np.int64)
    return Payload(tensors, {"task": task})


def hand_made(made: Sequence[Payload], future=0) -> dict[str, Payload]:
    """All parts of a broadcast with these tasks and so many rows of classes still to come."""
    rows = 0.1 * np.random.default_rng(9).normal(size=(future, DIM))
    tensors = {"future": rows.astype(np.float32)} if future else {}
    current = {"current": Payload(tensors, {"task": len(made) - 1})}
    return current | {f"task/{t}": part for t, part in enumerate(made)}


def in_order(parts: Mapping[str, Payload]) -> list[Payload]:
    """The tasks; the last one with all that belongs to the task being learned."""
    *past, last = (parts[f"task/{t}"] for t in range(parts["current"].meta["task"] + 1))
    return [*past, Payload(now(parts), last.meta)]


def effective_delta(compose: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """What all tasks' (A, B) add to W at inference: (d, d)."""
    A = [a.astype(np.float64) for a, _ in pairs]
    B = [b.astype(np.float64) for _, b in pairs]
    if compose == "sum_of_products":
        return sum(b @ a for a, b in zip(A, B, strict=True))
    if compose == "product_of_sums":
        return sum(B) @ sum(A)
    if compose == "task0_plus_current" and len(pairs) > 1:
        return (B[0] + B[-1]) @ (A[0] + A[-1])
    return B[0] @ A[0]


def features(backbone, deltas, images: Images) -> torch.Tensor:
    """Features by a float64 copy of the transformer with the deltas added to its weights.

    deltas: (block, projection) -> (d, d).
    """
    module = copy.deepcopy(backbone.module).double()
    for (block, projection), delta in deltas.items():
        first = {"q": 0, "v": 2 * DIM}[projection]
        weight = module.blocks[block].attn.qkv.weight
        with torch.no_grad():
            weight[first : first + DIM] += torch.tensor(delta)
    x = (torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        return module.forward_features(x)[:, 0]


def task_pairs(parts: Sequence[Payload], block: int, projection: str):
    name = f"lora.{block}.{projection}"
    return [(p.tensors[f"{name}.A"], p.tensors[f"{name}.B"]) for p in parts]


def inference_features(
    backbone, parts, images, *, compose="sum_of_products", blocks=(0,), scale=1.0
):
    deltas = {
        (b, p): scale * effective_delta(compose, task_pairs(parts, b, p))
        for b in blocks
        for p in ("q", "v")
    }
    return features(backbone, deltas, images)


def objective(
    f, parts, labels, *, dce="rms", delta=1.0, lambda_pl=0.001, gamma_ort=0.5, l1=0.0, blocks=(0,)
):
    """Equation 15 over one batch, by loops over images and prototypes."""
    *past, current = parts
    columns = list(current.tensors["proto"])
    for part in past:
        columns += [
            m for m, seen in zip(part.tensors["proto"], part.tensors["seen"], strict=True) if seen
        ]
    columns += list(current.tensors.get("future", []))
    own = {int(c): i for i, c in enumerate(current.tensors["classes"])}
    total = 0.0
    for x, label in zip(f.numpy(), labels, strict=True):
        D = []
        for m in columns:
            sq = float(((x - m.astype(np.float64)) ** 2).sum())
            D.append({"rms": math.sqrt(sq / DIM), "sq": sq, "sq_over_d": sq / DIM}[dce])
        y = own[int(label)]
        total += -math.log(math.exp(-delta * D[y]) / sum(math.exp(-delta * v) for v in D))
        total += lambda_pl * D[y]
    total /= len(labels)
    for b in blocks:
        for p in ("q", "v"):
            A = current.tensors[f"lora.{b}.{p}.A"].astype(np.float64)
            for part in past:
                product = part.tensors[f"lora.{b}.{p}.A"].astype(np.float64) @ A.T
                total += gamma_ort * float(np.abs(product).sum())
            total += l1 * float(np.abs(A).sum())
    return total
