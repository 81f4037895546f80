"""PLoRA's client half: train the shared LoRA and the task's prototypes on local images (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.plora.options import PloraHparams
from fcil_adapters.methods.plora.parts import Received, read_parts
from fcil_adapters.methods.plora.views import Student, Teacher, training_view
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.lora.layer import trained_params
from fcil_adapters.toolkit.prototypes.client import PrototypeSetup, answer
from fcil_adapters.toolkit.prototypes.rows import known


class Learner:
    """Stateless: the broadcast holds all that a round starts from, including the teacher."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Answer ``prepare`` with class means, and ``train`` with LoRA and prototypes too."""
        h: PloraHparams = ctx.hparams
        distils = ctx.kind == "train" and h.gamma_kd > 0
        trainee = _trainee(ctx, read_parts(broadcast, with_teacher=distils))
        return state, answer(ctx, trainee, data)


def _trainee(ctx: Context, received: Received) -> PrototypeSetup:
    """Return the trainee of a round with ``l_dce + lambda l_pl + gamma l_kd`` (Eq. 12)."""
    h: PloraHparams = ctx.hparams
    backbone: Backbone = ctx.backbone
    view = training_view(backbone, h, received.lora)
    student = Student(view, h)
    lora = received.teacher
    teacher = None if lora is None else Teacher(backbone, h, lora)
    *past, current = received.tasks

    def losses(pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        x = backbone.normalise(pixels)
        features, tapped = student.features(x)  # (b, d) each
        return features, None if teacher is None else h.gamma_kd * _distil(h, teacher, x, tapped)

    return PrototypeSetup(
        lora=trained_params(view, h.blocks),
        proto=nn.Parameter(to_torch(current.proto, backbone.device)),
        fixed=to_torch(known(past, backbone.info.dim)[1], backbone.device),
        features=lambda pixels: student.features(backbone.normalise(pixels))[0],
        losses=losses,
        penalty=lambda: None,
    )


def _distil(h: PloraHparams, teacher: Teacher, x: Tensor, tapped: Tensor) -> Tensor:
    """Return l_kd of each image (b,): its distance from the teacher's feature (Eq. 11)."""
    with torch.no_grad():
        target = teacher.features(x)  # (b, d)
    squares = (tapped - target).square()
    return squares.sum(1) if h.kd_reduction == "sum_d" else squares.mean(1)
