"""CCVR's classifier: the merged LoRA's features through the calibrated head (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.ccvr.parts import scoring_rows
from fcil_adapters.toolkit.lora.halves import linear_scorer
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.views import merged_view


class Model:
    """Until the end of a task, its rows are those trained so far."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that any client had."""
        received = read_parts(ctx.hparams, broadcast)
        view = merged_view(backbone, ctx.hparams, received.lora)
        rows = scoring_rows(broadcast, received.tasks[-1])
        return linear_scorer(ctx, backbone, view, rows)
