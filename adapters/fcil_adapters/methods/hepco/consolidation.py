"""One round's repair of the averaged server: generators, latents, distillation (torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.contract import Array, Context, Progress
from fcil_adapters.methods.hepco.distillation import Pools, distill_head, distill_pools
from fcil_adapters.methods.hepco.generation import Objective, PoolGap
from fcil_adapters.methods.hepco.generator import (
    LatentGenerator,
    Latents,
    make_latents,
    train_generator,
)
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.teachers import Head, Teachers
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.heads.rows import HEAD

Model = Mapping[str, Array]  # pools, keys and head of one model, by `parts` names

_NEW, _OLD = 1, 2  # purposes of the random streams


@dataclass(frozen=True)
class Source:
    """One generator's teachers.

    Attributes:
        teachers: heads, weights and label frequencies over the known classes.
        models: yields the teachers' pools, in the order of the heads; opened again for
            every block, so that only one block of all clients is in memory.
        steps: of its generator.
        batch: its latents per distillation step.
        purpose: of its random stream.
    """

    teachers: Teachers
    models: Callable[[], Iterable[Model]]
    steps: int
    batch: int
    purpose: int

    @property
    def count(self) -> int:
        """K, the number of teachers."""
        return len(self.teachers.heads.bias)


def new_source(
    h: HepcoHparams, teachers: Teachers, models: Callable[[], Iterable[Model]]
) -> Source:
    """Describe the generator of the current task's classes."""
    return Source(teachers, models, h.generator_steps, h.server_batch_size, _NEW)


def old_source(
    ctx: Context, previous: Model, known: NDArray[np.bool_], counts: NDArray[np.int64]
) -> Source:
    """Describe the generator of past classes, taught by the previous server alone.

    Args:
        ctx: of the round, in a task t >= 1.
        previous: the final server of the last task, with the head rows that the current
            task's classes started with.
        known: (C,), the columns.
        counts: (C,), images of past classes over all their rounds, 0 for the current task's.
    """
    h: HepcoHparams = ctx.hparams
    head = head_of(previous, known, ctx.device)
    odds = counts[known] if h.labels == "counts" else counts[known] > 0
    labels = to_torch(odds, ctx.device, torch.float64)
    alone = Head(head.weight[None], head.bias[None])
    teachers = Teachers(alone, torch.ones_like(alone.bias), labels / labels.sum())
    steps = h.old_generator_steps(ctx.task.index)
    return Source(teachers, lambda: (previous,), steps, h.old_batch, _OLD)


def consolidate(
    ctx: Context, provisional: Model, known: NDArray[np.bool_], sources: Sequence[Source]
) -> dict[str, NDArray[np.float32]]:
    """Distil the sources into the provisional server.

    Args:
        ctx: of the round; its seed decides all draws.
        provisional: the averaged model, its head with all rows (C, d).
        known: (C,), classes that a client ever had: the only columns of any softmax.
        sources: the new generator's and, from the second task on, the old one's.

    Returns:
        The tensors that changed, by name; head rows of unknown classes as they were.
    """
    h: HepcoHparams = ctx.hparams
    # Pools of a single-class task come back as they went: every teacher equals the server.
    prompts = h.distill in ("both", "prompts") and len(ctx.task.classes) > 1
    head = h.distill in ("both", "head")
    if not (prompts or head):
        return {}
    meter = _Meter.of(ctx, sources, blocks=len(h.blocks) if prompts else 0, head=head)
    latents = [_latents(ctx, source, provisional, known, meter) for source in sources]
    z = torch.cat([batch.z for batch in latents], dim=1)  # (S, B, d)
    repaired: dict[str, NDArray[np.float32]] = {}
    if prompts:
        shares = _joint_shares(sources, latents)
        for block in h.blocks:
            repaired |= _repaired_block(ctx, block, provisional, sources, z, shares, meter)
    if head:
        own = torch.cat([batch.own for batch in latents], dim=1)  # (S, B, C)
        start = head_of(provisional, known, ctx.device)
        trained = distill_head(start, z, own, h, meter.tick)
        for name, rows in zip(HEAD, (trained.weight, trained.bias), strict=True):
            repaired[name] = np.array(provisional[name], dtype=np.float32)
            repaired[name][known] = to_numpy(rows)
    return repaired


def _repaired_block(
    ctx: Context,
    block: int,
    provisional: Model,
    sources: Sequence[Source],
    z: Tensor,
    shares: Tensor,
    meter: _Meter,
) -> dict[str, NDArray[np.float32]]:
    """Distil the pools of one block; its teachers are gone before the next block's come."""
    start = _block([provisional], block, ctx.device, 1)
    models = (model for source in sources for model in source.models())
    teachers = _block(models, block, ctx.device, sum(source.count for source in sources))
    result = distill_pools(
        Pools(start.keys[0], start.prompts[0]), teachers, z, shares, ctx.hparams, meter.tick
    )
    shape = provisional[f"prompt.{block}"].shape
    return {
        f"prompt.{block}": to_numpy(result.prompts).reshape(shape),
        f"key.{block}": to_numpy(result.keys),
    }


def head_of(model: Model, known: NDArray[np.bool_], device: str) -> Head:
    """Return a model's head rows of the known classes: (C, d) and (C,)."""
    weight, bias = (to_torch(model[name][known], device, torch.float64) for name in HEAD)
    return Head(weight, bias)


def _latents(
    ctx: Context,
    source: Source,
    provisional: Model,
    known: NDArray[np.bool_],
    meter: _Meter,
) -> Latents:
    """Train one source's generator from the start, and draw all its batches."""
    h: HepcoHparams = ctx.hparams
    draws = Generator().manual_seed(ctx.torch_seed(source.purpose))
    server = head_of(provisional, known, ctx.device)
    classes, width = server.weight.shape
    generator = LatentGenerator(h, classes, width, draws).to(ctx.device)
    asked = h.blocks if not h.detach_query and h.lambda_mse > 0 else ()
    gaps = [_gap(source, provisional, block, ctx.device) for block in asked]
    entries = h.prompt_length * width
    objective = Objective(h, source.teachers, server, gaps, entries)
    train_generator(generator, objective, source.teachers, source.steps, h, draws, meter.tick)
    return make_latents(generator, source.teachers, h.distillation_steps, source.batch, draws)


def _gap(source: Source, provisional: Model, block: int, device: str) -> PoolGap:
    """Compare one block's pools; only inner products outlast the call."""
    ours = _block([provisional], block, device, 1)
    theirs = _block(source.models(), block, device, source.count)
    return PoolGap.of(ours.keys[0], ours.prompts[0], theirs.keys, theirs.prompts)


def _joint_shares(sources: Sequence[Source], latents: Sequence[Latents]) -> Tensor:
    """Return the weights (S, B, K) of all sources' teachers; each teaches its own latents."""
    weights = [s.teachers.of_labels(x.own) for s, x in zip(sources, latents, strict=True)]
    padded = []
    before, total = 0, sum(w.shape[2] for w in weights)
    for w in weights:
        after = total - before - w.shape[2]
        padded.append(torch.nn.functional.pad(w, (before, after)))
        before += w.shape[2]
    return torch.cat(padded, dim=1)


def _block(models: Iterable[Model], block: int, device: str, count: int) -> Pools:
    """Stack one block's pools of ``count`` models in float64: keys (K, M, d), prompts (K, M, L d).

    They are gigabytes for many clients, so each model is copied to its place when it comes.
    """
    keys = prompts = torch.empty(0)
    for k, model in enumerate(models):
        key = to_torch(model[f"key.{block}"], device)
        prompt = to_torch(model[f"prompt.{block}"], device).flatten(1)
        if k == 0:
            keys = key.new_empty((count, *key.shape), dtype=torch.float64)
            prompts = prompt.new_empty((count, *prompt.shape), dtype=torch.float64)
        keys[k], prompts[k] = key, prompt
    return Pools(keys, prompts)


@dataclass
class _Meter:
    """Counts the steps of a round's repair for the progress display."""

    ctx: Context
    total: int
    done: int = 0

    @classmethod
    def of(cls, ctx: Context, sources: Sequence[Source], *, blocks: int, head: bool) -> _Meter:
        repairs = (blocks + int(head)) * ctx.hparams.distillation_steps
        return cls(ctx, sum(source.steps for source in sources) + repairs)

    def tick(self, loss: float) -> None:
        self.done += 1
        self.ctx.progress(Progress(self.done, self.total, loss))
