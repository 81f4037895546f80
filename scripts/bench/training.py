"""Images per second in local training, beside the bare timm model with the same trainables.

For each method, in one process and by turns: ``Learner.run`` of the ``train`` exchange on images
in memory, and a bare loop: forward and backward of the timm model with a plain LoRA or plain
prefixes in the same places and of the same sizes, on the same number of images, with nothing
else (no loading, no augmentation, no loss but a sum, no optimiser).

``step`` compares a step of the learner, from one progress report to the next, with a bare step;
the goal is 0.9 of its speed. ``round`` counts all that a round does, with passes for statistics.

    .venv/bin/python scripts/bench/training.py
    .venv/bin/python scripts/bench/training.py --backbone vit_base_patch16_224 --images 8 --batch 4
    .venv/bin/python scripts/bench/training.py --device cuda --precision amp
    .venv/bin/python scripts/bench/training.py --rounds           # first and later rounds
    .venv/bin/python scripts/bench/training.py --profile hgp      # where a round's time goes
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from simulation import Images, make_tasks
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, load_backbone, precision_of, wrap_backbone
from fcil_adapters.contract import Context, Progress, State
from fcil_adapters.contract.registry import load_half, load_method, make_hparams
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.loop import context_fields
from fcil_protocol.payloads.payload import Payload, pack, unpack

METHODS = ("pilora", "plora", "fed_talora", "hgp", "hepco")
MODEL_OF_32 = "embedded"
CLASSES = 4

# --- bare timm ------------------------------------------------------------------------------


class BareLora(nn.Module):
    """A frozen Linear and one plain LoRA per adapted slice of its output."""

    def __init__(self, linear: nn.Linear, slices: int, adapted: tuple[int, ...], rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.width = linear.out_features // slices
        self.adapted = adapted
        device = linear.weight.device
        sizes = ((rank, linear.in_features), (self.width, rank))
        self.A, self.B = (
            nn.ParameterList(0.01 * torch.randn(s, device=device) for _ in adapted) for s in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        for A, B, i in zip(self.A, self.B, self.adapted, strict=True):
            delta = functional.linear(functional.linear(x, A), B)
            if len(self.adapted) == 1 and y.shape[-1] == self.width:
                y = y + delta
            else:
                y[..., i * self.width : (i + 1) * self.width] += delta
        return y


class BarePrefix(nn.Module):
    """timm's attention with trainable rows before its keys and values."""

    def __init__(self, attention: Any, length: int) -> None:
        super().__init__()
        self.a = attention
        d = attention.qkv.in_features
        self.prefix = nn.Parameter(torch.randn(length, d, device=attention.qkv.weight.device))

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        B, N, d = x.shape
        H, L = self.a.num_heads, len(self.prefix) // 2
        q, k, v = self.a.qkv(x).reshape(B, N, 3, H, d // H).permute(2, 0, 3, 1, 4)
        more = self.prefix.view(2, 1, L, H, d // H).expand(2, B, L, H, d // H).transpose(2, 3)
        k, v = torch.cat([more[0], k], 2), torch.cat([more[1], v], 2)
        y = functional.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.a.proj(y.transpose(1, 2).reshape(B, N, d))
        return projected


def bare_model(h: Any, backbone: Backbone) -> Any:
    """Return the timm model with the trainables of a method, by plain means."""
    view = backbone.view()
    for b in h.blocks:
        block = view.blocks[b]
        if not hasattr(h, "rank"):
            length = getattr(h, "prompt_length", None) or h.length
            block.attn = BarePrefix(block.attn, length)
            continue
        modules = getattr(h, "modules", ("q", "v"))
        if "q" in modules:
            block.attn.qkv = BareLora(block.attn.qkv, 3, (0, 2), h.rank)
        for name in ("fc1", "fc2"):
            if name in modules:
                setattr(block.mlp, name, BareLora(getattr(block.mlp, name), 1, (0,), h.rank))
    return view


# --- the learner ----------------------------------------------------------------------------


@dataclass
class Steps:
    """When the steps of a learner ended."""

    device: str
    times: list[float] = field(default_factory=list)

    def __call__(self, _: Progress) -> None:
        self.times.append(clock(self.device))

    def seconds(self, count: int) -> list[float]:
        """Return how long each step took but the first, which waits for the data."""
        times = self.times[:count]
        return [after - before for before, after in pairwise(times)]


@dataclass
class Case:
    """A method in its second task, so that there is a past, with images to train on."""

    name: str
    ctx: Context
    learner: Any
    parts: dict[str, Payload]
    data: Images

    @classmethod
    def of(cls, name: str, backbone: Backbone, options: dict[str, Any], count: int) -> Case:
        method = load_method(name)
        h = make_hparams(method, {**options})
        first, second = make_tasks([range(CLASSES), range(CLASSES, 2 * CLASSES)])
        data = pictures(count, backbone.info.preprocessing.size, CLASSES)
        aggregator = load_half(method.aggregator)
        ctx = Context(
            kind="train", task=first, round=0, rounds=1, hparams=h, device=backbone.device,
            backbone_info=backbone.info, backbone=backbone,
        )  # fmt: skip
        state = aggregator.open_task(ctx, aggregator.init(ctx))
        ctx = replace(ctx, task=second)
        state = aggregator.open_task(ctx, state)
        sent = {p.name: unpack(pack(p.payload)) for p in aggregator.broadcast(ctx, state)}
        return cls(name, ctx, load_half(method.learner), sent, data)

    def run(self) -> tuple[list[float], float]:
        """Run the train exchange once; return the seconds of its steps, and of all of it."""
        h, steps = self.ctx.hparams, Steps(self.ctx.device)
        began = clock(self.ctx.device)
        ctx = replace(self.ctx, progress=steps)
        self.learner.run(ctx, State(), self.parts, self.data)
        took = clock(self.ctx.device) - began
        return steps.seconds(h.epochs * -(-len(self.data) // h.batch_size)), took

    def bare(self, count: int, amp: Callable[[], Any]) -> list[float]:
        """Return the seconds of so many bare steps."""
        h, backbone = self.ctx.hparams, self.ctx.backbone
        model = bare_model(h, backbone)
        size = min(h.batch_size, len(self.data))
        S = backbone.info.preprocessing.size
        x = torch.randn(size, 3, S, S, device=backbone.device)
        taken = []
        for _ in range(count):
            began = clock(backbone.device)
            with amp():
                y = model(x)
            y.sum().backward()
            taken.append(clock(backbone.device) - began)
        return taken


def pictures(count: int, size: int, first: int) -> Images:
    """Random pictures of `CLASSES` classes."""
    rng = np.random.default_rng(count)
    labels = first + np.arange(count, dtype=np.int64) % CLASSES
    return Images(rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8), labels)


def clock(device: str) -> float:
    """Return seconds: on a GPU by the clock, once it is idle; on a CPU those of this process.

    The latter do not count what other processes of a busy machine take.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


# --- step by step, beside the bare model ------------------------------------------------------


def compare(case: Case, repeat: int, amp: Callable[[], Any]) -> dict[str, Any]:
    """Run learner and bare model by turns; medians, and the median of the turns' ratios."""
    size = min(case.ctx.hparams.batch_size, len(case.data))
    case.run()  # torch's optimisers import at their first step; the queries are computed
    case.bare(1, amp)
    turns = []
    for _ in range(repeat):
        steps, whole = case.run()
        bare = case.bare(max(3, len(steps)), amp)
        turns.append((statistics.median(steps), statistics.median(bare), whole))
    step, bare_step, whole = (statistics.median(t[i] for t in turns) for i in range(3))
    return {
        "method": case.name,
        "batch": size,
        "images_per_s": size / step,
        "bare_images_per_s": size / bare_step,
        "step": statistics.median(t[1] / t[0] for t in turns),
        "round_images_per_s": case.ctx.hparams.epochs * len(case.data) / whole,
    }


def line(row: dict[str, Any]) -> str:
    cells = [row["method"], str(row["batch"])]
    cells += [f"{row[k]:.1f}" for k in ("images_per_s", "bare_images_per_s")]
    cells += [f"{row['step']:.2f}", f"{row['round_images_per_s']:.1f}"]
    return f"| {' | '.join(cells)} |"


# --- the first round and later ones -----------------------------------------------------------


def write_folder(root: Path, count: int, side: int) -> None:
    """Write JPEGs of `CLASSES` classes, larger than the backbone's input."""
    rng = np.random.default_rng(1)
    for i in range(count):
        folder = root / "train" / f"class{i % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        small = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side)).save(folder / f"{i}.jpg", quality=90)


def cpu_of(pid: int) -> float:
    """Return the processor seconds of another process so far."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


async def rounds(
    case: Case, backbone: dict[str, Any], count: int, times: int
) -> list[tuple[float, float]]:
    """Return wall and processor seconds of rounds in a worker that starts with the first."""
    host = WorkerHost("fcil_client.rounds.worker", name="client", threads=torch.get_num_threads())
    method = load_method(case.name)
    with tempfile.TemporaryDirectory(prefix="fcil-training-") as folder:
        write_folder(Path(folder) / "data", count, 256)
        first = case.ctx.task.classes[0]
        fields = {
            "method": method.name,
            "context": context_fields(replace(case.ctx, progress=print)),
            "classes": {f"class{i}": first + i for i in range(CLASSES)},
            "parts": list(case.parts),
            "backbone": backbone,
            "min_count": 1,
            "data": f"{folder}/data",
            "cache": folder,
            "salt": b"salt",
            "memory_bytes": 2_000_000_000,
        }
        blobs = [pack(Payload()), *(pack(p) for p in case.parts.values())]
        taken, before = [], 0.0
        try:
            for _ in range(times):
                began = time.perf_counter()
                await host.call("run", fields, blobs)
                assert host.pid is not None
                cpu = cpu_of(host.pid)
                taken.append((time.perf_counter() - began, cpu - before))
                before = cpu
        finally:
            await host.stop()
    return taken


# --- where the time goes ----------------------------------------------------------------------


@contextmanager
def profiled(rows: int) -> Iterator[None]:
    profile = cProfile.Profile()
    with profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(rows)


def load(name: str, device: str) -> Backbone:
    """Load the embedded backbone, or a timm model with random weights."""
    if name == MODEL_OF_32:
        return load_backbone(device=device)
    import timm

    from fcil_adapters.backbones.backbone import _timm_preprocessing

    torch.manual_seed(0)
    module = timm.create_model(name, pretrained=False, num_classes=0)
    return wrap_backbone(module, name, _timm_preprocessing(name, module), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--backbone", default=MODEL_OF_32)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "amp"), default="fp32")
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-c", action="append", default=[], help="an option: NAME=JSON")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    backbone = load(a.backbone, a.device)
    backbone.precision = precision_of(a.precision, a.device)
    options = {"batch_size": a.batch, "epochs": a.epochs}
    options |= {k: json.loads(v) for k, _, v in (pair.partition("=") for pair in a.c)}
    rows = []
    for name in a.methods:
        case = Case.of(name, backbone, options, a.images)
        if a.profile:
            case.run()
            with profiled(25):
                case.run()
        elif a.rounds:
            taken = asyncio.run(rounds(case, {"name": a.backbone, "weights": None,
                                              "device": a.device, "precision": a.precision},
                                       a.images, 4))  # fmt: skip
            for number, (wall, cpu) in enumerate(taken, 1):
                print(f"| {name} | {number} | {wall:.2f} | {cpu:.2f} |", flush=True)
        else:
            rows.append(compare(case, a.repeat, backbone.training))
            print(line(rows[-1]), flush=True)
    if a.out:
        a.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
