"""PILoRA's client half: train the task's LoRA and prototypes on local images (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Context, ImageSet, Payload, State
from fcil_adapters.methods.pilora.composition import training_view
from fcil_adapters.methods.pilora.losses import l1_norm, orthogonality
from fcil_adapters.methods.pilora.options import PiloraHparams
from fcil_adapters.methods.pilora.parts import TaskPart, future_rows, read_parts
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.lora.layer import trained_params
from fcil_adapters.toolkit.lora.tensors import lora_places
from fcil_adapters.toolkit.prototypes.client import PrototypeSetup, answer
from fcil_adapters.toolkit.prototypes.rows import known


class Learner:
    """Stateless: the broadcast holds all that a round starts from."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Answer ``prepare`` with class means, and ``train`` with LoRA and prototypes too."""
        future = future_rows(broadcast, ctx.backbone_info.dim)
        return state, answer(ctx, _trainee(ctx, read_parts(broadcast), future), data)


def _trainee(
    ctx: Context, tasks: tuple[TaskPart, ...], future: NDArray[np.float32]
) -> PrototypeSetup:
    """Return the trainee of a round with ``l_dce + lambda l_pl + gamma l_ort`` (Eq. 15)."""
    h: PiloraHparams = ctx.hparams
    backbone: Backbone = ctx.backbone
    view = training_view(backbone, h, tasks)
    lora = trained_params(view, h.blocks)
    current_a = {name.removesuffix(".A"): A for name, A in lora.items() if name.endswith(".A")}
    *past, current = tasks
    past_a = _stacked_a(h, past, backbone.device)
    _, learned = known((task.rows for task in past), backbone.info.dim)

    def features(pixels: Tensor) -> Tensor:
        return cls_features(view, backbone.normalise(pixels))

    return PrototypeSetup(
        lora=lora,
        proto=nn.Parameter(to_torch(current.rows.proto, backbone.device)),
        fixed=to_torch(np.concatenate([learned, future]), backbone.device),
        features=features,
        losses=lambda pixels: (features(pixels), None),
        penalty=lambda: _penalty(h, past_a, current_a),
    )


def _stacked_a(h: PiloraHparams, past: list[TaskPart], device: str) -> dict[str, Tensor]:
    """Return ``<block>.<projection>`` -> the A's of all past tasks, (t r, d); empty at t = 0."""
    if not past:
        return {}
    return {
        place: to_torch(np.concatenate([task.lora[f"lora.{place}.A"] for task in past]), device)
        for place in lora_places(h.blocks)
    }


def _penalty(
    h: PiloraHparams, past_a: Mapping[str, Tensor], current_a: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the terms that do not depend on images, which count once per batch."""
    terms = []
    if past_a and h.gamma_ort > 0:
        terms.append(h.gamma_ort * orthogonality(past_a, current_a))
    if h.l1 > 0:
        terms.append(h.l1 * l1_norm(current_a))
    return torch.stack(terms).sum() if terms else None
