"""HePCo's server alone: when do generated latents repair averaged heads?

Clients train linear heads on frozen features of the embedded backbone; no prompts, so that a
row takes seconds. The server is HePCo's own aggregator, without its prompt pools. Features are
taken as they are, and with their common mean removed: digits all look alike to a backbone that
was trained on photographs, and latents that only one of the two generators makes along the
common direction move all old classes or all new ones at once.

    export OMP_NUM_THREADS=1
    python scripts/bench/hepco_heads.py --data cifar100.zip --owned 1 --seeds 1
    python scripts/bench/hepco_heads.py --seeds 1            # digits
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_data import Data, cifar100, digits, quantity
from numpy.typing import NDArray
from simulation import Images
from torch.nn import functional

from fcil_adapters.backbone import Backbone, load_backbone
from fcil_adapters.contract import Context, Update
from fcil_adapters.methods.hepco import METHOD
from fcil_adapters.methods.hepco.aggregator import Aggregator
from fcil_adapters.prompts import query_features
from fcil_adapters.registry import make_hparams
from fcil_adapters.update_list import UpdateList
from fcil_protocol.ids import ClientId
from fcil_protocol.payload import Payload

F32 = NDArray[np.float32]

ROUNDS, EPOCHS, BATCH, RATE = 2, 3, 16, 1e-2
SERVER = {"blocks": [0], "pool_size": 1, "prompt_length": 2, "hidden": (64, 256)}
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain averages", {"distill": "none"}),
    ("distillation", {"distill": "head"}),
    ("no previous server", {"distill": "head", "replay_ratio": 0.0}),
    ("twice as many old latents as new", {"distill": "head", "replay_ratio": 2.0}),
    ("no disagreement", {"distill": "head", "lambda_kl": 0.0}),
)


@dataclass(frozen=True)
class Features:
    """Frozen features (N, d) and class ids (N,) of some images."""

    x: F32
    y: NDArray[np.int64]

    @classmethod
    def of(cls, backbone: Backbone, images: Images, shift: F32 | float) -> Features:
        return cls(query_features(backbone, images.pictures, 200).numpy() - shift, images.labels)

    def own(self, classes: Sequence[int]) -> Features:
        chosen = np.isin(self.y, classes)
        return Features(self.x[chosen], self.y[chosen])


def train(start: tuple[F32, F32], data: Features, first: int) -> tuple[F32, F32]:
    """Train head rows on one client's features by cross-entropy over the task's classes."""
    weight, bias = (torch.tensor(a, requires_grad=True) for a in start)
    x, y = torch.tensor(data.x), torch.tensor(data.y - first)
    optimiser = torch.optim.Adam([weight, bias], lr=RATE)
    order = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for index in torch.split(torch.randperm(len(y), generator=order), BATCH):
            optimiser.zero_grad()
            functional.cross_entropy(functional.linear(x[index], weight, bias), y[index]).backward()
            optimiser.step()
    return weight.detach().numpy(), bias.detach().numpy()


def run(
    options: dict[str, Any], data: Data, clients: list[Features], test: Features, ctx: Context
) -> tuple[float, list[float]]:
    """Return the final accuracy, the mean over tasks, and that of each task (percent)."""
    aggregator = Aggregator()
    base = replace(ctx, hparams=make_hparams(METHOD, {**SERVER, **options}))
    state = aggregator.init(base)
    for task in data.tasks:
        c, first = len(task.classes), task.classes[0]
        state = aggregator.open_task(replace(base, task=task), state)
        for r in range(ROUNDS):
            start = state.f32("head.weight")[-c:], state.f32("head.bias")[-c:]
            sent = []
            for k, client in enumerate(clients):
                own = client.own(task.classes)
                weight, bias = train(start, own, first)
                counts = np.bincount(own.y - first, minlength=c)
                tensors = {n: state.tensors[n] for n in ("prompt.0", "key.0")}
                tensors |= {"head.weight": weight, "head.bias": bias}
                tensors |= {"classes": np.array(task.classes), "count": counts}
                tensors["n"] = counts.sum().reshape(1)
                sent.append(Update(ClientId(f"{'abcdefghij'[k]}" * 26), Payload(tensors)))
            now = replace(base, task=task, round=r)
            state = aggregator.aggregate(now, state, UpdateList.of(sent))
    scores = test.x @ state.f32("head.weight").T + state.f32("head.bias")
    right = scores.argmax(1) == test.y
    per_task = [100 * float(right[np.isin(test.y, task.classes)].mean()) for task in data.tasks]
    return float(np.mean(per_task)), per_task


def main() -> None:
    """Measure and print one line per row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="a zip of CIFAR-100; digits without it")
    parser.add_argument("--owned", type=int, default=1, help="classes of a task per client")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone()
    p = backbone.info.preprocessing
    for seed in args.seeds:
        if args.data:
            data = cifar100(p, args.data, seed, 60, 30, (5, 4))
        else:
            data = digits(p, seed, 60, 30, (5, 2))
        parts = quantity(args.owned)(data.train, data.tasks, args.clients, seed)
        mean = query_features(backbone, data.train.pictures, 200).numpy().mean(0)
        ctx = Context("train", data.tasks[0], 0, ROUNDS, None, backbone.info, seed=(seed,))
        for title, shift in (("as they are", 0.0), ("centred", mean)):
            clients = [Features.of(backbone, part, shift) for part in parts]
            test = Features.of(backbone, data.test, shift)
            for name, options in ROWS:
                final, tasks = run(options, data, clients, test, ctx)
                listed = " ".join(f"{a:.0f}" for a in tasks)
                print(f"seed {seed}  {title:12s} {name:34s} {final:5.1f}  ({listed})", flush=True)


if __name__ == "__main__":
    main()
