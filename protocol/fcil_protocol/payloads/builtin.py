"""Payloads that belong to the protocol, not to a method."""

from __future__ import annotations

from collections.abc import Collection

from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import MAX_CLASS_NAMES, Kind, MetaSpec, PayloadSchema, TensorSpec

INVENTORY = "inventory"  # upload: classes of a client, and the number of its images of each
REGISTRY = "registry"  # part, for one client: names <-> ids of the classes that it holds
EVALUATE = "evaluate"  # upload: per-class results of the global model on a client's test images


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
    faults = INVENTORY_SCHEMA.check(payload, {"max_classes": max_classes})
    if not faults:
        names = payload.meta["names"]
        assert isinstance(names, list), "the schema says so"
        if len(names) != len(payload.tensors["train"]):
            faults = ["names and counts differ in number"]
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
    return []
