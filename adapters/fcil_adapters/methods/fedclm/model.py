"""FedCLM's classifier: the nearest class mean of the merged LoRA's features (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbone import Backbone
from fcil_adapters.contract import Context, Predictor
from fcil_adapters.lora_head import read_parts
from fcil_adapters.lora_head_means import read_means
from fcil_adapters.lora_head_nearest import nearest_scorer
from fcil_adapters.lora_head_views import merged_view
from fcil_adapters.methods.fedclm.options import FedclmHparams
from fcil_protocol.payload import Payload


class Model:
    """The head is not used; classes whose task has not ended are no candidates."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view and read the means."""
        h: FedclmHparams = ctx.hparams
        view = merged_view(backbone, h, read_parts(h, broadcast).lora)
        means = read_means(broadcast, backbone.info.dim)
        return nearest_scorer(ctx, backbone, view, means, cosine=h.metric == "cosine")
