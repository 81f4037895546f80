"""One round's repair of the averaged server: generators, latents, distillation (torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from fcil_adapters.bridge import to_numpy, to_torch
from fcil_adapters.contract import Context, Progress
from fcil_adapters.methods.hepco.distillation import Pools, distill_head, distill_pools
from fcil_adapters.methods.hepco.generation import Objective, PoolGap
from fcil_adapters.methods.hepco.generator import (
    LatentGenerator,
    Latents,
    make_latents,
    train_generator,
)
from fcil_adapters.methods.hepco.options import HepcoHparams
from fcil_adapters.methods.hepco.parts import HEAD
from fcil_adapters.methods.hepco.teachers import Head, Teachers
from fcil_protocol.payload import Array

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
    head = as_head([previous], known, ctx.device)
    odds = counts[known] if h.labels == "counts" else counts[known] > 0
    labels = to_torch(odds, ctx.device, torch.float64)
    teachers = Teachers(head, torch.ones_like(head.bias), labels / labels.sum())
    steps = h.old_generator_steps(ctx.task.index)
    return Source(teachers, lambda: (previous,), steps, h.old_batch, _OLD)


def consolidate(
    ctx: Context, provisional: Model, known: NDArray[np.bool_], sources: Sequence[Source]
) -> dict[str, NDArray[np.float32]]:
    """Distil the sources into the provisional server.

    Args:
        ctx: of the round; its seed decides all draws.
        provisional: the averaged model, its head with all rows (C, d).
        known: (C,), classes that somebody ever had: the only columns of any softmax.
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
            start = _block([provisional], block, ctx.device)
            models = (model for source in sources for model in source.models())
            teachers = _block(models, block, ctx.device)
            result = distill_pools(
                Pools(start.keys[0], start.prompts[0]), teachers, z, shares, h, meter.tick
            )
            shape = provisional[f"prompt.{block}"].shape
            repaired[f"prompt.{block}"] = to_numpy(result.prompts).reshape(shape)
            repaired[f"key.{block}"] = to_numpy(result.keys)
    if head:
        own = torch.cat([batch.own for batch in latents], dim=1)  # (S, B, C)
        start_head = _only(as_head([provisional], known, ctx.device))
        trained = distill_head(start_head, z, own, h, meter.tick)
        for name, rows in zip(HEAD, (trained.weight, trained.bias), strict=True):
            repaired[name] = np.array(provisional[name], dtype=np.float32)
            repaired[name][known] = to_numpy(rows)
    return repaired


def as_head(models: Iterable[Model], known: NDArray[np.bool_], device: str) -> Head:
    """Stack the models' head rows of the known classes: (K, C, d) and (K, C)."""
    pairs = [(model[HEAD[0]][known], model[HEAD[1]][known]) for model in models]
    return Head(
        to_torch(np.stack([weight for weight, _ in pairs]), device, torch.float64),
        to_torch(np.stack([bias for _, bias in pairs]), device, torch.float64),
    )


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
    server = _only(as_head([provisional], known, ctx.device))
    classes, width = server.weight.shape
    generator = LatentGenerator(h, classes, width, draws).to(ctx.device)
    gaps = []
    if not h.detach_query and h.lambda_mse > 0:
        for block in h.blocks:
            ours = _block([provisional], block, ctx.device)
            theirs = _block(source.models(), block, ctx.device)
            gaps.append(PoolGap.of(ours.keys[0], ours.prompts[0], theirs.keys, theirs.prompts))
    entries = h.prompt_length * width
    objective = Objective(h, source.teachers, server, gaps, entries)
    train_generator(generator, objective, source.teachers, source.steps, h, draws, meter.tick)
    return make_latents(generator, source.teachers, h.distillation_steps, source.batch, draws)


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


def _block(models: Iterable[Model], block: int, device: str) -> Pools:
    """Stack one block's pools in float64: keys (K, M, d), prompts (K, M, L d)."""
    pairs = [(model[f"key.{block}"], model[f"prompt.{block}"]) for model in models]
    keys = np.stack([key for key, _ in pairs])
    prompts = np.stack([prompt.reshape(len(prompt), -1) for _, prompt in pairs])
    return Pools(to_torch(keys, device, torch.float64), to_torch(prompts, device, torch.float64))


def _only(head: Head) -> Head:
    return Head(head.weight[0], head.bias[0])


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
