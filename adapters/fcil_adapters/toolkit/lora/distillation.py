"""Losses that hold a model to the last task's model on past classes (torch).

Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015,
https://arxiv.org/abs/1503.02531; Li and Hoiem: Learning without Forgetting, ECCV 2016,
https://arxiv.org/abs/1606.09282; Rebuffi et al.: iCaRL, CVPR 2017,
https://arxiv.org/abs/1611.07725.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fcil_adapters.contract import Context
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.lora.client import LoraSetup, Pass, Teacher
from fcil_adapters.toolkit.lora.manifest import LoraBroadcast


def softened(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return ``T^2 KL(softmax(teacher / T) || softmax(student / T))``, summed over images.

    Args:
        student: logits (b, C), with gradient.
        teacher: logits (b, C).
        temperature: T.
    """
    target = functional.log_softmax(teacher / temperature, 1)
    given = functional.log_softmax(student / temperature, 1)
    divergence = functional.kl_div(given, target, reduction="sum", log_target=True)
    return temperature**2 * divergence


@dataclass(frozen=True)
class SigmoidTargets:
    """A binary cross-entropy for each seen class (iCaRL, Algorithm 3).

    The target of a class of the current task is 1 for its images, else 0; of a past class, the
    sigmoid of the last task's score. Past classes that no client ever had are no columns.

    Attributes:
        teacher: None in the first task.
        past: columns of the teacher's classes, (C,).
        own: columns of the task's classes, (c,).
    """

    teacher: Teacher | None
    past: Tensor
    own: Tensor

    @classmethod
    def of(cls, ctx: Context, bench: LoraSetup, received: LoraBroadcast) -> SigmoidTargets:
        """Determine the columns of a bench whose past rows are trained with the others."""
        teacher = Teacher.of(ctx, received)
        columns = [
            to_torch(
                class_positions(np.asarray(classes, np.int64), bench.classes),
                bench.backbone.device,
            )
            for classes in ((teacher.classes if teacher else ()), ctx.task.classes)
        ]
        return cls(teacher, *columns)

    def targets(self, seen: Pass) -> Tensor:
        """Return the target of each column: (b, C + c), past classes first."""
        own = (seen.piece.rows[:, None] == self.own[None, :]).to(seen.logits.dtype)  # (b, c)
        if self.teacher is None:
            return own
        return torch.cat([self.teacher.logits(seen.piece.pixels).sigmoid(), own], 1)

    def __call__(self, seen: Pass) -> Tensor:
        """Return the loss, summed over columns and images."""
        logits = seen.logits[:, torch.cat([self.past, self.own])]  # (b, C + c)
        return functional.binary_cross_entropy_with_logits(
            logits, self.targets(seen), reduction="sum"
        )
