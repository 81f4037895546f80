"""Uploads of means as sums, which a server can add up without seeing one of them (torch-free).

A server that sees sums alone cannot weight clients by what they sent, so each client sends n_k
times its means, and the server divides the sum by the sum of the n_k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from fcil_adapters.contract.averaging import F64, Additive, NoisedSum, Sums, SumSpec
from fcil_adapters.numerics.class_means import I64, class_positions
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Dim, Kind, TensorSpec

COUNT = "count"  # images of each class (c,)
IMAGES = "images"  # images of all classes (1,)
_CLIENTS = "clients"  # clients with an image (1,)
_UPLOADS = "uploads"  # uploads, of clients with or without images (1,)
_DESCRIBED = "described"  # images of each class, of the clients that describe it (c,)
_OWNED = "owned"  # ids of the classes that an upload describes

# The weight by which a client multiplies a tensor; the server divides by the sum of these weights:
# - images: all of the client's images;
# - classes: its images of each class, for a tensor whose last c rows are the task's classes;
# - described: its images of each class that it describes, for a tensor with a row for each of these
#   (`class_reports.report_specs`);
# - clients: 1, if it has an image.
Weight = Literal["images", "classes", "described", "clients"]


# Kind -> (binary digits after the point, largest sum). For LoRA: means up to 2^6, 2^26 images.
_FIXED_POINT = {
    Kind.LORA: (30, 2.0**32),
    Kind.HEAD: (30, 2.0**32),
    Kind.PROMPT: (30, 2.0**32),
    Kind.KEY: (30, 2.0**32),
    Kind.GRAM: (30, 2.0**32),
    Kind.PROTOTYPE: (28, 2.0**34),
    Kind.IMPORTANCE: (24, 2.0**38),
    Kind.COUNT: (0, 2.0**40),
}


def sum_spec(spec: TensorSpec) -> SumSpec:
    """Return the sum of a tensor, with the bits and the bound of its kind."""
    bits, bound = _FIXED_POINT[spec.kind]
    return SumSpec(spec.name, spec.shape, bits, bound)


def count_sum(name: str, rows: Dim = 1) -> SumSpec:
    """Return the sum of a vector of counts."""
    bits, bound = _FIXED_POINT[Kind.COUNT]
    return SumSpec(name, (rows,), bits, bound)


def weighted_sums(weights: Iterable[tuple[TensorSpec, Weight]]) -> Additive:
    """Return the sums of uploads of means, each weighted by images, and of a ``tally``.

    Args:
        weights: the tensors, each with its weight.
    """
    tensors = dict(weights)
    used = {*tensors.values()}
    specs = [_row_sums(sum_spec(s), w) for s, w in tensors.items()]
    specs += [count_sum(COUNT, "c"), count_sum(IMAGES)]
    specs += [count_sum(_DESCRIBED, "c")] if "described" in used else []
    specs += [count_sum(_CLIENTS)] if "clients" in used else []

    def read(payload: Payload) -> dict[str, F64]:
        counts, images = (payload.i64(n).astype(np.float64) for n in (COUNT, "n"))
        rows = np.zeros(0, np.int64)
        if "described" in used:
            rows = class_positions(payload.i64(_OWNED), payload.i64("classes").tolist())
        known = {
            COUNT: counts,
            IMAGES: images,
            _DESCRIBED: _spread(counts[rows], rows, len(counts)),
            _CLIENTS: (images > 0).astype(np.float64),
        }
        sums = {spec.name: known[spec.name] for spec in specs if spec.name in known}
        for spec, weight in tensors.items():
            values = payload.tensors.get(spec.name)
            if values is None:
                sums[spec.name] = np.zeros(0)  # `dense` knows its shape
            else:
                if weight == "described":
                    values = _spread(values, rows, len(counts))
                factor = _factors(weight, known, len(values), values.ndim)
                sums[spec.name] = factor * np.asarray(values, np.float64)
        return sums

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        out: dict[str, Array] = {
            "classes": np.asarray(classes, np.int64),
            COUNT: np.rint(sums[COUNT]).astype(np.int64),
            "n": np.rint(sums[IMAGES]).astype(np.int64),
        }
        described = np.flatnonzero(sums.get(_DESCRIBED, np.zeros(0)))
        if "described" in used:
            out[_OWNED] = np.asarray(classes, np.int64)[described]
        for spec, weight in tensors.items():
            total = sums[spec.name]
            factor = _factors(weight, sums, len(total), total.ndim)
            mean = (total / np.maximum(factor, 1)).astype(np.float32)
            out[spec.name] = mean[described] if weight == "described" else mean
        return Payload(out)

    of_classes = (
        NoisedSum(spec.name, 1, (spec.name,))
        for spec, weight in tensors.items()
        if weight in ("classes", "described") and spec.kind is Kind.PROTOTYPE
    )
    return Additive(tuple(specs), read, write, tuple(of_classes))


def with_common_bytes(additive: Additive, spec: TensorSpec) -> Additive:
    """Return the sums of uploads that have a tensor of bytes too, the same for all clients.

    Bytes that differ become zeros or a mean that is no digest of anything, so that a check of them
    fails.
    """
    specs = (*additive.sums, replace(count_sum(spec.name), shape=spec.shape), count_sum(_UPLOADS))

    def read(payload: Payload) -> dict[str, F64]:
        own = payload.tensors[spec.name].astype(np.float64)
        return {**additive.read(payload), spec.name: own, _UPLOADS: np.ones(1)}

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        made = additive.write(sums, classes)
        mean, rest = np.divmod(sums[spec.name], np.maximum(sums[_UPLOADS], 1))  # whole numbers
        common = np.zeros_like(mean) if rest.any() else mean.clip(0, 255)
        return Payload({**made.tensors, spec.name: common.astype(np.uint8)})

    return Additive(specs, read, write, additive.noised)


def _spread(values: Array, rows: I64, count: int) -> F64:
    """Return an array of ``count`` rows: the given ones at ``rows``, and zeros."""
    spread = np.zeros((count, *values.shape[1:]))
    spread[rows] = values
    return spread


def _row_sums(spec: SumSpec, weight: Weight) -> SumSpec:
    """Return the spec with a row for each class of the task, described by this client or not."""
    return replace(spec, shape=("c", *spec.shape[1:])) if weight == "described" else spec


def _factors(weight: Weight, known: Sums, rows: int, dims: int) -> F64:
    """Return the weight of each row of a tensor, in a shape that multiplies it."""
    if weight == "classes":
        counts = known[COUNT]
        column = np.concatenate([np.zeros(rows - len(counts)), counts])
        return column.reshape((-1,) + (1,) * (dims - 1))
    name = {"images": IMAGES, "described": _DESCRIBED, "clients": _CLIENTS}[weight]
    return known[name].reshape((-1,) + (1,) * (dims - 1))


def dense(sums: Mapping[str, F64], spec: SumSpec, shape: tuple[int, ...]) -> F64:
    """Return one client's sum in the shape that all clients send; zeros if it has none.

    Raises:
        DataError: it has another shape.
    """
    values = sums[spec.name]
    if values.size == 0:
        return np.zeros(shape)
    if values.shape != shape:
        raise DataError(f"the sum {spec.name!r}: expected shape {shape}, got {values.shape}.")
    return values
