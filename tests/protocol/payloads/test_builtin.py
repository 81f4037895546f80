"""The protocol's own payloads: what their schemas let through and what not."""

from __future__ import annotations

import numpy as np
import pytest

from fcil_protocol.payloads.builtin import (
    EVALUATE,
    EVALUATE_SCHEMA,
    INVENTORY,
    INVENTORY_SCHEMA,
    REGISTRY,
    REGISTRY_SCHEMA,
)
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import PayloadSchema


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def inventory(**changes: object) -> Payload:
    fields = {"train": ints(5, 0), "test": ints(1, 2), "names": ["cat", "Käse"]} | changes
    return Payload({k: fields[k] for k in ("train", "test")}, {"names": fields["names"]})


def registry(**changes: object) -> Payload:
    fields = {"class": ints(3, 7), "task": ints(0, 1), "names": ["cat", "Käse"]} | changes
    return Payload({k: fields[k] for k in ("class", "task")}, {"names": fields["names"]})


def evaluation(**changes: object) -> Payload:
    fields = {
        "classes": ints(0, 4),
        "correct": ints(3, 0),
        "total": ints(5, 9),
        "n": ints(14),
    } | changes
    return Payload(fields, {})


SAMPLES: list[tuple[PayloadSchema, Payload, dict[str, int]]] = [
    (INVENTORY_SCHEMA, inventory(), {"max_classes": 2}),
    (REGISTRY_SCHEMA, registry(), {}),
    (EVALUATE_SCHEMA, evaluation(), {"seen": 2}),
]
KINDS = pytest.mark.parametrize(
    ("schema", "payload", "dims"), SAMPLES, ids=[INVENTORY, REGISTRY, EVALUATE]
)


@KINDS
def test_a_full_payload_passes(schema: PayloadSchema, payload: Payload, dims: dict) -> None:
    assert schema.check(payload, dims) == []


@KINDS
def test_every_tensor_is_needed_and_no_other_is_allowed(
    schema: PayloadSchema, payload: Payload, dims: dict
) -> None:
    for name in payload.tensors:
        rest = {k: v for k, v in payload.tensors.items() if k != name}
        assert schema.check(Payload(rest, payload.meta), dims) == [f"tensor {name!r} is missing"]
    more = Payload({**payload.tensors, "pixels": ints(1)}, payload.meta)
    assert schema.check(more, dims) == ["tensor 'pixels' is not in the schema"]


@KINDS
def test_no_field_but_the_class_names_is_allowed(
    schema: PayloadSchema, payload: Payload, dims: dict
) -> None:
    more = Payload(payload.tensors, {**payload.meta, "path": "images/cat"})
    assert schema.check(more, dims) == ["field 'path' is not in the schema"]


@KINDS
def test_counts_are_whole_and_not_negative(
    schema: PayloadSchema, payload: Payload, dims: dict
) -> None:
    for name, array in payload.tensors.items():
        for wrong in (-array - 1, array.astype(np.float32), array.astype(np.int32)):
            faults = schema.check(Payload({**payload.tensors, name: wrong}, payload.meta), dims)
            assert any(name in fault for fault in faults), (name, wrong.dtype)


@KINDS
def test_tensors_that_belong_together_have_the_same_length(
    schema: PayloadSchema, payload: Payload, dims: dict
) -> None:
    for name, array in payload.tensors.items():
        longer = np.concatenate([array, array])
        assert schema.check(Payload({**payload.tensors, name: longer}, payload.meta), dims)


def test_no_more_classes_than_the_server_takes_of_one_client() -> None:
    assert INVENTORY_SCHEMA.check(inventory(), {"max_classes": 1})


def test_no_more_results_than_classes_were_seen() -> None:
    assert EVALUATE_SCHEMA.check(evaluation(), {"seen": 1})


@pytest.mark.parametrize(
    "names",
    [["cat", " dog"], ["cat", ""], ["cat", "a\nb"], ["cat", "x" * 129], ["cat", 7], "cat"],
    ids=["untrimmed", "empty", "control", "long", "number", "text"],
)
def test_a_class_name_that_is_no_class_name_does_not_pass(names: object) -> None:
    assert INVENTORY_SCHEMA.check(inventory(names=names), {"max_classes": 9})
    assert REGISTRY_SCHEMA.check(registry(names=names), {})


def test_a_folder_without_any_class_is_an_inventory_too() -> None:
    empty = inventory(train=ints(), test=ints(), names=[])
    assert INVENTORY_SCHEMA.check(empty, {"max_classes": 9}) == []


def test_the_names_do_not_change() -> None:
    """They are on the wire and in every stored run."""
    assert (INVENTORY, REGISTRY, EVALUATE) == ("inventory", "registry", "evaluate")
