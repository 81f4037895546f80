"""How PLoRA's broadcast becomes a nearest-prototype classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.backbone import Backbone
from fcil_adapters.bridge import to_torch
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.methods.plora.parts import read_parts
from fcil_adapters.methods.plora.views import merged_view
from fcil_adapters.nearest_prototype import NearestPrototype
from fcil_protocol.payload import Payload


class Model:
    """Builds the classifier from the current LoRA and all tasks' prototypes."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge the LoRA into a view; candidates are the classes that anybody had."""
        received = read_parts(broadcast, with_teacher=False)
        known = [task.known for task in received.tasks]
        classes = tuple(int(c) for ids, _ in known for c in ids)
        prototypes = to_torch(np.concatenate([rows for _, rows in known]), backbone.device)
        view = merged_view(backbone, ctx.hparams, received.lora)
        return NearestPrototype(backbone, view, classes, prototypes, ctx.micro_batch)
