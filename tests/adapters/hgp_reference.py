"""HGP's formulas once more, in float64 and by loops, and broadcasts made by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from adapters.kit import DIM, Images
from fcil_protocol.payloads.payload import Payload

M, L, BLOCKS = 3, 4, (0, 1)
SMALL = {"prompts": M, "length": L, "blocks": BLOCKS}


def hand_made(tasks, *, seed=0, unseen=(), pools=("0", "1"), scale=0.5) -> dict[str, Payload]:
    """A broadcast after the given tasks, with prompts that matter."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (scale * rng.normal(size=shape)).astype(np.float32)

    parts = {}
    for task in tasks:
        tensors = {}
        for pool in pools:
            tensors[f"key.{pool}"] = draw(M, DIM)
            tensors[f"prompt.{pool}"] = draw(M, L, DIM)
        parts[f"task/{task.index}"] = Payload(tensors, {"task": task.index})
    seen = tasks[-1].seen
    head = {
        "head.weight": draw(len(seen), DIM),
        "head.bias": draw(len(seen)),
        "classes": np.array(seen, dtype=np.int64),
        "seen": np.array([c not in unseen for c in seen], dtype=np.int64),
    }
    parts["current"] = Payload(head, {"task": tasks[-1].index})
    return parts


def in_order(parts: Mapping[str, Payload]) -> list[Payload]:
    return [parts[f"task/{t}"] for t in range(parts["current"].meta["task"] + 1)]


def normalised(images: Images, *, unit=False) -> torch.Tensor:
    pixels = torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255
    return pixels if unit else (pixels - 0.5) / 0.5


def frozen_features(backbone, images: Images, *, unit=False) -> np.ndarray:
    module = copy.deepcopy(backbone.module).double()
    with torch.no_grad():
        return module.forward_features(normalised(images, unit=unit))[:, 0].numpy()


def mixed(query, tensors: Sequence[Mapping[str, np.ndarray]], pool: str, score="cosine"):
    """P* of one image: the sum over all tasks' prompts, by a loop."""
    keys = [k for t in tensors for k in t[f"key.{pool}"].astype(np.float64)]
    prompts = [p for t in tensors for p in t[f"prompt.{pool}"].astype(np.float64)]
    weights = [float(query @ k / (np.linalg.norm(query) * np.linalg.norm(k))) for k in keys]
    if score == "softmax":
        total = sum(math.exp(w) for w in weights)
        weights = [math.exp(w) / total for w in weights]
    return sum(w * p for w, p in zip(weights, prompts, strict=True))


def prompted_feature(backbone, picture: torch.Tensor, prompts: Mapping[int, np.ndarray]):
    """One image through a float64 copy of the transformer, head by head, prefixes by hand."""
    module = copy.deepcopy(backbone.module).double()
    with torch.no_grad():
        x = module.norm_pre(module.patch_drop(module._pos_embed(module.patch_embed(picture[None]))))
        for b, block in enumerate(module.blocks):
            x = x + attention(block.attn, block.norm1(x)[0], prompts.get(b))[None]
            x = x + block.mlp(block.norm2(x))
        return module.norm(x)[0, 0].numpy()


def attention(attn, x: torch.Tensor, prompt) -> torch.Tensor:
    """softmax([P_K; K] q / sqrt(e)) [P_V; V] for tokens x (N, d)."""
    N, d = x.shape
    e = d // attn.num_heads
    projected = attn.qkv(x)  # (N, 3d)
    out = torch.zeros(N, d, dtype=torch.float64)
    for h in range(attn.num_heads):
        own = slice(h * e, (h + 1) * e)
        q, k, v = (projected[:, i * d : (i + 1) * d][:, own] for i in range(3))
        if prompt is not None:
            half = len(prompt) // 2
            k = torch.cat([torch.tensor(prompt[:half, own]), k])
            v = torch.cat([torch.tensor(prompt[half:, own]), v])
        out[:, own] = torch.softmax(q @ k.T / math.sqrt(e), 1) @ v
    return attn.proj(out)


def prompted_features(backbone, parts, images, *, score="cosine", shared=False, unit=False):
    """The features (N, d) that inference sees, prompted as the plain images ask for."""
    tensors = [p.tensors for p in in_order(parts)]
    q = frozen_features(backbone, images, unit=unit)
    rows = []
    for i, picture in enumerate(normalised(images, unit=unit)):
        prompts = {b: mixed(q[i], tensors, "shared" if shared else str(b), score) for b in BLOCKS}
        rows.append(prompted_feature(backbone, picture, prompts))
    return np.stack(rows)


def logits(features, weight, bias):
    return features @ weight.astype(np.float64).T + bias.astype(np.float64)


def cross_entropy(scores, target) -> float:
    shifted = scores - scores.max(1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    return float(-np.log(probabilities[np.arange(len(target)), target]).mean())
