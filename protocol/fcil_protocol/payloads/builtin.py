"""Payloads that belong to the protocol, not to a method."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import MAX_CLASS_NAMES, Kind, MetaSpec, PayloadSchema, TensorSpec

INVENTORY = "inventory"  # upload: classes of a client, and the number of its images of each
REGISTRY = "registry"  # part, for one client: names <-> ids of the classes that it holds
EVALUATE = "evaluate"  # upload: per-class results of the global model on a client's test images
LATE = "late"  # upload, as the method says: of images that no earlier update of the client counts

# Metadata of a trained update that belongs to no method: how the client's training went.
TRAIN_LOSS = "train_loss"  # mean over the images of the last epoch
TRAIN_ACCURACY = "train_accuracy"  # share of them, 0 to 1, that the model in training got right
TRAINING_METRICS = (TRAIN_LOSS, TRAIN_ACCURACY)
MAX_LOSS = 1e6  # size of a loss; a larger one says nothing


def _counts(name: str, rows: str) -> TensorSpec:
    return TensorSpec(name, Kind.COUNT, (rows,), "I64", non_negative=True)


INVENTORY_SCHEMA = PayloadSchema(
    tensors=(_counts("train", "classes"), _counts("test", "classes")),
    meta=(MetaSpec("names", "class_names"),),
    at_most=(("classes", "max_classes"),),
)
REGISTRY_SCHEMA = PayloadSchema(
    tensors=(_counts("class", "names"), _counts("task", "names")),
    meta=(MetaSpec("names", "class_names"),),
)
EVALUATE_SCHEMA = PayloadSchema(
    tensors=(
        _counts("classes", "own"),
        TensorSpec("correct", Kind.METRIC, ("own",), "I64", non_negative=True),
        _counts("total", "own"),
        TensorSpec("n", Kind.COUNT, (1,), "I64", non_negative=True),
    ),
    at_most=(("own", "seen"),),
)


def inventory_faults(payload: Payload, max_classes: int = MAX_CLASS_NAMES) -> list[str]:
    """Return every way in which a payload is no inventory of at most ``max_classes`` classes."""
    faults = INVENTORY_SCHEMA.check_upload(payload, {"max_classes": max_classes})
    if not faults:
        names = payload.meta["names"]
        assert isinstance(names, list), "the schema says so"
        if len(names) != len(payload.tensors["train"]):
            faults = ["names and counts differ in number"]
        elif len(set(names)) != len(names):
            faults = ["a class is named twice"]
    return faults


def result_faults(payload: Payload, seen: Collection[int]) -> list[str]:
    """Return the inconsistencies of a payload that keeps `EVALUATE_SCHEMA`.

    Args:
        payload: the results.
        seen: ids of the classes seen so far.
    """
    classes = payload.i64("classes").tolist()
    if len(set(classes)) != len(classes) or not set(classes) <= set(seen):
        return ["'classes' must be distinct ids of classes seen so far"]
    if (payload.i64("correct") > payload.i64("total")).any():
        return ["'correct' exceeds 'total'"]
    if payload.i64("n").sum() != payload.i64("total").sum():
        return ["'n' is not the sum of 'total'"]
    return []


def with_training_metrics(schema: PayloadSchema) -> PayloadSchema:
    """Return the schema of uploads that may hold `TRAINING_METRICS` too."""
    specs = (MetaSpec(name, "float", optional=True) for name in TRAINING_METRICS)
    return replace(schema, meta=(*schema.meta, *specs))


def training_metrics(payload: Payload) -> dict[str, float]:
    """Return the training metrics of an upload, by name: none, the loss, or both."""
    found = {name: payload.meta[name] for name in TRAINING_METRICS if name in payload.meta}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def without_training_metrics(payload: Payload) -> Payload:
    """Return the method's own part of an upload."""
    own = {name: value for name, value in payload.meta.items() if name not in TRAINING_METRICS}
    return replace(payload, meta=own)


def metric_faults(metrics: Mapping[str, float]) -> list[str]:
    """Return every way in which training metrics are not possible."""
    ranges = {TRAIN_LOSS: (-MAX_LOSS, MAX_LOSS), TRAIN_ACCURACY: (0.0, 1.0)}
    return [
        f"field {name!r}: expected a number from {low:g} to {high:g}, got {metrics[name]:g}"
        for name, (low, high) in ranges.items()
        if name in metrics and not (math.isfinite(metrics[name]) and low <= metrics[name] <= high)
    ]
