"""PLoRA's model: from a broadcast to a nearest-prototype classifier (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.plora.parts import read_parts
from fcil_adapters.methods.plora.views import merged_view
from fcil_adapters.toolkit.prototypes.client import nearest_prototype


class Model:
    """Builds the classifier from the current LoRA and all tasks' prototypes."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge the LoRA into a view; candidates are the classes that any client had."""
        received = read_parts(broadcast, with_teacher=False)
        view = merged_view(backbone, ctx.hparams, received.lora)
        return nearest_prototype(backbone, view, received.tasks, ctx.micro_batch)
