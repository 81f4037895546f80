"""PLoRA's formulas once more, in float64 and by loops, and broadcasts made by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from adapters.kit import DIM
from fcil_protocol.payloads.payload import Payload

RANK = 2
BLOCKS = (0,)


def draw_lora(seed: int, blocks=BLOCKS) -> dict[str, np.ndarray]:
    """A LoRA that does something (B is not zero)."""
    rng = np.random.default_rng(seed)
    shapes = {"A": (RANK, DIM), "B": (DIM, RANK)}
    return {
        f"lora.{b}.{p}.{m}": (0.3 * rng.normal(size=shapes[m])).astype(np.float32)
        for b in blocks
        for p in ("q", "v")
        for m in ("A", "B")
    }


def draw_rows(seed: int, classes, unseen=()) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + seed)
    return {
        "proto": rng.normal(size=(len(classes), DIM)).astype(np.float32),
        "classes": np.array(classes, dtype=np.int64),
        "seen": np.array([c not in unseen for c in classes], dtype=np.int64),
    }


def hand_made(tasks, *, blocks=BLOCKS, unseen=()) -> dict[str, Payload]:
    """All parts at the last of the tasks."""
    last = tasks[-1].index
    parts = {f"task/{t.index}": Payload(draw_rows(t.index, t.classes, unseen), {"task": t.index})
             for t in tasks}  # fmt: skip
    parts["current"] = Payload({}, {"task": last})
    parts[f"lora/{last}"] = Payload(draw_lora(7, blocks))
    if last:
        parts[f"lora/{last - 1}"] = Payload(draw_lora(8, blocks))
    return parts


def module_with(backbone, lora, *, blocks=BLOCKS, scale=1.0):
    """A float64 copy of the transformer with the products added to its weights."""
    module = copy.deepcopy(backbone.module).double()
    for b in blocks:
        for p, first in (("q", 0), ("v", 2 * DIM)):
            A, B = (lora[f"lora.{b}.{p}.{m}"].astype(np.float64) for m in "AB")
            with torch.no_grad():
                module.blocks[b].attn.qkv.weight[first : first + DIM] += torch.tensor(scale * B @ A)
    return module


def features_and_tap(backbone, lora, images, *, blocks=BLOCKS, scale=1.0):
    """The feature, and the class token after the last adapted block: (N, d) each."""
    module = module_with(backbone, lora, blocks=blocks, scale=scale)
    x = (torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        tokens = module._pos_embed(module.patch_embed(x))
        tapped = None
        for i, block in enumerate(module.blocks):
            tokens = block(tokens)
            if i == max(blocks):
                tapped = tokens[:, 0]
        return module.norm(tokens)[:, 0].numpy(), tapped.numpy()


def objective(backbone, parts, images, *, dce="rms", delta=1.0, lambda_pl=0.001, gamma=5.0,
              reduction="sum_d", blocks=BLOCKS, scale=1.0):  # fmt: skip
    """l_dce + lambda l_pl + gamma l_kd over one batch, by loops."""
    last = parts["current"].meta["task"]
    current, lora = parts[f"task/{last}"].tensors, parts[f"lora/{last}"].tensors
    f, tapped = features_and_tap(backbone, lora, images, blocks=blocks, scale=scale)
    teacher = parts.get(f"lora/{last - 1}")
    columns = list(current["proto"])
    for name in (f"task/{t}" for t in range(last)):
        rows = parts[name].tensors
        columns += [m for m, seen in zip(rows["proto"], rows["seen"], strict=True) if seen]
    own = {int(c): i for i, c in enumerate(current["classes"])}
    total = 0.0
    for x, label in zip(f, images.labels, strict=True):
        D = []
        for m in columns:
            sq = float(((x - m.astype(np.float64)) ** 2).sum())
            D.append({"rms": math.sqrt(sq / DIM), "sq": sq, "sq_over_d": sq / DIM}[dce])
        y = own[int(label)]
        low = min(D)
        total += delta * (D[y] - low)
        total += math.log(sum(math.exp(-delta * (v - low)) for v in D)) + lambda_pl * D[y]
    if teacher is not None:
        _, target = features_and_tap(backbone, teacher.tensors, images, blocks=blocks, scale=scale)
        squares = ((tapped - target) ** 2).sum(1)
        total += gamma * float(squares.sum()) / (DIM if reduction == "mean_d" else 1)
    return total / len(images)
