"""Payloads that belong to the protocol, not to a method."""

from __future__ import annotations

from fcil_protocol.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

INVENTORY = "inventory"  # upload: which classes a client holds, and how many images of each
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
