"""LoRM's uploads as sums: the same merge without a client's own weights (torch-free).

`merging.RegMean` needs ``sum_k w_k W_k``, ``sum_k w_k G_k`` and ``sum_k w_k W_k G_k``. The written
upload has the merged weights; the server's merge of this single upload returns them unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fcil_adapters.contract import Additive, BackboneInfo, Payload, Sums, SumSpec, TensorSpec
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.methods.lorm.parts import (
    F64,
    HEAD_ROOT,
    root_name,
    root_names,
    root_specs,
)
from fcil_adapters.numerics.symmetric import pack_triangle, unpack_triangle
from fcil_adapters.numerics.weighted_sums import IMAGES, Weight, count_sum, weighted_sums
from fcil_adapters.toolkit.heads.rows import HEAD
from fcil_adapters.toolkit.lora.manifest import round_factors

_CLIENTS = "clients_with_images"
_GRAM, _PRODUCT, _SENT = "gram.", "product.", "sent."
# As many digits as the sum allows: the merge divides by the products' small eigenvalues. Mean
# squares of inputs up to 2^6, of 2^26 images.
_BITS, _BOUND = 30, 2.0**32


def train_sums(h: LormHparams, specs: Iterable[TensorSpec], backbone: BackboneInfo) -> Additive:
    """Return the sums of a training round's uploads.

    Args:
        h: weights and eps.
        specs: of the upload without its tally and its roots.
        backbone: widths of the modules.
    """
    usual: Weight = "images" if h.weights == "samples" else "clients"
    tensors = tuple(specs)
    weights: dict[str, Weight] = {"mean": "lone_class"}
    base = weighted_sums((spec, weights.get(spec.name, usual)) for spec in tensors)
    merged = [_Merged.of(spec, backbone, h) for spec in tensors if _is_merged(spec.name)]
    factors = round_factors(h)
    more = [
        *(spec for one in merged for spec in one.specs()),
        *(count_sum(_SENT + factor) for factor in factors),
        count_sum(_CLIENTS),
    ]

    def read(payload: Payload) -> dict[str, F64]:
        there, weight = _weights(h, payload)
        sums = {**base.read(payload), _CLIENTS: there}
        for factor in factors:
            sent = any(n.startswith("lora.") and n.endswith(factor) for n in payload.tensors)
            sums[_SENT + factor] = there * sent
        for one in merged:
            sums |= one.read(payload, float(weight[0]))
        return sums

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        made = base.write(sums, classes)
        total = float(sums[_weighed_by(h)][0])
        tensors = dict(made.tensors)
        for one in merged:
            name = one.spec.name
            if name.startswith("lora.") and not sums[_SENT + name[-1]].any():
                tensors.pop(name, None)
                continue
            tensors |= one.write(sums, made.f32(name).astype(np.float64), max(total, 1.0))
        return Payload(tensors)

    return Additive((*base.sums, *more), read, write, base.noised)


def finish_sums(h: LormHparams, backbone: BackboneInfo) -> Additive:
    """Return the sums of the squared inputs of the layers."""
    roots = root_specs(root_names(h, "A"), backbone)
    names = [spec.name for spec in roots]
    base = weighted_sums([])
    specs = (
        *base.sums,
        count_sum(_CLIENTS),
        *(SumSpec(spec.name, spec.shape, _BITS, _BOUND) for spec in roots),
    )

    def read(payload: Payload) -> dict[str, F64]:
        there, weight = _weights(h, payload)
        squares = {n: weight * np.square(payload.f32(n).astype(np.float64)) for n in names}
        return {**base.read(payload), _CLIENTS: there, **squares}

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        total = np.maximum(sums[_weighed_by(h)], 1)
        found = {n: np.sqrt(np.maximum(sums[n], 0) / total).astype(np.float32) for n in names}
        return Payload({**base.write(sums, classes).tensors, **found})

    return Additive(specs, read, write)


def _weights(h: LormHparams, payload: Payload) -> tuple[F64, F64]:
    """Return 1 for a client with images, else 0, and its weight; both (1,)."""
    images = payload.i64("n").astype(np.float64)
    there = (images > 0).astype(np.float64)
    return there, images if h.weights == "samples" else there


def _weighed_by(h: LormHparams) -> str:
    """Return the name of the sum of the clients' weights."""
    return IMAGES if h.weights == "samples" else _CLIENTS


def _is_merged(name: str) -> bool:
    return name.startswith("lora.") or name == HEAD[0]


@dataclass(frozen=True)
class _Merged:
    """One merged weight, and the root of its inputs' products.

    Attributes:
        spec: of the weight, (out, n).
        root: of its root: an upper triangle (n (n + 1) / 2,), or a diagonal (n,).
        eps: of the merge.
    """

    spec: TensorSpec
    root: TensorSpec
    eps: float

    @classmethod
    def of(cls, spec: TensorSpec, backbone: BackboneInfo, h: LormHparams) -> _Merged:
        name = root_name(spec.name)
        (root,) = root_specs((name,), backbone)
        return cls(spec, root, h.eps)

    @property
    def diagonal(self) -> bool:
        return self.root.name != HEAD_ROOT and self.root.name.endswith(".A")

    def specs(self) -> tuple[SumSpec, SumSpec]:
        return (
            SumSpec(_GRAM + self.spec.name, self.root.shape, _BITS, _BOUND),
            SumSpec(_PRODUCT + self.spec.name, self.spec.shape, _BITS, _BOUND),
        )

    def read(self, payload: Payload, weight: float) -> dict[str, F64]:
        """Return w G, packed, and w W G; empty where the client has sent none."""
        gram, product = (spec.name for spec in self.specs())
        if self.spec.name not in payload.tensors or self.root.name not in payload.tensors:
            return {gram: np.zeros(0), product: np.zeros(0)}
        W = payload.f32(self.spec.name).astype(np.float64)
        root = payload.f32(self.root.name).astype(np.float64)
        if self.diagonal:
            squares: F64 = weight * np.square(root)
            return {gram: squares, product: W * squares}
        R = np.triu(unpack_triangle(root, W.shape[1]))
        G = weight * (R.T @ R)
        return {gram: pack_triangle(G), product: W @ G}

    def write(self, sums: Sums, mean: F64, total: float) -> dict[str, np.ndarray]:
        """Return the merge around the mean weights (out, n), and the root of the mean products."""
        # Only a server that has torch writes uploads; clients' daemons read theirs without it.
        from fcil_adapters.methods.lorm import merging
        from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch

        gram, product = (sums[spec.name] / total for spec in self.specs())
        if self.diagonal:
            G, moved, root = gram, product - mean * gram, np.sqrt(np.maximum(gram, 0))
        else:
            G = unpack_triangle(gram, mean.shape[1])
            moved = product - mean @ G
            root = to_numpy(merging.pack_triangle(merging.root_of(to_torch(G))))
        around = merging.RegMean(to_torch(mean), to_torch(moved), to_torch(G))
        return {
            self.spec.name: to_numpy(around.merged(self.eps)),
            self.root.name: root.astype(np.float32),
        }
