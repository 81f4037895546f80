"""From queries to prompts: the pools of all tasks, past ones fixed, the last one's trainable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.prompts.pools import TaskPrompts
from fcil_adapters.toolkit.prompts.prefix import select


@dataclass(frozen=True)
class Pools:
    """The prompts and keys of tasks 0..t, named as `parts.pool_names` does."""

    h: HgpHparams
    tasks: TaskPrompts

    @classmethod
    def of(cls, h: HgpHparams, tasks: Sequence[Mapping[str, F32]], device: str) -> Pools:
        """Copy the tasks' prompts to a device; the last task's can be trained."""
        return cls(h, TaskPrompts.of(tasks, device))

    def prompts(self, queries: Tensor) -> dict[int, Tensor]:
        """Return each block's prompts (B, L, d) for queries (B, d); P* of the paper."""
        whole = self.tasks.whole
        chosen = {
            pool: select(queries, whole[f"key.{pool}"], whole[f"prompt.{pool}"], self.h.score)
            for pool in self.h.pools
        }
        shared = self.h.pool_sharing == "shared"
        return {b: chosen[self.h.pools[0] if shared else str(b)] for b in self.h.blocks}
