"""Tensor names of HGP's payloads, and what clients may say about their classes."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Payload, TaskInfo
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.numerics.class_reports import count_faults
from fcil_adapters.numerics.task_parts import CURRENT, current_task, find_part, task_part
from fcil_adapters.toolkit.gaussians.gaussian import gaussian_faults
from fcil_adapters.toolkit.prompts.parts import PromptModel, prompts_of


def pool_names(pools: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``key.<pool>`` and ``prompt.<pool>`` for every pool, in a fixed order."""
    return tuple(f"{kind}.{pool}" for pool in pools for kind in ("key", "prompt"))


def read_parts(broadcast: Mapping[str, Payload]) -> PromptModel:
    """Read a broadcast.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    current = find_part(broadcast, CURRENT)
    tasks = [find_part(broadcast, task_part(t)) for t in range(current_task(current) + 1)]
    return PromptModel(
        prompts=tuple(prompts_of(part) for part in tasks),
        weight=current.f32("head.weight"),
        bias=current.f32("head.bias"),
        classes=current.i64("classes"),
        seen=current.i64("seen").astype(bool),
    )


def check_upload(h: HgpHparams, payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which an upload contradicts itself or the task."""
    counts = payload.i64("count").tolist()
    described = [count for count in counts if count >= h.min_count_upload]
    faults = gaussian_faults(payload, described, h.cov, h.cov_rank)
    return count_faults(payload, task) + faults
