"""CCVR's classifier: the merged LoRA's features through the calibrated head (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.ccvr.parts import CALIBRATED, scoring_rows
from fcil_adapters.toolkit.heads.scorer import Head
from fcil_adapters.toolkit.lora.halves import view_scorer
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.views import merged_view


class Model:
    """Until the end of a task, its rows are those trained so far, or its classes are missing.

    A quadratic head scores no class that it does not know, since its scores cannot be compared with
    a trained row's. Before there is one, the trained rows score.
    """

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that any client had or described."""
        received = read_parts(ctx.hparams, broadcast)
        view = merged_view(backbone, ctx.hparams, received.lora)
        if ctx.hparams.head == "quadratic" and CALIBRATED in broadcast:
            head = Head.quadratic(broadcast[CALIBRATED].tensors, backbone.device)
        else:
            rows = scoring_rows(broadcast, received.tasks[-1])
            head = Head.linear(rows, backbone.device)
        return view_scorer(ctx, backbone, view, head)
