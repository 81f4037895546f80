"""Prefix tuning of a frozen vision transformer, and prompts chosen by cosine similarity.

Li and Liang, Prefix-Tuning, ACL 2021, https://arxiv.org/abs/2101.00190; prompts made of a weighted
pool: Smith et al., CODA-Prompt, CVPR 2023, https://arxiv.org/abs/2211.13218. A prompt (L, d) of a
block gives L/2 further keys and L/2 further values to every query of that block's attention;
queries and the number of tokens stay the same. Even a prompt of zeros changes the attention: its
keys take part in the softmax.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.backbones.feature_cache import plain_tap
from fcil_adapters.contract import ImageSet
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.training.prefetch import plain_batches
from fcil_protocol.errors import DataError

Score = Literal["cosine", "softmax"]
Query = Literal["canonical", "view"]
Pixels = Literal["normalised", "unit"]


class PrefixAttention(nn.Module):
    """A block's attention with a prompt before its keys and values.

    Args:
        attention: timm's plain attention of one block; its parameters are shared, not copied.

    Attributes:
        prompt: (B, L, d) for the next forward pass of B images, or None. Rows 0:L/2 go before
            the keys and L/2:L before the values, after the qkv projection, each split into
            heads as the projected rows are.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.inner = attention
        self.prompt: Tensor | None = None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Attend from tokens (B, N, d) to the prompt and the tokens: (B, N, d).

        timm's further arguments (masks) are absent in a plain classifier.
        """
        a = self.inner
        if self.prompt is None:
            return a(x)  # type: ignore[no-any-return]
        B, N, d = x.shape
        H, L = a.num_heads, self.prompt.shape[1]
        q, k, v = a.qkv(x).reshape(B, N, 3, H, d // H).permute(2, 0, 3, 1, 4)  # (B, H, N, d/H)
        prefix = self.prompt.reshape(B, 2, L // 2, H, d // H).permute(1, 0, 3, 2, 4)
        k = torch.cat([prefix[0], k], dim=2)  # (B, H, L/2 + N, d/H)
        v = torch.cat([prefix[1], v], dim=2)
        y = functional.scaled_dot_product_attention(q, k, v)  # (B, H, N, d/H)
        projected: Tensor = a.proj(y.transpose(1, 2).reshape(B, N, d))
        return projected


class PromptedView:
    """A view of a frozen backbone in which some blocks take prompts.

    Args:
        backbone: stays untouched; the view shares its parameters.
        blocks: indices of the blocks that may take a prompt.

    Raises:
        DataError: the attention of a block cannot take prefixes.
    """

    def __init__(self, backbone: Backbone, blocks: Iterable[int]) -> None:
        self._view = backbone.view()
        self._layers = {b: _attach(self._view, b, backbone.info.name) for b in blocks}

    def forward(self, x: Tensor, prompts: Mapping[int, Tensor]) -> Tensor:
        """Return the prompted class token after the final norm.

        Args:
            x: normalised images (B, 3, S, S).
            prompts: block -> (B, L, d), L even; a block without entry acts as usual.

        Returns:
            (B, d); gradients flow to the prompts.
        """
        assert set(prompts) <= set(self._layers), "a prompt for a block that takes none"
        try:
            for block, prompt in prompts.items():
                self._layers[block].prompt = prompt
            return cls_features(self._view, x)
        finally:
            for layer in self._layers.values():
                layer.prompt = None


def with_pixels(backbone: Backbone, pixels: Pixels) -> Backbone:
    """Return the same module with another preparation of its input.

    Args:
        backbone: stays unchanged; its module is shared.
        pixels: ``normalised``: as the model was pre-trained; ``unit``: values in [0, 1], without
            mean and standard deviation.
    """
    if pixels == "normalised":
        return backbone
    plain = replace(backbone.info.preprocessing, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    same = Backbone(backbone.module, replace(backbone.info, preprocessing=plain), backbone.device)
    same.memory, same.precision, same.alive = backbone.memory, backbone.precision, backbone.alive
    return same


def select(query: Tensor, keys: Tensor, pool: Tensor, score: Score = "cosine") -> Tensor:
    """Mix a pool of prompts for each query: ``sum_m s_m P_m`` with ``s = cos(query, key_m)``.

    Args:
        query: (..., B, d).
        keys: (..., M, d).
        pool: (..., M, L, d). Leading dimensions (clients) are broadcast.
        score: ``cosine``: the plain cosines, negative ones too; ``softmax``: their softmax over the
            pool.

    Returns:
        (..., B, L, d), by one matrix product, without a tensor (B, M, L, d).
    """
    cosines = functional.normalize(query, dim=-1) @ functional.normalize(keys, dim=-1).mT
    weights = cosines if score == "cosine" else cosines.softmax(-1)  # (..., B, M)
    mixed = weights @ pool.flatten(-2)  # (..., B, L d)
    return mixed.reshape(*mixed.shape[:-1], *pool.shape[-2:])


def query_features(
    backbone: Backbone, images: NDArray[np.uint8] | Tensor, micro_batch: int | None = None
) -> Tensor:
    """Return the features that choose prompts: those of the frozen model, without gradient.

    Those of plain images are cached as long as the backbone is loaded.

    Args:
        backbone: the frozen model, without prompts.
        images: (B, S, S, 3) in [0, 255], uint8 (plain) or float (augmented).
        micro_batch: largest number of images in one pass; None: all.

    Returns:
        (B, d) float32 on the backbone's device.
    """
    if torch.compiler.is_exporting():  # a graph has no cache
        return cls_features(backbone.module, backbone.normalise(images))
    if len(images) and images.dtype in (np.uint8, torch.uint8):
        plain = images if isinstance(images, np.ndarray) else images.cpu().numpy()

        def compute(some: NDArray[np.uint8]) -> NDArray[np.float32]:
            return to_numpy(_queries(backbone, to_torch(some), micro_batch))

        features = backbone.memory.of(plain, plain_tap(backbone.info), compute)
        return to_torch(features, backbone.device)
    pixels = to_torch(images) if isinstance(images, np.ndarray) else images
    return _queries(backbone, pixels, micro_batch)


def _queries(backbone: Backbone, pixels: Tensor, micro_batch: int | None) -> Tensor:
    with torch.no_grad():
        chunks = torch.split(pixels, micro_batch or max(len(pixels), 1))
        return torch.cat([cls_features(backbone.module, backbone.normalise(c)) for c in chunks])


class Queries:
    """The query features of a client's images during training.

    Args:
        backbone: the frozen model.
        data: the images.
        query: ``canonical``: of each unaugmented image, computed once for all epochs and rounds;
            ``view``: of each augmented view, which costs a further forward pass per batch.
        batch: images per pass of the canonical queries.
    """

    def __init__(self, backbone: Backbone, data: ImageSet, query: Query, batch: int) -> None:
        self._backbone = backbone
        self._canonical: Tensor | None = None  # (N, d)
        if query == "canonical":
            # To the CPU even for a GPU: cached images need not go there.
            plain = plain_batches(data, batch, "cpu")
            chunks = [query_features(backbone, pixels) for _, pixels in plain]
            empty = torch.zeros(0, backbone.info.dim, device=backbone.device)
            self._canonical = torch.cat([empty, *chunks])

    def of(self, index: NDArray[np.int64] | Tensor, pixels: Tensor) -> Tensor:
        """Return the queries (B, d) of the images ``index`` (B,), seen as ``pixels``."""
        if self._canonical is None:
            return query_features(self._backbone, pixels)
        return self._canonical[torch.as_tensor(index, device=self._canonical.device)]


def _attach(view: Any, block: int, name: str) -> PrefixAttention:
    # Here, because the backbone's torchvision shim must come first.
    from timm.models.vision_transformer import Attention

    attention = view.blocks[block].attn
    qkv, d = attention.qkv, int(view.embed_dim)
    norms = [getattr(attention, n, nn.Identity()) for n in ("q_norm", "k_norm", "norm")]
    plain = (
        isinstance(attention, Attention)
        and qkv.in_features == d
        and qkv.out_features == 3 * d
        and getattr(attention, "gate", None) is None
        and all(isinstance(norm, nn.Identity) for norm in norms)
    )
    if not plain:
        raise DataError(
            f"the attention of the model {name!r} has norms or gates of its own; prompts need a "
            "plain one.",
            action="Choose a timm ViT such as 'vit_base_patch16_224.dino'.",
        )
    layer = PrefixAttention(attention)
    view.blocks[block].attn = layer
    return layer
