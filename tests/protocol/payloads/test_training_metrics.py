"""Training metrics in an upload: two numbers beside the method's own content, or none."""

import math

import numpy as np
import pytest

from fcil_protocol.payloads.builtin import (
    metric_faults,
    training_metrics,
    with_training_metrics,
    without_training_metrics,
)
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec
from fcil_protocol.payloads.upload_rules import schema_faults

PLAIN = PayloadSchema((TensorSpec("n", Kind.COUNT, (1,), "I64"),), (MetaSpec("step", "int"),))
OWN = Payload({"n": np.ones(1, np.int64)}, {"step": 3})
BOTH = Payload(OWN.tensors, {"step": 3, "train_loss": 0.25, "train_accuracy": 0.5})


def test_a_schema_takes_both_one_or_none():
    schema = with_training_metrics(PLAIN)
    loss = Payload(OWN.tensors, {"step": 3, "train_loss": 1})
    for payload in (OWN, BOTH, loss):
        assert schema.check(payload, {}) == []
    assert PLAIN.check(BOTH, {}) == [
        "field 'train_accuracy' is not in the schema",
        "field 'train_loss' is not in the schema",
    ]
    assert schema_faults(PLAIN, ()) == []


def test_the_methods_part_is_what_it_was():
    assert without_training_metrics(BOTH).meta == OWN.meta
    assert training_metrics(unpack(pack(BOTH))) == {"train_loss": 0.25, "train_accuracy": 0.5}
    assert training_metrics(OWN) == {}


@pytest.mark.parametrize("value", [True, "0.5", [0.5], 10**400])
def test_what_is_no_number_is_refused_by_the_schema(value):
    wrong = Payload(OWN.tensors, {"step": 3, "train_loss": value})
    assert with_training_metrics(PLAIN).check(wrong, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_loss", 1e7), ("train_loss", -1e7), ("train_loss", math.inf),
        ("train_loss", math.nan), ("train_accuracy", 1.01), ("train_accuracy", -0.01),
        ("train_accuracy", math.nan),
    ],
)  # fmt: skip
def test_what_no_training_has_is_refused_with_a_sentence(name, value):
    (fault,) = metric_faults({name: value})
    assert fault.startswith(f"field {name!r}: expected a number from ")


def test_possible_values_have_no_fault():
    assert metric_faults({"train_loss": -0.1, "train_accuracy": 1.0}) == []


def test_a_method_cannot_declare_these_fields_itself():
    assert schema_faults(with_training_metrics(PLAIN), ()) == [
        "field 'train_loss' is the protocol's own",
        "field 'train_accuracy' is the protocol's own",
    ]
