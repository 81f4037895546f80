"""Schemas: every way in which a payload can break one is found and said."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil_protocol import Kind, MetaSpec, Payload, PayloadSchema, TensorSpec
from fcil_protocol.payloads import schema as schema_module
from fcil_protocol.payloads.payload import WIRE_DTYPES
from fcil_protocol.payloads.schema import class_key, class_name_fault, normalise_class_name

DIMS = {"d": 4, "classes": 3}
SCHEMA = PayloadSchema(
    tensors=(
        TensorSpec("head", Kind.HEAD, ("rows", "d"), max_abs=10.0),
        TensorSpec("n", Kind.COUNT, ("rows",), "I64", non_negative=True),
        TensorSpec("extra", Kind.GRAM, (2, "d"), "F16", optional=True),
    ),
    meta=(
        MetaSpec("count", "int"),
        MetaSpec("loss", "float", optional=True),
        MetaSpec("done", "bool", optional=True),
        MetaSpec("ids", "ints", optional=True),
        MetaSpec("names", "class_names", optional=True),
    ),
    at_most=(("rows", "classes"),),
)


def payload(tensors: dict | None = None, **meta) -> Payload:
    good = {
        "head": np.ones((2, 4), dtype=np.float32),
        "n": np.array([1, 2], dtype=np.int64),
    }
    merged = {**good, **(tensors or {})}
    return Payload({k: v for k, v in merged.items() if v is not None}, {"count": 1, **meta})


def f32(*shape: int, fill: float = 1.0) -> np.ndarray:
    return np.full(shape, fill, dtype=np.float32)


def test_a_payload_that_keeps_the_schema_has_no_faults():
    assert SCHEMA.check(payload(), DIMS) == []
    full = payload(
        {"extra": np.zeros((2, 4), dtype=np.float16)},
        loss=0.5,
        done=True,
        ids=[1, 2],
        names=["cat", "dog"],
    )
    assert SCHEMA.check(full, DIMS) == []


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_free_dimension_takes_any_value_up_to_its_bound(rows):
    own = payload({"head": f32(rows, 4), "n": np.ones(rows, dtype=np.int64)})
    assert SCHEMA.check(own, DIMS) == []


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"images": f32(1)}, "tensor 'images' is not in the schema"),
        ({"head": None}, "tensor 'head' is missing"),
        ({"head": np.ones((2, 4))}, "tensor 'head': expected dtype float32, got float64"),
        ({"n": f32(2)}, "tensor 'n': expected dtype int64, got float32"),
        ({"head": f32(2)}, "tensor 'head': expected shape"),
        ({"head": f32(2, 4, 1)}, "tensor 'head': expected shape"),
        ({"head": f32(2, 5)}, "tensor 'head': expected shape ('rows', 4), got (2, 5)"),
        ({"head": f32(4, 4)}, "tensor 'head': expected rows <= 3, got 4 rows"),
        ({"n": np.ones(3, dtype=np.int64)}, "tensor 'n': expected shape (2,), got (3,)"),
        ({"extra": np.zeros((3, 4), dtype=np.float16)}, "tensor 'extra': expected shape (2, 4)"),
        ({"head": f32(2, 4, fill=np.nan)}, "tensor 'head' holds NaN or infinity"),
        ({"head": f32(2, 4, fill=np.inf)}, "tensor 'head' holds NaN or infinity"),
        ({"head": f32(2, 4, fill=-np.inf)}, "tensor 'head' holds NaN or infinity"),
        ({"head": f32(2, 4, fill=-10.5)}, "tensor 'head': largest value 10.5 exceeds 10"),
        ({"n": np.array([3, -1])}, "tensor 'n' holds a negative number"),
    ],
)
def test_every_fault_of_a_tensor_is_found_and_said(tensors, expected):
    (fault,) = SCHEMA.check(payload(tensors), DIMS)
    assert fault.startswith(expected)


@pytest.mark.parametrize("position", [0, 3, 7])
def test_one_bad_element_anywhere_is_enough(position):
    for bad in (np.nan, np.inf, 10.001):
        head = f32(2, 4)
        head.flat[position] = bad
        assert len(SCHEMA.check(payload({"head": head}), DIMS)) == 1


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({"path": "/home"}, "field 'path' is not in the schema"),
        ({"count": True}, "field 'count' is not of type int"),
        ({"count": 1.0}, "field 'count' is not of type int"),
        ({"count": "1"}, "field 'count' is not of type int"),
        ({"loss": True}, "field 'loss' is not of type float"),
        ({"loss": float("nan")}, "field 'loss' is not of type float"),
        ({"loss": float("inf")}, "field 'loss' is not of type float"),
        ({"loss": 10**400}, "field 'loss' is not of type float"),
        ({"count": 2**63}, "field 'count' is not of type int"),
        ({"ids": [-(10**400)]}, "field 'ids' is not of type ints"),
        ({"done": 1}, "field 'done' is not of type bool"),
        ({"ids": 1}, "field 'ids' is not of type ints"),
        ({"ids": [1, True]}, "field 'ids' is not of type ints"),
        ({"ids": [1.0]}, "field 'ids' is not of type ints"),
        ({"names": "cat"}, "field 'names' is not of type class_names"),
        ({"names": ["cat", 3]}, "field 'names' is not of type class_names"),
        ({"names": ["two\nlines"]}, "field 'names' is not of type class_names"),
        ({"names": ["x" * 129]}, "field 'names' is not of type class_names"),
    ],
)
def test_every_fault_of_a_field_is_found_and_said(meta, expected):
    assert SCHEMA.check(payload(**meta), DIMS) == [expected]


def test_a_missing_field_is_said():
    own = payload()
    assert SCHEMA.check(Payload(own.tensors, {}), DIMS) == ["field 'count' is missing"]


def test_too_many_class_names_are_refused(monkeypatch):
    monkeypatch.setattr(schema_module, "MAX_CLASS_NAMES", 2)
    assert SCHEMA.check(payload(names=["a", "b"]), DIMS) == []
    assert SCHEMA.check(payload(names=["a", "b", "c"]), DIMS) != []


def test_all_faults_are_listed_at_once():
    own = Payload({"x": f32(1), "n": f32(2)}, {"y": 1})
    faults = SCHEMA.check(own, DIMS)
    assert len(faults) == 5
    assert [f.split("'")[1] for f in faults] == ["x", "head", "n", "y", "count"]


def test_a_symbol_used_twice_in_one_tensor_must_agree_with_itself():
    square = PayloadSchema((TensorSpec("g", Kind.GRAM, ("k", "k")),))
    assert square.check(Payload({"g": f32(3, 3)}), {}) == []
    assert square.check(Payload({"g": f32(3, 2)}), {}) != []


def test_a_tensor_that_is_refused_does_not_fix_a_dimension_for_the_others():
    """Else one wrong tensor would make faults of all the right ones."""
    own = payload({"head": f32(4, 4), "n": np.ones(2, dtype=np.int64)})
    (fault,) = SCHEMA.check(own, DIMS)
    assert "'head'" in fault


def test_long_names_from_outside_are_cut_in_messages():
    (fault,) = SCHEMA.check(payload({"x" * 5000: f32(1)}), DIMS)
    assert len(fault) < 200


# --- size and digest ------------------------------------------------------------------------


def test_the_largest_payload_is_known_from_the_dimensions():
    assert SCHEMA.max_bytes(DIMS) == 4 * 3 * 4 + 8 * 3 + 2 * 2 * 4


def test_the_largest_form_of_each_tensor_says_whether_it_has_another():
    bounds = {b.spec.name: (b.shape, b.bytes, b.exact) for b in SCHEMA.bounds(DIMS)}
    assert bounds == {
        "head": ((3, 4), 48, False),
        "n": ((3,), 24, False),
        "extra": ((2, 4), 16, False),
    }
    assert all(b.exact for b in SCHEMA.bounds({**DIMS, "rows": 2}) if not b.spec.optional)
    (fixed,) = PayloadSchema((TensorSpec("g", Kind.GRAM, (2, "d")),)).bounds(DIMS)
    assert (fixed.shape, fixed.exact) == ((2, 4), True)


def test_the_digest_changes_with_everything_that_is_checked():
    def variant(**changes):
        spec = {
            "name": "a",
            "kind": Kind.HEAD,
            "shape": (1, "d"),
            "dtype": "F32",
            "max_abs": 1.0,
            "non_negative": False,
            "optional": False,
        }
        return PayloadSchema((TensorSpec(**{**spec, **changes}),)).digest()

    digests = [
        variant(),
        variant(name="b"),
        variant(kind=Kind.LORA),
        variant(shape=(2, "d")),
        variant(shape=(1, "k")),
        variant(dtype="F16"),
        variant(max_abs=2.0),
        variant(non_negative=True),
        variant(optional=True),
        PayloadSchema().digest(),
        PayloadSchema(meta=(MetaSpec("a", "int"),)).digest(),
        PayloadSchema(meta=(MetaSpec("a", "float"),)).digest(),
        PayloadSchema(meta=(MetaSpec("a", "int", optional=True),)).digest(),
        PayloadSchema(at_most=(("a", "b"),)).digest(),
    ]
    assert len(set(digests)) == len(digests)
    assert variant() == digests[0]


def test_the_digest_of_a_schema_is_pinned():
    """It travels in every header: an accidental change would part old and new clients."""
    assert SCHEMA.digest() == "a322e90e4b8eb1f0faa189905390f9c8fa6c53f12416d3ed697e0cfdf2912699"


# --- class names ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cat", "Käse", "großer hund", "猫", "a" * 128])
def test_good_class_names_have_no_fault(name):
    assert class_name_fault(name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "non-empty"),
        (" cat", "trimmed"),
        ("cat\t", "trimmed"),
        (unicodedata.normalize("NFD", "Käse"), "NFC"),
        ("a\nb", "printable"),
        ("a\x00b", "printable"),
        ("a\u202eb", "printable"),
        ("\ud800", "printable"),
        ("a" * 129, "128 bytes"),
        ("ä" * 65, "128 bytes"),
    ],
)
def test_bad_class_names_are_told_apart(name, words):
    assert words in (class_name_fault(name) or "")


def test_class_names_match_without_regard_to_case_and_composition():
    assert (
        class_key("Käse") == class_key(unicodedata.normalize("NFD", "KÄSE ")) != class_key("Kase")
    )


@given(st.text(max_size=20))
def test_normalising_twice_changes_nothing(name):
    once = normalise_class_name(name)
    assert normalise_class_name(once) == once
    assert class_key(once) == class_key(name)


def test_an_upload_may_not_count_what_nobody_has_and_a_broadcast_may():
    sums = payload({"n": np.array([1, schema_module.MAX_COUNT + 1], dtype=np.int64)})
    assert SCHEMA.check(sums, DIMS) == []
    assert SCHEMA.check_upload(sums, DIMS) == ["tensor 'n' holds a count above 1000000000"]
    assert SCHEMA.check_upload(payload(), DIMS) == []
    assert SCHEMA.check_upload(payload({"head": None}), DIMS) == SCHEMA.check(
        payload({"head": None}), DIMS
    )


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("values", [[1, -3, 2], [0, -0.0], [1e-7], [-6e4, 1], [-0.5, 0.5]])
def test_the_bound_is_met_to_the_last_bit(dtype, values):
    array = np.array(values, WIRE_DTYPES[dtype])
    largest = float(np.max(np.abs(array)))
    for bound, fits in ((largest, True), (np.nextafter(largest, -1), False)):
        spec = TensorSpec("w", Kind.LORA, (len(values),), dtype=dtype, max_abs=float(bound))
        assert (PayloadSchema((spec,)).check(Payload({"w": array}), {}) == []) is fits


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 8])
def test_what_is_not_finite_is_found_wherever_it_stands(dtype, bad, place):
    array = np.zeros((3, 3), WIRE_DTYPES[dtype])
    array.flat[place] = bad
    spec = TensorSpec("w", Kind.LORA, (3, 3), dtype=dtype, max_abs=1.0)
    found = PayloadSchema((spec,)).check(Payload({"w": array.T}), {})
    assert found == ["tensor 'w' holds NaN or infinity"]


def test_a_name_without_end_costs_nothing():
    """Its normalisation would take minutes, and no other thread runs meanwhile."""
    name = "a" + "\u0300" * 130_000 + "\u0323" * 130_000
    assert "at most 128 bytes" in (class_name_fault(name) or "")
    assert normalise_class_name(name) == name
    assert class_key(name)
