"""FedCLM's classifier: the nearest class mean of the merged LoRA's features (torch)."""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Context, Payload, Predictor
from fcil_adapters.methods.fedclm.options import FedclmHparams
from fcil_adapters.toolkit.lora.class_means import read_means
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.nearest_mean import nearest_scorer
from fcil_adapters.toolkit.lora.views import merged_view


class Model:
    """Nearest mean without the head; classes of an unfinished task are no candidates."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view and read the means."""
        h: FedclmHparams = ctx.hparams
        view = merged_view(backbone, h, read_parts(h, broadcast).lora)
        means = read_means(broadcast, backbone.info.dim)
        return nearest_scorer(ctx, backbone, view, means, cosine=h.metric == "cosine")
