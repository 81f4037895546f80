"""A broadcast of LoRA and head rows as a linear classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.heads.scorer import Scorer
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.views import merged_view
from fcil_protocol.payloads.payload import Payload


class LinearModel:
    """The model of methods that classify with the head as it is trained."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that anybody had."""
        received = read_parts(ctx.hparams, broadcast)
        view = merged_view(backbone, ctx.hparams, received.lora)
        return linear_scorer(ctx, backbone, view, HeadRows.joined(received.tasks))


def linear_scorer(ctx: Context, backbone: Backbone, view: Any, rows: HeadRows) -> Scorer:
    """Return the linear classifier of the rows whose classes anybody had, on a view's features."""
    rows = rows.chosen(rows.seen)
    weight = to_torch(rows.weight, backbone.device)  # (C, d)
    bias = to_torch(rows.bias, backbone.device)  # (C,)

    def score(pixels: Tensor) -> Tensor:
        features = cls_features(view, backbone.normalise(pixels))  # (b, d)
        return functional.linear(features, weight, bias)

    return Scorer(tuple(int(c) for c in rows.classes), score, ctx.micro_batch)
