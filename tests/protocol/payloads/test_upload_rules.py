"""What no method may declare in an upload, whatever else its schema says."""

import numpy as np
import pytest

from fcil_protocol import Kind, MetaSpec, Payload, PayloadSchema, TensorSpec
from fcil_protocol.payloads.builtin import inventory_faults, result_faults
from fcil_protocol.payloads.upload_rules import schema_faults

GOOD = TensorSpec("head", Kind.HEAD, ("rows", "d"))
META = (MetaSpec("task", "int"), MetaSpec("loss", "float"), MetaSpec("done", "bool"))


def faults(*tensors, meta=(), at_most=(("rows", "classes"),)):
    return schema_faults(PayloadSchema((GOOD, *tensors), META + meta, at_most), {"d", "classes"})


def test_numbers_of_known_kinds_and_bounded_sizes_may_leave():
    assert faults() == []
    assert faults(TensorSpec("n", Kind.COUNT, (1,), "I64"), TensorSpec("m", "gram", ("d",))) == []


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorSpec("x", "image", ("d",)), "'x' is of kind 'image', allowed are lora, prompt"),
        (TensorSpec("x", "", ("d",)), "'x' is of kind ''"),
        (TensorSpec("x", "i" * 900, ("d",)), "'x' is of kind 'iii"),
        (TensorSpec("x", Kind.GRAM, ("d",), "F64"), "'x' has dtype 'F64', allowed are F32"),
        (TensorSpec("x", Kind.GRAM, ("d", "any")), "'x': nothing bounds its size 'any'"),
        (TensorSpec("x", Kind.GRAM, ("d",), max_abs=float("inf")), "'x' has no finite bound"),
        (TensorSpec("x", Kind.GRAM, ("d",), max_abs=float("nan")), "'x' has no finite bound"),
        (TensorSpec("x", Kind.GRAM, (1.5, "d")), "'x': its size 1.5 is neither a whole number nor"),
        (TensorSpec("head", Kind.HEAD, ("d",)), "'head' is declared 2 times"),
        (TensorSpec("x", Kind.SUM, ("d",), "I64"), "'x' is of kind 'sum', which relays alone send"),
    ],
)
def test_a_tensor_of_another_form_may_not(tensor, words):
    (fault,) = faults(tensor)
    assert words in fault
    assert len(fault) < 200


@pytest.mark.parametrize("of_type", ["text", "str", "class_names", "ints", "x" * 900])
def test_neither_text_nor_a_list_without_a_length_may(of_type):
    (fault,) = faults(meta=(MetaSpec("note", of_type),))
    assert fault.startswith("field 'note' is of type '")
    assert fault.endswith("allowed are int, float, bool")
    assert len(fault) < 120


def test_a_bound_that_nobody_knows_is_none():
    (fault,) = faults(at_most=(("rows", "mystery"),))
    assert "nothing bounds its size 'rows'" in fault


def test_every_fault_is_said():
    assert len(faults(TensorSpec("x", "image", ("any",), "F64"), meta=(MetaSpec("a", "b"),))) == 4


# --- what belongs to the protocol -----------------------------------------------------------


def inventory(names=("cat", "dog"), train=(3, 4), test=(1, 0), **changes):
    arrays = {"train": np.array(train, np.int64), "test": np.array(test, np.int64)}
    return Payload(arrays | changes, {"names": list(names)})


def test_an_inventory_is_names_and_two_counts_of_each():
    assert inventory_faults(inventory()) == []
    assert inventory_faults(inventory((), (), ())) == []


@pytest.mark.parametrize(
    "payload",
    [
        inventory(names=["cat"]),
        inventory(names=["cat", "two\nlines"]),
        inventory(names=["cat", "x" * 129]),
        inventory(names=["cat", "cat"]),
        inventory(train=(3, 10**9 + 1)),
        inventory(test=(1, -1)),
        inventory(test=(1,)),
        inventory(images=np.zeros((2, 32), np.uint8)),
        inventory(train=()),
        Payload(inventory().tensors, {"names": ["cat", "dog"], "path": "/home"}),
        Payload(inventory().tensors, {"names": "cat, dog"}),
        Payload(inventory().tensors, {}),
    ],
)
def test_anything_else_is_none(payload):
    assert inventory_faults(payload)


def test_it_names_no_more_classes_than_are_allowed():
    assert inventory_faults(inventory(), max_classes=2) == []
    assert inventory_faults(inventory(), max_classes=1)


def results(classes=(0, 2), correct=(1, 2), total=(3, 2), n=(5,)):
    rows = {"classes": classes, "correct": correct, "total": total, "n": n}
    return Payload({name: np.array(row, np.int64) for name, row in rows.items()})


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (results((0, 3)), "classes seen so far"),
        (results((2, 2)), "distinct"),
        (results(correct=(1, 3)), "'correct' exceeds 'total'"),
        (results(n=(6,)), "'n' is not the sum of 'total'"),
    ],
)
def test_results_are_of_seen_classes_each_once_and_not_better_than_possible(payload, words):
    (fault,) = result_faults(payload, (0, 1, 2))
    assert words in fault


def test_consistent_results_have_no_fault():
    assert result_faults(results(), (0, 1, 2)) == []
