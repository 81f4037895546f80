"""HePCo's formulas once more, in float64 and by loops; and a small federation to try them on."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from adapters.kit import DIM, Federation, Images, client_id, make_tasks, toy_images
from fcil_adapters.contract import Update
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.payloads.payload import Array

SMALL = {
    "blocks": [0, 1], "pool_size": 3, "prompt_length": 4, "epochs": 1, "batch_size": 4,
    "lr": 1e-2, "noise": 4, "hidden": [8, 8], "generator_steps": 4, "distillation_steps": 3,
    "server_batch_size": 8, "augment": "none", "pixels": "normalised",
}  # fmt: skip

TASKS = make_tasks([0, 1, 2], [5, 4])
CLIENTS = [
    toy_images({0: 6, 1: 2, 5: 3}, 1),
    toy_images({0: 1, 5: 3, 4: 1}, 2),
    toy_images({1: 4, 4: 2}, 3),
]
POOLS = ("prompt.0", "key.0", "prompt.1", "key.1")


def federation(clients=CLIENTS, task=TASKS[0], **kw) -> Federation:
    fed = Federation.of("hepco", clients, **{**SMALL, **kw})
    fed.open(task)
    return fed


def uploads(fed: Federation) -> UpdateList:
    return UpdateList.of(
        [Update(client_id(k), fed.upload("train", k)) for k in range(len(fed.clients))]
    )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def mixed_prompt(q: np.ndarray, model: Mapping[str, Array], block: int) -> np.ndarray:
    """sum_m cos(q, K_m) P_m: (L, d)."""
    keys, pool = model[f"key.{block}"], model[f"prompt.{block}"].astype(np.float64)
    return sum(cosine(q, k) * p for k, p in zip(keys, pool, strict=True))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL of two rows of log-probabilities."""
    return float((np.exp(p) * (p - q)).sum())


def features(backbone, images: Images, model: Mapping[str, Array], blocks, unit=False):
    """Queries by a float64 copy of the transformer, then its attention written out with prompts."""
    module = copy.deepcopy(backbone.module).double()
    x = torch.tensor(images.pictures).double().permute(0, 3, 1, 2) / 255
    x = x if unit else (x - 0.5) / 0.5
    with torch.no_grad():
        queries = module.forward_features(x)[:, 0]
        for block in blocks:
            prompts = [mixed_prompt(q, model, block) for q in queries.numpy()]
            attention = module.blocks[block].attn
            attention.forward = _prompted(attention, torch.tensor(np.stack(prompts)))
        return queries.numpy(), module.forward_features(x)[:, 0].numpy()


def _prompted(a, prompt: torch.Tensor):
    def forward(x, **_):
        out = torch.zeros_like(x)
        width = DIM // a.num_heads
        half = prompt.shape[1] // 2
        for b, tokens in enumerate(x):
            q, k, v = (tokens @ a.qkv.weight.T + a.qkv.bias).split(DIM, dim=1)
            k, v = torch.cat([prompt[b, :half], k]), torch.cat([prompt[b, half:], v])
            heads = []
            for h in range(a.num_heads):
                s = slice(h * width, (h + 1) * width)
                heads.append((q[:, s] @ k[:, s].T / math.sqrt(width)).softmax(1) @ v[:, s])
            out[b] = torch.cat(heads, 1) @ a.proj.weight.T + a.proj.bias
        return out

    return forward


def client_loss(f, weight, bias, labels, classes: Sequence[int]) -> float:
    """Mean cross-entropy over the current task's classes alone."""
    total = 0.0
    for x, label in zip(f, labels, strict=True):
        row = log_softmax(weight.astype(np.float64) @ x + bias)
        total -= row[list(classes).index(int(label))]
    return total / len(labels)


def generator_loss(z, labels, shares, heads, server, pools, blocks, options) -> float:
    """Equation 5 over a batch: heads and pools are (teachers, server) as plain mappings."""
    total = 0.0
    for b, y in enumerate(labels):
        ours = log_softmax(server["head.weight"].astype(np.float64) @ z[b] + server["head.bias"])
        for k, head in enumerate(heads):
            theirs = log_softmax(head["head.weight"].astype(np.float64) @ z[b] + head["head.bias"])
            total -= shares[k][y] * theirs[y]
            pair = (theirs, ours) if options["kl"] == "teacher_student" else (ours, theirs)
            total -= options["lambda_kl"] * shares[k][y] * kl(*pair)
            if options["detach_query"]:
                continue
            for l in blocks:  # noqa: E741
                gap = mixed_prompt(z[b], server, l) - mixed_prompt(z[b], pools[k], l)
                total -= options["lambda_mse"] * shares[k][y] * np.square(gap).mean()
    return float(total)


def prompt_gap(server, models, z, shares, block) -> float:
    """Equation 6 in one block: sum_b sum_k a_{k,b} ||p_s - p_k||_F^2."""
    return sum(
        shares[b][k] * np.square(mixed_prompt(q, server, block) - mixed_prompt(q, m, block)).sum()
        for b, q in enumerate(z)
        for k, m in enumerate(models)
    )
