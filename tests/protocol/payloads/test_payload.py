"""Payloads: exact through bytes and back, and nothing but a named error for anything else."""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import Payload, pack, unpack
from fcil_protocol.errors import FcilError, SchemaMismatch, TooLarge, WireError
from fcil_protocol.payloads import payload
from fcil_protocol.payloads.payload import WIRE_DTYPES, dtype_name


def example() -> Payload:
    rng = np.random.default_rng(7)
    return Payload(
        tensors={
            "weights": rng.standard_normal((3, 4)).astype(np.float32),
            "half": rng.standard_normal(5).astype(np.float16),
            "counts": np.array([1, 2, 3], dtype=np.int64),
            "ids": np.array([[4], [5]], dtype=np.int32),
            "bytes": np.arange(256, dtype=np.uint8),
            "empty": np.zeros((0, 4), dtype=np.float32),
            "scalar": np.array(2.5, dtype=np.float32),
        },
        meta={"n": 3, "x": 0.5, "on": True, "name": "Käse", "ids": [1, 2], "names": ["a", "b"]},
    )


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def deflated(text: bytes, body: bytes = b"", tail: bytes = b"") -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = compressor.compress(text) + compressor.flush() + tail
    return struct.pack("<Q", 1 << 63 | len(data)) + data + body


def listed(*entries: object, body: bytes = b"", meta: object = "{}") -> bytes:
    return deflated(json.dumps([meta, *entries]).encode(), body)


def same(a: Payload, b: Payload) -> bool:
    return (
        dict(a.meta) == dict(b.meta)
        and set(a.tensors) == set(b.tensors)
        and all(
            a.tensors[k].dtype == b.tensors[k].dtype
            and a.tensors[k].shape == b.tensors[k].shape
            and a.tensors[k].tobytes() == b.tensors[k].tobytes()
            for k in a.tensors
        )
    )


# --- the way through ------------------------------------------------------------------------


def test_every_wire_dtype_and_meta_type_survives_exactly():
    original = example()
    assert {dtype_name(n, a) for n, a in original.tensors.items()} == set(WIRE_DTYPES)
    assert same(unpack(pack(original)), original)
    assert same(unpack(pack(original, compact=True)), original)


def test_the_same_payload_gives_the_same_bytes_in_any_order():
    original = example()
    shuffled = Payload(
        dict(reversed(original.tensors.items())), dict(reversed(original.meta.items()))
    )
    assert pack(shuffled) == pack(original)
    assert pack(shuffled, compact=True) == pack(original, compact=True)


def test_tensors_that_are_not_contiguous_are_sent_as_they_look():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    assert np.array_equal(unpack(pack(Payload({"a": array}))).tensors["a"], array)


def test_special_floats_keep_their_bits():
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], dtype=np.float32)
    assert unpack(pack(Payload({"a": array}))).tensors["a"].tobytes() == array.tobytes()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(list(payload.WIRE_DTYPES)))))
def test_the_bytes_are_those_of_the_safetensors_library(shapes):
    tensors = {
        name: np.ones(shape, payload.WIRE_DTYPES[dtype])
        for name, (shape, dtype) in shapes.items()
        if name != "__metadata__"
    }
    meta = {"fcil": '{"a": 1}'}
    assert pack(Payload(tensors, {"a": 1})) == safetensors.numpy.save(tensors, metadata=meta)


def test_pieces_are_the_tensors_own_memory():
    made = example()
    header, *bodies = payload.pieces(made)
    assert b"".join((header, *bodies)) == pack(made)
    whole = [np.frombuffer(body, np.uint8) for body in bodies if len(body)]
    tensors = [t for t in made.tensors.values() if t.nbytes]
    assert all(any(np.shares_memory(body, t) for t in tensors) for body in whole)


def test_an_empty_payload_is_a_payload():
    assert same(unpack(pack(Payload())), Payload())
    assert same(unpack(pack(Payload(), compact=True)), Payload())


def test_a_compact_header_says_the_same_in_a_few_bytes_for_each_tensor():
    names = [f"blocks.{i}.{j}.lora_{k}" for i in range(12) for j in ("qkv", "fc1") for k in "ab"]
    made = Payload({name: np.ones((4, 192), np.float16) for name in names}, {"train_loss": 0.5})
    small = pack(made, compact=True)
    assert len(small) - made.tensor_bytes < 6 * len(names)
    assert len(pack(made)) - made.tensor_bytes > 60 * len(names)
    got = unpack(small)
    assert same(got, made)
    assert all(t.flags.aligned and not t.flags.owndata for t in got.tensors.values())


def test_sizes_and_views_are_told():
    made = example()
    assert made.tensor_bytes == 48 + 10 + 24 + 8 + 256 + 0 + 4
    assert made.f32("half").dtype == np.float32
    assert made.i64("ids").dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.bool_, np.uint32, "S3", object])
def test_a_dtype_that_may_not_travel_is_refused_with_the_list_of_those_that_may(dtype):
    with pytest.raises(SchemaMismatch, match="tensor 'a': dtype .* F32, F16, I64, I32, U8"):
        pack(Payload({"a": np.zeros(2, dtype=dtype)}))


def test_what_is_no_array_is_refused_by_its_name():
    with pytest.raises(SchemaMismatch, match="tensor 'peak': expected a numpy array, got list"):
        pack(Payload({"peak": [1.0]}))


# --- from outside ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", WireError, "0 bytes is shorter"),
        (b"\x00" * 7, WireError, "7 bytes is shorter"),
        (struct.pack("<Q", 2**62), TooLarge, "exceeds"),
        (struct.pack("<Q", 2**63 + payload.MAX_HEADER_BYTES + 1), TooLarge, "exceeds"),
        (struct.pack("<Q", 2**63 + 10) + b"{}", WireError, "10 bytes in 10 bytes"),
        (struct.pack("<Q", 2**63), WireError, "does not end"),
        (struct.pack("<Q", 2**63 + 8) + b"\xff" * 8, WireError, "not deflated"),
        (deflated(b" " * (payload.MAX_HEADER_BYTES + 1)), TooLarge, "once inflated"),
        (deflated(b'["{}"]', tail=b"\0\1"), WireError, "does not end"),
        (deflated(b"nonsense"), WireError, "not JSON"),
        (deflated(b"[" * 100_000), WireError, "not JSON"),
        (deflated(b"{}"), WireError, "not a JSON array"),
        (deflated(b"[]"), WireError, "not a JSON array"),
        (listed(meta=3), WireError, "metadata is not a string"),
        (listed(meta='{"a": {}}'), WireError, "numbers, names and lists"),
        (listed(1), WireError, "other than three fields"),
        (listed(["a", "F32"]), WireError, "other than three fields"),
        (listed([1, "F32", [1]]), WireError, "other than three fields"),
        (listed(["a", "BF16", [1]]), SchemaMismatch, "'BF16'"),
        (listed(["a", ["F32"], [1]]), SchemaMismatch, "dtype"),
        (listed(["a", "F32", [0]], ["a", "F32", [1]], body=bytes(4)), WireError, "twice"),
        (listed(["__metadata__", "F32", [1]], body=bytes(4)), WireError, "twice"),
        (listed(["a", "F32", [-1]]), WireError, "no shape"),
        (listed(["a", "F32", "x"]), WireError, "no shape"),
        (listed(["a", "F32", [True]]), WireError, "no shape"),
        (listed(["a", "F32", [1]]), WireError, "more than the 0 bytes that arrived"),
        (listed(["a", "F32", [2**62]], body=bytes(4)), WireError, "more than the 4 bytes"),
        (listed(["a", "F32", [int("9" * 4300)] * 32]), WireError, "no shape"),
        (listed(["a", "F32", [10**4299]], body=bytes(4)), WireError, "no shape"),
        (listed(["a", "F32", [1]], body=bytes(5)), WireError, "have 4 bytes, but 5 arrived"),
        (listed(["a", "F32", [0, 2**70]]), WireError, "not valid safetensors"),
        (listed(*([f"t{i}", "U8", [0]] for i in range(4097))), TooLarge, "4097 tensors"),
        (struct.pack("<Q", payload.MAX_HEADER_BYTES + 1), TooLarge, "exceeds"),
        (struct.pack("<Q", 10) + b"{}", WireError, "10 bytes in 10 bytes"),
        (raw(b"nonsense"), WireError, "not JSON"),
        (raw(b"\xff\xfe{}"), WireError, "not JSON"),
        (raw(b"[" * 100_000), WireError, "not JSON"),
        (raw([1]), WireError, "not a JSON object"),
        (raw({"a": 1}), SchemaMismatch, "dtype"),
        (raw({"a": None}), SchemaMismatch, "dtype"),
        (raw({"a": {"dtype": "BF16"}}), SchemaMismatch, "'BF16'"),
        (raw({"a": {"dtype": ["F32"]}}), SchemaMismatch, "dtype"),
        (raw({"a": {"dtype": {}}}), SchemaMismatch, "dtype"),
        (raw({"a": {"dtype": "F32"}}), WireError, "not valid safetensors"),
        (raw({"__metadata__": 3}), WireError, "metadata is not a JSON object"),
        (raw({"__metadata__": {"fcil": 3}}), WireError, "metadata is not a string"),
        (raw({"__metadata__": {"fcil": "{"}}), WireError, "metadata is not JSON"),
        (raw({"__metadata__": {"fcil": "[" * 99_999}}), WireError, "metadata is not JSON"),
        (raw({"__metadata__": {"fcil": "[1]"}}), WireError, "numbers, names and lists"),
        (raw({"__metadata__": {"fcil": '{"a": {}}'}}), WireError, "numbers, names and lists"),
        (raw({"__metadata__": {"fcil": '{"a": null}'}}), WireError, "numbers, names and lists"),
        (raw({"__metadata__": {"fcil": '{"a": [[1]]}'}}), WireError, "numbers, names and lists"),
        (raw({"__metadata__": {"fcil": " " * (payload.MAX_META_BYTES + 1)}}), TooLarge, "exceeds"),
        (raw({f"t{i}": 1 for i in range(payload.MAX_TENSORS + 1)}), TooLarge, "4097 tensors"),
    ],
)
def test_every_malformed_payload_has_its_sentence(data, error, words):
    with pytest.raises(error, match=words) as caught:
        unpack(data)
    assert len(str(caught.value)) < 500


def tensor(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (tensor(), b""),
        (tensor(), bytes(3)),
        (tensor(), bytes(5)),
        (tensor(offsets=(0, 8)), bytes(8)),
        (tensor(offsets=(4, 0)), bytes(4)),
        (tensor(offsets=(-4, 0)), bytes(4)),
        (tensor(offsets=(2**62, 2**62 + 4)), bytes(4)),
        (tensor(shape=(2**40, 2**40)), bytes(4)),
        (tensor(shape=(-1,)), bytes(4)),
        (tensor(shape="x"), bytes(4)),
        (tensor(shape=[None]), bytes(4)),
        (tensor(offsets=[0]), bytes(4)),
        (tensor(shape=(True,)), bytes(4)),
        (tensor(shape=(1,) * 33), bytes(4)),
        (tensor(shape=(9,) * 200_000), bytes(4)),  # their product alone takes seconds
        (tensor(shape=(0, 2**70), offsets=(0, 0)), b""),
        ({**tensor(), "b": tensor()["a"]}, bytes(4)),  # two tensors in one place
        ({**tensor(), "b": tensor(offsets=(8, 12))["a"]}, bytes(12)),  # a hole between
    ],
)
def test_offsets_and_shapes_that_lie_are_refused(header, body):
    with pytest.raises(WireError, match="not valid safetensors"):
        unpack(raw(header, body))


def test_a_few_bytes_of_header_do_not_become_offsets_without_end():
    """20 kB on the wire that took 500 MB: each of thousands of offsets had 57 kB of digits."""
    first = ["a", "U8", [int("9" * 4300)] * 32]
    data = listed(first, *([f"{n:04}", "U8", []] for n in range(4000)))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="not valid safetensors"):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_a_huge_announced_shape_of_no_rows_takes_no_memory():
    data = raw(tensor(shape=(0, 2**31), offsets=(0, 0)))
    assert unpack(data).tensors["a"].nbytes == 0


def test_tensors_are_views_that_nobody_can_write_to():
    data = bytearray(pack(example()))
    weights = unpack(memoryview(data)).tensors["weights"]
    assert not weights.flags.writeable
    assert np.shares_memory(weights, np.frombuffer(data, np.uint8))


def test_a_tensor_that_lies_askew_is_copied_to_where_it_can_be_read():
    body = b"." + np.array([1.5, -2.0], np.float32).tobytes()
    odd = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    got = unpack(raw({**odd, **tensor(shape=(2,), offsets=(1, 9))}, body)).tensors["a"]
    assert got.flags.aligned
    assert got.tolist() == [1.5, -2.0]


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_named_errors(data):
    whole = (data, raw(data), deflated(data))
    for candidate in (*whole, struct.pack("<Q", 2) + b"{}" + data, deflated(b'["{}"]', data)):
        try:
            unpack(candidate)
        except FcilError:
            continue


NAMES = st.sampled_from(["dtype", "shape", "data_offsets", "fcil", "a"])
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**4299)
    | st.floats()
    | st.sampled_from(["F32", "I64", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), JSON_VALUES, max_size=3),
    st.binary(max_size=16),
)
def test_well_formed_nonsense_raises_only_named_errors(header, body):
    try:
        unpack(raw(header, body))
    except FcilError:
        return


@given(st.lists(JSON_VALUES | st.lists(JSON_VALUES, min_size=3, max_size=3)), st.binary())
def test_well_formed_nonsense_in_a_compact_header_raises_only_named_errors(entries, body):
    try:
        unpack(deflated(json.dumps(entries).encode(), body))
    except FcilError:
        return


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_payload_is_read_or_refused_by_name(data):
    changed = bytearray(pack(example(), compact=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        end = data.draw(st.integers(at, min(len(changed), at + 4)))
        changed[at:end] = data.draw(st.binary(max_size=4))
    try:
        got = unpack(bytes(changed))
    except FcilError:
        return
    assert got.tensor_bytes <= len(changed)


@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(
            st.sampled_from(sorted(WIRE_DTYPES)),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=5,
    ),
    st.dictionaries(
        st.text("abc", max_size=4),
        st.booleans()
        | st.integers(-(2**62), 2**62)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab€\n", max_size=5)
        | st.lists(st.integers(0, 9), max_size=4),
        max_size=4,
    ),
)
def test_any_payload_survives(specs, meta):
    rng = np.random.default_rng(0)
    tensors = {
        name: np.frombuffer(
            rng.bytes(WIRE_DTYPES[dtype].itemsize * int(np.prod(shape))), WIRE_DTYPES[dtype]
        ).reshape(shape)
        for name, (dtype, shape) in specs.items()
    }
    original = Payload(tensors, meta)
    assert same(unpack(pack(original)), original)
    assert same(unpack(pack(original, compact=True)), original)


def test_a_payload_written_by_the_library_itself_is_read():
    data = safetensors.numpy.save({"a": np.ones((2, 2), dtype=np.float32)})
    got = unpack(data)
    assert got.tensors["a"].tolist() == [[1, 1], [1, 1]]
    assert got.meta == {}
