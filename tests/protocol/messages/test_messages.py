"""Messages: each comes back as it was sent; whatever else comes is refused in a sentence."""

from __future__ import annotations

import contextlib
import os
import random
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.errors import CommitUnknown, DiskFull, FcilError, TooLarge, WireError
from fcil_protocol.messages.frames import (
    MAX_BLOBS,
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BLOB_BYTES,
    encode,
    parse,
)
from fcil_protocol.messages.messages import (
    MESSAGES,
    NO_PRIVACY,
    TO_SERVER,
    Ack,
    Admit,
    BackboneClaim,
    Bye,
    Chunk,
    Decline,
    Enrol,
    Enrolled,
    Fetched,
    Hello,
    Message,
    Nack,
    PartRef,
    Parts,
    PrivacyTerms,
    Progress,
    Pull,
    RelayKeys,
    Release,
    Rotate,
    RoundClosed,
    RoundOpen,
    Update,
    Uplink,
    UseModel,
    Verdict,
    Want,
    Welcome,
    nack_of,
)

EXAMPLES = int(os.environ.get("FCIL_FUZZ_EXAMPLES", "150"))
SIG = bytes(range(64))
NONCE = b"n" * 16
HEX, HEX2 = "ab" * 32, "01" * 32
RUN = "r20260102-030405-0a0b"
ROUND = {"run": RUN, "task": 2, "kind": "train", "round": 3}
VERDICT = Verdict(update=HEX, counted=False, reason="largest value 1e9 exceeds 1e4")

# One full message of each type: every field differs from its default.
FULL: dict[str, Message] = {
    m.type: m
    for m in (
        Hello(
            nonce=NONCE,
            seq=1,
            protocol=2,
            oldest=1,
            package="0.1.0",
            federation="f" * 32,
            client="a" * 26,
            device="Linux aarch64",
            methods=["pilora==1", "running_mean==1"],
            run=RUN,
            schema_digest=HEX,
            backbone=BackboneClaim(digest=HEX, preprocessing=HEX2, probe=b"\0" * 16),
            takes_models=True,
            takes_compact=True,
        ),
        Welcome(
            nonce=NONCE,
            seq=1,
            protocol=1,
            server_nonce=b"s" * 16,
            certificate=b"c" * 100,
            run=RUN,
            method="pilora",
            method_version="1",
            hparams="{}",
            schema_digest=HEX,
            backbone="{}",
            needs_backbone=True,
            ready=True,
            max_payload_bytes=10**9,
            credit=8,
            privacy=PrivacyTerms(
                min_count=2,
                noise_multiplier=1.5,
                clip=3.0,
                delta=1e-6,
                max_epsilon=8.0,
                partial=True,
                relay_sums=True,
            ),
            compact=True,
            verdict=VERDICT,
            summing_relay=RelayKeys(
                name="depot", curve=b"c" * 32, signing=b"s" * 32, sealing=b"x" * 1216
            ),
        ),
        RoundOpen(
            **ROUND,
            nonce=NONCE,
            seq=2,
            rounds=5,
            base=7,
            classes=[4, 5],
            past=[0, 1, 2, 3],
            seed=[1993, 2**52],
            remaining_s=599.5,
            parts=[PartRef(name="task/0", digest=HEX, sealed_bytes=1234)],
            verdict=VERDICT,
        ),
        UseModel(
            **ROUND,
            nonce=NONCE,
            seq=2,
            rounds=3,
            base=4,
            classes=[2, 3],
            past=[0, 1],
            parts=[PartRef(name="step", digest=HEX, sealed_bytes=10)],
            promoted=True,
        ),
        RoundClosed(**ROUND, nonce=NONCE, seq=3, outcome="done", verdict=VERDICT),
        Decline(**ROUND, nonce=NONCE, seq=4, reason="Köln ist weg"),
        Progress(**ROUND, nonce=NONCE, seq=5, phase="working", done=3, total=10),
        Update(nonce=NONCE, seq=6, digest=HEX),
        Want(nonce=NONCE, seq=7, digest=HEX, chunks=[0, 5, 9], header=True),
        Parts(nonce=NONCE, seq=8, digest=HEX, url="https://store/a"),
        Fetched(nonce=NONCE, seq=8, digest=HEX, size=70_000),
        Chunk(digest=HEX, index=11),
        Ack(nonce=NONCE, seq=9, digest=HEX),
        Nack(nonce=NONCE, seq=10, code="too_large", text="no", action="yes", digest=HEX),
        Bye(nonce=NONCE, seq=11, reason="sleep"),
        Pull(digest=HEX, chunks=[2, 3], span=2),
        Release(nonce=NONCE, seq=12, digests=[HEX]),
        Enrol(
            nonce=NONCE,
            seq=1,
            device="Linux aarch64",
            curve=b"c" * 32,
            signing=b"s" * 32,
            sealing=b"x" * 1216,
            proof=SIG,
        ),
        Rotate(
            nonce=NONCE,
            seq=3,
            curve=b"c" * 32,
            signing=b"s" * 32,
            sealing=b"x" * 1216,
            proof=SIG,
        ),
        Enrolled(
            nonce=NONCE,
            seq=1,
            client="a" * 26,
            name="camera-3",
            certificate=b"c" * 100,
            addresses=["lab.example:7710"],
        ),
        Uplink(
            nonce=NONCE,
            seq=1,
            protocol=1,
            oldest=1,
            package="0.1.0",
            federation=HEX[:32],
            relay="a" * 26,
            address="site.example:7720",
            sums=True,
        ),
        Admit(
            nonce=NONCE,
            seq=1,
            protocol=1,
            server_nonce=NONCE,
            certificate=b"c" * 100,
            credit=8,
            members=[b"m" * 32, b"n" * 32],
            guests=[b"g" * 32],
        ),
    )
}
BLOBS = {"update": 3, "parts": 3, "chunk": 1}
MOST_BLOBS = {"update": 4}  # behind a relay that adds up updates


def frames_of(message: Message, *, blobs: int | None = None) -> list[bytes]:
    count = BLOBS.get(message.type, 0) if blobs is None else blobs
    signature = SIG if message.signed else b""
    return [encode(message), signature, *(b"blob%d" % i for i in range(count))]


def body(kind: str, /, **fields: object) -> list[bytes]:
    """Frames of a message with these fields instead of its own (None removes one)."""
    whole = msgpack.unpackb(encode(FULL[kind])) | fields
    packed = msgpack.packb({k: v for k, v in whole.items() if v is not None})
    return [packed, *frames_of(FULL[kind])[1:]]


types = pytest.mark.parametrize("kind", sorted(MESSAGES))


# --- the way through ------------------------------------------------------------------------


def test_there_is_a_sample_of_every_message() -> None:
    assert set(FULL) == set(MESSAGES)
    assert {kind for kind, cls in MESSAGES.items() if not cls.signed} == {"chunk", "pull"}


@types
def test_every_field_of_a_message_comes_back(kind: str) -> None:
    frames = frames_of(FULL[kind])
    received = parse(frames)
    assert received.message == FULL[kind]
    assert type(received.message) is MESSAGES[kind]
    assert [received.body, received.signature, *received.blobs] == frames


@types
def test_digests_of_envelopes_may_travel_as_bytes(kind: str) -> None:
    raw, *others = encode(FULL[kind], raw_digests=True), *frames_of(FULL[kind])[1:]
    assert parse([raw, *others]).message == FULL[kind]
    with_digests = {"update", "want", "parts", "fetched", "chunk", "ack", "welcome", "round_open", "use_model",
             "round_closed", "pull", "release"}  # fmt: skip
    assert (bytes.fromhex(HEX) in raw) is (kind in with_digests)
    assert len(encode(FULL[kind])) - len(raw) in ({32, 64} if kind in with_digests else {0})


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33), b"ab" * 32, 7, None, [1]])
def test_a_digest_of_another_length_or_type_is_refused(digest: object) -> None:
    packed = msgpack.packb({"t": "ack", "digest": digest})
    with pytest.raises(WireError, match="ack: field 'digest'"):
        parse([packed, SIG])


@types
def test_a_field_that_is_at_its_default_is_left_out_and_comes_back(kind: str) -> None:
    cls = MESSAGES[kind]
    small = {
        name: getattr(FULL[kind], name) for name, f in cls.model_fields.items() if f.is_required()
    }
    message = cls(**small)
    sent = msgpack.unpackb(encode(message))
    assert set(sent) == {"t", *small}
    assert parse(frames_of(message)).message == message


@types
def test_fields_of_a_later_version_are_tolerated(kind: str) -> None:
    frames = body(kind, colour="blue", nested={"a": [1, 2, {"b": None}]})
    assert parse(frames).message == FULL[kind]


@types
def test_buffers_are_as_good_as_bytes_and_are_copied(kind: str) -> None:
    """What a caller does to its buffers afterwards changes nothing."""
    buffers = [bytearray(f) for f in frames_of(FULL[kind])]
    received = parse(buffers)  # type: ignore[arg-type]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert received.message == FULL[kind]
    assert [received.body, received.signature, *received.blobs] == frames_of(FULL[kind])


def test_what_a_peer_says_cannot_change_the_shared_defaults() -> None:
    """An empty list is made anew for each message."""
    small = Hello(protocol=1, oldest=1, package="", federation="", client="")
    small.methods.append("x==1")
    assert Hello(protocol=1, oldest=1, package="", federation="", client="").methods == []


# --- the form -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 50])
def test_a_wrong_number_of_frames_is_refused_before_anything_is_read(count: int) -> None:
    with pytest.raises(WireError, match=f"2 to 6 frames, got {count}"):
        parse([b"\xff"] * count)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (kind, count)
        for kind in sorted(MESSAGES)
        for count in range(5)
        if count not in (BLOBS.get(kind, 0), MOST_BLOBS.get(kind))
    ],
)
def test_a_wrong_number_of_blobs_is_refused(kind: str, count: int) -> None:
    most = f" or {MOST_BLOBS[kind]}" if kind in MOST_BLOBS else ""
    with pytest.raises(WireError, match=f"{BLOBS.get(kind, 0)}{most} blobs, got {count}"):
        parse(frames_of(FULL[kind], blobs=count))


def test_an_update_may_have_its_key_for_a_relay_too() -> None:
    assert len(parse(frames_of(FULL["update"], blobs=4)).blobs) == 4


def test_an_oversize_body_is_refused_without_being_parsed() -> None:
    with pytest.raises(TooLarge, match=str(MAX_BODY_BYTES)):
        parse([b"\xc1" * (MAX_BODY_BYTES + 1), SIG])


@pytest.mark.parametrize(
    ("kind", "limit"), [("chunk", MAX_CHUNK_BYTES), ("update", MAX_HEADER_BLOB_BYTES)]
)
def test_an_oversize_blob_is_refused_and_the_largest_is_not(kind: str, limit: int) -> None:
    frames = frames_of(FULL[kind])
    frames[2] = bytes(limit)
    assert parse(frames).blobs[0] == bytes(limit)
    frames[2] = bytes(limit + 1)
    with pytest.raises(TooLarge, match=str(limit)):
        parse(frames)


@pytest.mark.parametrize("size", [1, 63, 65, 1000])
def test_a_signature_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"64 bytes and a MAC 16, got {size}"):
        parse([encode(FULL["ack"]), bytes(size)])


@types
def test_what_needs_a_signature_does_not_come_without(kind: str) -> None:
    frames = [encode(FULL[kind]), b"", *frames_of(FULL[kind])[2:]]
    if kind in ("chunk", "pull"):
        assert parse(frames).message == FULL[kind]
    else:
        with pytest.raises(WireError, match=f"the message {kind} must be signed"):
            parse(frames)


@pytest.mark.parametrize("name", ["hi", "", "HELLO", "x" * 10_000, 7, None, ["ack"], {"ack": 1}])
def test_an_unknown_type_is_refused_and_named_in_short(name: object) -> None:
    with pytest.raises(WireError, match="unknown message type") as error:
        parse([msgpack.packb({"t": name, "digest": HEX}), SIG])
    assert len(error.value.message) < 100


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2, 3]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": "ack"}) + b"\0",
        msgpack.packb({"t": "ack", "digest": HEX})[:-1],
        msgpack.packb({"t": "ack", "e": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"t": "ack", "e": msgpack.Timestamp(1)}),
        b"\x81\xa1t\xa3a\xffk",  # a name that is not UTF-8
        b"\x91" * 100_000,  # deeper than any parser goes
        b"\xdd\xff\xff\xff\xff",  # 4 billion elements announced
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=range(14),
)
def test_a_body_that_is_no_map_of_names_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        parse([data, SIG])


def test_the_memory_that_a_body_announces_is_not_taken() -> None:
    """A thousand nested lists of 100,000 elements each, announced in 5 bytes apiece."""
    hostile = b"\xdd\x00\x01\x86\xa0" * 1000
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            parse([hostile, SIG])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


# --- the fields -----------------------------------------------------------------------------


def required() -> list[tuple[str, str]]:
    return [
        (kind, name)
        for kind, cls in sorted(MESSAGES.items())
        for name, field in cls.model_fields.items()
        if field.is_required()
    ]


def test_a_missing_field_is_named() -> None:
    for kind, name in required():
        with pytest.raises(WireError, match=f"{kind}: field '{name}'"):
            parse(body(kind, **{name: None}))


WRONG: dict[str, list[object]] = {
    "str": [1, b"bytes", ["a"], True],
    "int": ["1", 1.0, True, b"1", -2, 2**53, [1]],
    "bytes": ["text", 1, [1]],
    "bool": [1, "true", 0.0],
    "float": ["1.5", float("nan"), float("inf"), True, b"x"],
    "list": ["ab", 1, {"a": 1}],
    "model": ["x", 1, [1]],
}
PLAIN = {str: "str", int: "int", bytes: "bytes", bool: "bool", float: "float"}


def wrong_values() -> list[tuple[str, str, object]]:
    out = []
    for kind, message in sorted(FULL.items()):
        for name in type(message).model_fields:
            value = getattr(message, name)
            sort = "list" if isinstance(value, list) else PLAIN.get(type(value), "model")
            out += [(kind, name, wrong) for wrong in WRONG[sort]]
    return out


def test_a_field_of_another_type_or_out_of_range_is_refused() -> None:
    """Nothing is converted: the two sides must never read one message in two ways."""
    for kind, name, value in wrong_values():
        with pytest.raises(WireError, match=f"{kind}: field '{name}"):
            parse(body(kind, **{name: value}))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("hello", "nonce", b"short"),
        ("hello", "nonce", b"n" * 17),
        ("hello", "methods", ["x"] * 201),
        ("hello", "methods", ["x" * 129]),
        ("hello", "methods", [7]),
        ("hello", "device", "x" * 129),
        ("hello", "schema_digest", "AB" * 32),
        ("hello", "backbone", {"digest": HEX, "preprocessing": HEX, "probe": bytes(131_073)}),
        ("hello", "backbone", {"digest": HEX, "preprocessing": HEX}),
        ("welcome", "certificate", bytes(8193)),
        ("welcome", "hparams", "x" * 65_537),
        ("welcome", "verdict", {"update": HEX, "counted": 1}),
        ("round_open", "classes", [-1]),
        ("round_open", "classes", [1.5]),
        ("round_open", "classes", list(range(10_001))),
        ("round_open", "past", [0] * 100_001),
        ("round_open", "seed", [1] * 9),
        ("round_open", "task", -2),
        ("round_open", "task", 2**31),
        ("round_open", "parts", [{"name": "x", "digest": "zz", "sealed_bytes": 1}]),
        ("round_open", "parts", [["x", HEX, 1]]),
        ("decline", "reason", "x" * 2001),
        ("progress", "phase", "sleeping"),
        ("update", "digest", HEX[:-1]),
        ("update", "digest", HEX + "\n"),
        ("update", "digest", "../" + HEX[3:]),
        ("want", "chunks", [0] * 1025),
        ("nack", "digest", "x"),
        ("nack", "code", "x" * 129),
    ],
)
def test_a_value_beyond_its_limit_is_refused(kind: str, name: str, value: object) -> None:
    with pytest.raises(WireError, match=f"{kind}|message body"):
        parse(body(kind, **{name: value}))


def test_a_whole_number_of_seconds_is_a_number_of_seconds() -> None:
    """msgpack of other languages writes 60.0 as 60."""
    message = parse(body("round_open", remaining_s=60)).message
    assert isinstance(message, RoundOpen)
    assert message.remaining_s == 60.0


def test_a_refusal_does_not_repeat_what_the_peer_sent() -> None:
    """It may be long, or meant for the terminal that shows the log."""
    with pytest.raises(WireError) as error:
        parse(body("ack", digest="\x1b[2J" + "secret" * 1000))
    assert "secret" not in error.value.message
    assert "\x1b" not in error.value.message


# --- anything -------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_fuzz_random_frames_raise_only_named_errors(frames: list[bytes]) -> None:
    with contextlib.suppress(FcilError):
        parse(frames)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8) | st.just(HEX) | st.just(NONCE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_fuzz_any_value_in_any_field_is_taken_or_refused(data: st.DataObject) -> None:
    """And what is taken comes out again as it went in."""
    kind = data.draw(st.sampled_from(sorted(MESSAGES)))
    names = st.sampled_from(sorted(MESSAGES[kind].model_fields))
    fields = data.draw(st.dictionaries(names, values, min_size=1, max_size=3))
    try:
        message = parse(body(kind, **fields)).message
    except FcilError:
        return
    assert parse(frames_of(message)).message == message


@types
def test_fuzz_flipped_and_cut_bodies_raise_only_named_errors(kind: str) -> None:
    draw = random.Random(kind)
    whole = frames_of(FULL[kind])
    for _ in range(max(100, EXAMPLES)):
        changed = bytearray(whole[0])
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        cut = changed[: draw.choice((len(changed), draw.randrange(len(changed))))]
        with contextlib.suppress(FcilError):
            parse([bytes(cut), *whole[1:]])


def test_the_limits_fit_together() -> None:
    """The transport must carry the largest frame, CURVE's 33 bytes included."""
    from fcil_protocol.envelopes import header
    from fcil_protocol.link import zmq_link

    largest = max(MAX_BODY_BYTES, MAX_CHUNK_BYTES, MAX_HEADER_BLOB_BYTES)
    assert largest + 33 <= zmq_link.MAX_MESSAGE_BYTES
    assert header.MAX_HEADER_BYTES <= MAX_HEADER_BLOB_BYTES
    assert header.MAX_CHUNK_BYTES <= MAX_CHUNK_BYTES
    assert max(MOST_BLOBS.values()) == MAX_BLOBS


def test_terms_of_privacy_are_described_in_one_line():
    assert NO_PRIVACY.describe() == "no noise, no minimum class size"
    noised = PrivacyTerms(min_count=3, noise_multiplier=1.5, clip=2, max_epsilon=8, partial=True)
    assert noised.describe() == (
        "classes with at least 3 images; noise 1.5 x clip 2; epsilon at delta 1e-05: 8; on "
        "statistics only: trained tensors are not protected"
    )
    masked = PrivacyTerms(secure="masks", secure_min_clients=5)
    assert masked.describe() == "masks: the server sees sums of 5 clients or more"


@pytest.mark.parametrize("kind", sorted(FULL))
def test_a_server_reads_only_what_clients_and_relays_send(kind):
    frames = frames_of(FULL[kind])
    if MESSAGES[kind] in TO_SERVER:
        assert parse(frames, to_server=True).message == FULL[kind]
        return
    with pytest.raises(WireError, match=f"only a server sends a {kind}"):
        parse(frames, to_server=True)


def test_a_server_reads_no_list_that_is_longer_than_any_of_a_client():
    """Within each other, they would take a thousand times the memory of the longest."""
    nested = b"\xdd" + (1025).to_bytes(4, "big")
    hostile = b"\x81\xa1t" + nested * 500 + bytes(2000)
    with pytest.raises(WireError, match="not msgpack: 1025 exceeds max_array_len"):
        parse([hostile, SIG], to_server=True)


def test_a_message_of_thousands_of_faults_names_one():
    data = msgpack.packb(
        {**FULL["round_open"].model_dump(), "t": "round_open", "past": [""] * 99_000}
    )
    with pytest.raises(WireError, match=r"past\.0"):
        parse([data, SIG])


def test_a_body_that_is_nested_without_end_is_refused_in_a_whole_sentence() -> None:
    body = b"\x81\xa1t" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(WireError, match=r"is not msgpack: [A-Z]\w+\.$"):
        parse((body, b""))


def test_a_commit_that_may_hold_is_to_a_peer_a_failure_of_the_servers_disk() -> None:
    """Clients wait and try again then; of a code that they do not know they would not."""
    assert nack_of(CommitUnknown("it was lost.")).code == "storage_failed"
    assert nack_of(DiskFull("it is full.")).code == "disk_full"
