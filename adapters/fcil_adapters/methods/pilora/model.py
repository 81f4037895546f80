"""PILoRA's model: from a broadcast to a nearest-prototype classifier (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.pilora.composition import inference_view
from fcil_adapters.methods.pilora.parts import read_parts
from fcil_adapters.toolkit.prototypes.client import nearest_prototype


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge the tasks' LoRAs into a view; candidates are the classes that any client had."""
        tasks = read_parts(broadcast)
        view = inference_view(backbone, ctx.hparams, tasks)
        return nearest_prototype(backbone, view, [task.rows for task in tasks], ctx.micro_batch)
