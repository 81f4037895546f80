"""From queries to prompts: the pools of all tasks, past ones fixed, the last one's trainable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcil_adapters.bridge import to_torch
from fcil_adapters.methods.hgp.options import HgpHparams
from fcil_adapters.methods.hgp.parts import pool_names
from fcil_adapters.prompts import select


@dataclass(frozen=True)
class Pools:
    """The prompts and keys of tasks 0..t.

    Attributes:
        past: `pool_names` -> (t m, d) or (t m, L, d).
        current: the same names -> the last task's parameters, (m, d) or (m, L, d).
    """

    h: HgpHparams
    past: Mapping[str, Tensor]
    current: Mapping[str, nn.Parameter]

    @classmethod
    def of(
        cls, h: HgpHparams, tasks: Sequence[Mapping[str, NDArray[np.float32]]], device: str
    ) -> Pools:
        """Copy the tasks' prompts to a device; the last task's can be trained."""
        *past, current = tasks
        names = pool_names(h.pools)
        return cls(
            h,
            {n: torch.cat([to_torch(task[n], device) for task in past]) for n in names if past},
            {n: nn.Parameter(to_torch(current[n], device)) for n in names},
        )

    def prompts(self, queries: Tensor) -> dict[int, Tensor]:
        """Return each block's prompts (B, L, d) for queries (B, d); P* of the paper."""
        chosen = {
            pool: select(
                queries, self._all(f"key.{pool}"), self._all(f"prompt.{pool}"), self.h.score
            )
            for pool in self.h.pools
        }
        shared = self.h.pool_sharing == "shared"
        return {b: chosen[self.h.pools[0] if shared else str(b)] for b in self.h.blocks}

    def _all(self, name: str) -> Tensor:
        current = self.current[name]
        return torch.cat([self.past[name], current]) if name in self.past else current
