"""Prompts among the tokens of a vision transformer: their choice and their place (torch).

Wang et al., CVPR 2022, section 4.1: the k prompts whose keys have the largest cosine with the query
are put before the image's tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, leading_tokens
from fcil_protocol.errors import DataError

Feature = Literal["prompts", "token", "token_and_prompts"]


def chosen(cosines: Tensor, k: int, *, batchwise: bool = False) -> Tensor:
    """Return the prompts of each image, best first: (b, k, M), one-hot rows.

    One-hot rows instead of indices: the gradient of a product is deterministic on GPUs, that of an
    indexed tensor is not.

    Args:
        cosines: of queries and keys, (b, M).
        k: number of prompts.
        batchwise: all images take the k that most of them would; of equal ones the first.
    """
    M = cosines.shape[1]
    places = torch.arange(M, device=cosines.device)
    best = cosines.topk(k, dim=1).indices  # (b, k)
    rows = (best.unsqueeze(-1) == places).to(cosines.dtype)  # (b, k, M)
    if not batchwise:
        return rows
    votes = rows.sum((0, 1)) * M - places  # (M,)
    common = votes.topk(k).indices.unsqueeze(-1) == places  # (k, M)
    return common.to(cosines.dtype).expand_as(rows)


def key_cosines(queries: Tensor, keys: Tensor) -> Tensor:
    """Return cos(q_b, key_m): (b, M)."""
    return functional.normalize(queries, dim=-1) @ functional.normalize(keys, dim=-1).mT


class _Inserted(nn.Module):
    """Layer between a transformer's embedding and its blocks that inserts prompts.

    Attributes:
        prompts: (B, n, d) for the next pass; they follow the class token and have no position of
            their own.
    """

    def __init__(self, inner: Any, prefix: int) -> None:
        super().__init__()
        self.inner = inner
        self.prefix = prefix
        self.prompts: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.prompts is not None, "a pass without prompts"
        first, rest = x[:, : self.prefix], x[:, self.prefix :]
        tokens: Tensor = self.inner(torch.cat([first, self.prompts, rest], dim=1))
        return tokens


class SequenceView:
    """A view of a frozen backbone with prompts before its tokens.

    Args:
        backbone: stays untouched; the view shares its parameters.
        feature: the outputs to average.

    Raises:
        DataError: the model processes its tokens in a way of its own.
    """

    def __init__(self, backbone: Backbone, feature: Feature) -> None:
        # Here, because the backbone's torchvision shim must come first.
        from timm.models.vision_transformer import VisionTransformer

        self._view = backbone.view()
        if type(self._view).forward_features is not VisionTransformer.forward_features:
            raise DataError(
                f"the model {backbone.info.name!r} has a forward pass of its own; prompts among "
                "its tokens need a plain one.",
                action="Choose a timm ViT such as 'vit_base_patch16_224.dino'.",
            )
        self._prefix = int(self._view.num_prefix_tokens)
        self._inserted = _Inserted(self._view.norm_pre, self._prefix)
        self._view.norm_pre = self._inserted
        self._feature = feature

    def forward(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Return the features (B, d).

        Args:
            x: normalised images (B, 3, S, S).
            prompts: (B, n, d); gradients flow to them.
        """
        n = prompts.shape[1]
        try:
            self._inserted.prompts = prompts
            tokens = leading_tokens(self._view, x, self._prefix + n)
        finally:
            self._inserted.prompts = None
        outputs = tokens[:, self._prefix : self._prefix + n]
        if self._feature == "token":
            return tokens[:, 0]
        if self._feature == "token_and_prompts":
            outputs = torch.cat([tokens[:, :1], outputs], dim=1)
        return outputs.mean(1)
