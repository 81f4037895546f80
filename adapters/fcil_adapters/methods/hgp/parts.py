"""Tensor names of HGP's payloads, and the reader of its broadcast (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import Payload
from fcil_adapters.numerics.task_parts import CURRENT, find_part, of_all_tasks
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.prompts.parts import PromptModel, prompts_of


def pool_names(pools: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``key.<pool>`` and ``prompt.<pool>`` for every pool, in a fixed order."""
    return tuple(f"{kind}.{pool}" for pool in pools for kind in ("key", "prompt"))


def read_parts(broadcast: Mapping[str, Payload]) -> PromptModel:
    """Read a broadcast.

    Raises:
        SchemaMismatch: a part that the current state needs is missing.
    """
    return PromptModel(
        prompts=tuple(prompts_of(part) for part in of_all_tasks(broadcast)),
        head=HeadRows.of(find_part(broadcast, CURRENT).tensors),
    )
