"""LoRM's model: the linear head on the merge of all tasks' LoRA (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.lorm.inputs import merged_tasks_view
from fcil_adapters.methods.lorm.parts import read_tasks
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.heads.scorer import Head
from fcil_adapters.toolkit.lora.halves import view_scorer
from fcil_adapters.toolkit.lora.manifest import read_parts


class Model:
    """Builds the classifier from the tasks' LoRA and head rows."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge the tasks into a view; candidates are the classes that anybody had."""
        h = ctx.hparams
        view = merged_tasks_view(backbone, h, read_tasks(h, broadcast))
        rows = HeadRows.joined(read_parts(h, broadcast).tasks)
        return view_scorer(ctx, backbone, view, Head.linear(rows, backbone.device))
