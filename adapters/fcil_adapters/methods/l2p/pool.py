"""Features of images with the prompts that they choose from L2P's pool (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.methods.l2p.options import L2pHparams
from fcil_adapters.methods.l2p.sequence import SequenceView, chosen, key_cosines


@dataclass(frozen=True)
class Pool:
    """A pool and the transformer that takes its prompts.

    Attributes:
        tensors: ``prompt.pool`` (M, L, d) and ``key.pool`` (M, d).
    """

    h: L2pHparams
    backbone: Backbone
    view: SequenceView
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, h: L2pHparams, backbone: Backbone, tensors: Mapping[str, Tensor]) -> Pool:
        """Attach a pool to a view of a backbone."""
        return cls(h, backbone, SequenceView(backbone, h.feature), tensors)

    def cosines(self, queries: Tensor) -> Tensor:
        """Return the cosines of queries (b, d) and keys: (b, M)."""
        return key_cosines(queries, self.tensors["key.pool"])

    def chosen(self, cosines: Tensor) -> Tensor:
        """Return the one-hot rows of the chosen prompts: (b, k, M)."""
        return chosen(cosines.detach(), self.h.top_k, batchwise=self.h.batchwise)

    def features(self, pixels: Tensor, queries: Tensor) -> Tensor:
        """Return the features (b, d) of images (b, S, S, 3) in [0, 255]."""
        taken = self.chosen(self.cosines(queries))  # (b, k, M)
        pool = self.tensors["prompt.pool"]  # (M, L, d)
        prompts = (taken @ pool.flatten(1)).reshape(-1, self.h.top_k * pool.shape[1], pool.shape[2])
        return self.view.forward(self.backbone.normalise(pixels), prompts)

    def pull(self, queries: Tensor) -> Tensor:
        """Return the sum over images and their prompts of -cos(q, key) (Wang et al., Eq. 5)."""
        cosines = self.cosines(queries)  # (b, M)
        return -(cosines * self.chosen(cosines).sum(1)).sum()
