"""Fed-TaLoRA's model: from a broadcast to a linear classifier over the seen classes (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.fed_talora.parts import read_parts
from fcil_adapters.methods.fed_talora.views import merged_view
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.heads.scorer import Head
from fcil_adapters.toolkit.lora.halves import view_scorer


class Model:
    """Builds the classifier from all parts of a broadcast."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge residuals and LoRA into a view; candidates are the classes that any client had."""
        received = read_parts(ctx.hparams, broadcast)
        view = merged_view(backbone, ctx.hparams, received)
        head = Head.linear(HeadRows.joined(received.room.tasks), backbone.device)
        return view_scorer(ctx, backbone, view, head)
