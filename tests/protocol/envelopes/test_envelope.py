"""Envelopes: what is sealed opens for its recipient, unchanged, and in no other way."""

import base64
import hashlib
import os
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes import envelope
from fcil_protocol.envelopes.envelope import (
    WRAP_BYTES,
    ContentKey,
    Core,
    Header,
    Sealed,
    StoredEnvelope,
    open_body,
    parse_header,
    read_envelope,
    seal,
    sealed_size,
    unwrap_key,
    verify_header,
    wrap_key,
    write_envelope,
)
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile
from fcil_protocol.errors import (
    BadSignature,
    CannotOpen,
    CorruptFile,
    FcilError,
    StorageError,
    TooLarge,
    TrustError,
    VersionMismatch,
    WireError,
)
from fcil_protocol.ids import FederationId
from fcil_protocol.trust.canonical import Fields, pack_map
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from sealed_header import header_of

KIB = 1 << 10
LIMIT = 64 << 20
CLIENT = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
SERVER = PrivateKeys(curve=b"\x04" * 32, signing=b"\x05" * 32, sealing=b"\x06" * 32)
OTHER = PrivateKeys(curve=b"\x07" * 32, signing=b"\x08" * 32, sealing=b"\x09" * 32)


def make_core(keys: PrivateKeys = CLIENT, **changes) -> Core:
    core = Core(
        protocol=PROTOCOL_VERSION,
        federation=FederationId("0123456789abcdef" * 2),
        run="r20260102-030405-0a0b",
        direction="update",
        sender="a" * 26,
        sender_key=keys.public.fingerprint,
        recipient="server",
        method="pilora",
        schema="5e" * 32,
        task=3,
        round=17,
        kind="train",
        base=40,
    )
    return replace(core, **changes)


BROADCAST = {"direction": "broadcast", "sender": "server", "recipient": "client", "part": "model"}
PLAIN = bytes(range(256)) * 200  # 51,200 bytes: three AEAD blocks and a bit, four chunks


@pytest.fixture(scope="module")
def sent() -> tuple[Sealed, bytes]:
    """An update of CLIENT to SERVER: the envelope and the wrapped key."""
    sealed, key = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    return sealed, wrap_key(key, sealed.header, SERVER.public)


def receive(
    head: bytes, signature: bytes, wrap: bytes, body: bytes, *, signer: PublicKeys = CLIENT.public
) -> bytes:
    """Everything that a server does with an envelope, in its order."""
    verify_header(head, signature, signer)
    parsed = parse_header(head, max_plain_bytes=LIMIT)
    if len(body) != parsed.sealed_bytes:
        raise WireError("incomplete")
    for index, chunk in enumerate(parsed.split(body)):
        if not parsed.fits(index, chunk):
            raise WireError("chunk")
    return open_body(parsed, unwrap_key(wrap, head, SERVER), parsed.split(body))


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def bits_of(data: bytes, count: int = 60) -> list[int]:
    """Bits spread over the data, first and last included."""
    last = len(data) * 8 - 1
    return sorted({last * i // (count - 1) for i in range(count)})


# --- the way through ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 100_000, 3 << 20])
@pytest.mark.parametrize("chunk_bytes", [16 * KIB, 40_000, 1 << 20])
def test_what_is_sealed_opens_unchanged(size, chunk_bytes):
    plain = os.urandom(size)
    sealed, key = seal(plain, make_core(), CLIENT, chunk_bytes=chunk_bytes)
    wrap = wrap_key(key, sealed.header, SERVER.public)
    assert len(wrap) == WRAP_BYTES
    assert len(sealed.body) == sealed_size(size)
    chunks = [sealed.chunk(i) for i in range(len(sealed.parsed.hashes))]
    assert b"".join(chunks) == sealed.body
    assert {len(c) for c in chunks[:-1]} <= {chunk_bytes}
    assert receive(sealed.header, sealed.signature, wrap, sealed.body) == plain


def test_an_envelope_is_lean(sent):
    """Signature, wrapped key, header and AEAD of 100 kB in one chunk: under 1.8 kB in all."""
    sealed, key = seal(bytes(100_000), make_core(), CLIENT, chunk_bytes=1 << 20)
    wrap = wrap_key(key, sealed.header, SERVER.public)
    total = len(sealed.header) + len(sealed.signature) + len(wrap) + len(sealed.body)
    assert total - 100_000 < 1800


def test_the_same_payload_sealed_twice_shares_nothing():
    one, key = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    two, other = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    assert one.body[:100] != two.body[:100]
    assert key != other
    assert one.parsed.update_id != two.parsed.update_id


def test_one_encryption_serves_many_recipients():
    sealed, key = seal(PLAIN, make_core(SERVER, **BROADCAST), SERVER, chunk_bytes=16 * KIB)
    for recipient in (CLIENT, OTHER, SERVER):
        wrap = wrap_key(key, sealed.header, recipient.public)
        verify_header(sealed.header, sealed.signature, SERVER.public)
        opened = unwrap_key(wrap, sealed.header, recipient)
        assert opened == key
        assert open_body(sealed.parsed, opened, [sealed.body]) == PLAIN


def test_neither_repr_nor_str_shows_a_content_key_or_a_body(sent):
    sealed, wrap = sent
    key = unwrap_key(wrap, sealed.header, SERVER)
    shown = f"{key} {key!r} {sealed!r} {sealed.stored(wrap)!r}"
    assert repr(key.value) not in shown
    assert key.value.hex() not in shown
    assert repr(sealed.body) not in shown


# --- altered in any region ------------------------------------------------------------------


@pytest.mark.parametrize("region", ["header", "signature", "wrap", "body"])
def test_a_flipped_bit_in_any_region_is_refused(sent, region):
    sealed, wrap = sent
    pieces = {
        "header": sealed.header,
        "signature": sealed.signature,
        "wrap": wrap,
        "body": sealed.body,
    }
    assert receive(*pieces.values()) == PLAIN
    for bit in bits_of(pieces[region]):
        with pytest.raises((TrustError, WireError)):
            receive(*{**pieces, region: flip(pieces[region], bit)}.values())


def test_a_header_is_judged_by_its_signature_before_anything_else(sent):
    sealed, _ = sent
    for bit in bits_of(sealed.header, 200):
        with pytest.raises(BadSignature):
            verify_header(flip(sealed.header, bit), sealed.signature, CLIENT.public)


def test_a_flipped_bit_in_any_chunk_is_refused_by_hash_and_by_cipher(sent):
    sealed, wrap = sent
    parsed = sealed.parsed
    key = unwrap_key(wrap, sealed.header, SERVER)
    for index in range(len(parsed.hashes)):
        for bit in bits_of(bytes(sealed.chunk(index)), 8):
            chunks = [bytes(c) for c in parsed.split(sealed.body)]
            chunks[index] = flip(chunks[index], bit)
            assert not parsed.fits(index, chunks[index])
            with pytest.raises(CannotOpen):
                open_body(parsed, key, chunks)


def test_every_field_of_the_core_is_bound_into_the_encryption(sent):
    """A header made anew, with right hashes and signature, around another core."""
    sealed, wrap = sent
    key = unwrap_key(wrap, sealed.header, SERVER)
    changes = {
        "federation": "f" * 32,
        "run": "r20260102-030405-ffff",
        "sender": "b" * 26,
        "sender_key": OTHER.public.fingerprint,
        "method": "running_mean",
        "schema": "5f" * 32,
        "task": 4,
        "round": 18,
        "kind": "finish",
        "base": 41,
        "part": "x",
    }
    assert set(changes) | {"protocol", "direction", "recipient"} == {f.name for f in fields(Core)}
    cores = [make_core(**{name: value}) for name, value in changes.items()]
    cores.append(make_core(**BROADCAST))
    for core in cores:
        head = header_of(core.to_bytes(), sealed.body, len(PLAIN), 16 * KIB)
        parsed = parse_header(head, max_plain_bytes=LIMIT)
        with pytest.raises(CannotOpen, match="authenticate"):
            open_body(parsed, key, [sealed.body])


def test_a_cut_or_lengthened_body_is_refused(sent):
    sealed, wrap = sent
    parsed = sealed.parsed
    key = unwrap_key(wrap, sealed.header, SERVER)
    for size in (0, 1, 55, 56, 72, 16 * KIB, len(sealed.body) - 16, len(sealed.body) - 1):
        with pytest.raises(CannotOpen, match=f"{size} of {len(sealed.body)} bytes"):
            open_body(parsed, key, [sealed.body[:size]])
    with pytest.raises(CannotOpen, match="more than"):
        open_body(parsed, key, [sealed.body, b"x"])


def test_a_cut_body_whose_header_was_made_to_fit_is_refused_at_its_end(sent):
    """Cut at a block boundary: every block is authentic, only the last tag is missing."""
    sealed, wrap = sent
    key = unwrap_key(wrap, sealed.header, SERVER)
    plain_bytes = 2 * 16 * KIB
    body = sealed.body[: sealed_size(plain_bytes)]
    head = header_of(make_core().to_bytes(), body, plain_bytes, 16 * KIB)
    with pytest.raises(CannotOpen, match="authenticate"):
        open_body(parse_header(head, max_plain_bytes=LIMIT), key, [body])


def test_chunks_in_another_order_do_not_open(sent):
    sealed, wrap = sent
    key = unwrap_key(wrap, sealed.header, SERVER)
    first, second, *rest = sealed.parsed.split(sealed.body)
    with pytest.raises(CannotOpen):
        open_body(sealed.parsed, key, [second, first, *rest])


# --- pieces of other messages ---------------------------------------------------------------


def test_a_wrong_recipient_cannot_open(sent):
    sealed, wrap = sent
    with pytest.raises(CannotOpen, match=OTHER.public.fingerprint):
        unwrap_key(wrap, sealed.header, OTHER)


def test_a_wrap_names_its_recipient_beyond_the_sealing_key(sent):
    """Same X-Wing key under another signing key: another participant."""
    sealed, wrap = sent
    twin = PrivateKeys(curve=b"\x04" * 32, signing=b"\x0a" * 32, sealing=b"\x06" * 32)
    assert twin.public.sealing == SERVER.public.sealing
    with pytest.raises(CannotOpen):
        unwrap_key(wrap, sealed.header, twin)


def test_a_header_with_the_body_of_another_envelope_is_refused(sent):
    sealed, wrap = sent
    other, key = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    with pytest.raises(WireError, match="chunk"):
        receive(sealed.header, sealed.signature, wrap, other.body)
    with pytest.raises(CannotOpen):
        open_body(sealed.parsed, unwrap_key(wrap, sealed.header, SERVER), [other.body])
    assert open_body(sealed.parsed, key, [other.body]) == PLAIN  # only its own key and core fit


def test_a_wrap_does_not_serve_another_header(sent):
    sealed, wrap = sent
    other, _ = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    with pytest.raises(CannotOpen, match="for its header"):
        unwrap_key(wrap, other.header, SERVER)


def test_an_update_cannot_come_back_as_a_broadcast():
    """The core binds the direction; no core names a direction with the wrong ends."""
    for changes in (
        {"direction": "broadcast"},
        {"recipient": "client"},
        {"sender": "server"},
        {"direction": "broadcast", "recipient": "client"},
        {"direction": "sideways"},
    ):
        with pytest.raises(WireError):
            make_core(**changes).to_bytes()


def test_a_header_must_be_signed_by_the_key_that_it_names(sent):
    sealed, _ = sent
    stolen = OTHER.sign("envelope", sealed.header)
    with pytest.raises(BadSignature, match="names key"):
        verify_header(sealed.header, stolen, OTHER.public)
    with pytest.raises(BadSignature):
        verify_header(sealed.header, CLIENT.sign("message", sealed.header), CLIENT.public)


@pytest.mark.parametrize("size", [0, 1, 1120, WRAP_BYTES - 1, WRAP_BYTES, WRAP_BYTES + 1])
def test_a_wrap_of_zeros_of_any_length_is_refused(sent, size):
    with pytest.raises(CannotOpen, match=f"{size} bytes .expected {WRAP_BYTES}"):
        unwrap_key(bytes(size), sent[0].header, SERVER)


def test_a_wrapped_key_of_another_size_is_refused(sent):
    sealed, _ = sent
    wrap = wrap_key(ContentKey(bytes(16)), sealed.header, SERVER.public)
    with pytest.raises(CannotOpen):
        unwrap_key(wrap, sealed.header, SERVER)


def test_nothing_is_sealed_for_keys_that_cannot_work(sent):
    low_order = replace(SERVER.public, sealing=SERVER.public.sealing[:1184] + bytes(32))
    with pytest.raises(TrustError, match="nothing can be sealed"):
        wrap_key(ContentKey(bytes(32)), sent[0].header, low_order)


def test_sealing_with_another_key_than_the_core_names_is_our_defect():
    with pytest.raises(AssertionError):
        seal(b"", make_core(CLIENT), OTHER, chunk_bytes=16 * KIB)


# --- pinned bytes ---------------------------------------------------------------------------

CORE_HEX = (
    "8da17601a3666564c4100123456789abcdef0123456789abcdefa372756eb57232303236303130322d303330"
    "3430352d30613062a3646972a6757064617465a466726f6dba61616161616161616161616161616161616161"
    "61616161616161a36b6579c4106a3803d5f059902a1c6dafbc9ba47292a2746fa6736572766572a46d657468"
    "a670696c6f7261a3736368c4205e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e"
    "5ea47461736b03a3726e6411a46b696e64a5747261696ea46261736528"
)
BEFORE_CORE_HEX = "85a4636f7265c4cd"
AFTER_CORE_HEX = (
    "a67365616c6564cd4e78a5706c61696ecd4e20a56368756e6bcd4000a6686173686573c4404fe7b59af6de3b"
    "665b67788cc2f99892ab827efae3a467342b3bb4e3bc8e5bfe6aa30f34b99fccf385e847ebf758abe9bcc63b"
    "bc3c416df96078ce9202e02047"
)
# An envelope file as version 1 wrote it: CLIENT to SERVER, "class-incremental".
STORED_BASE64 = (
    "ZmNpbGVudgEWAQAAQACQBFkAAAAAAAAARhGOEU1x0t9/DLVJExphh3igOG5rnGiI/DtBPwB4McyFpGNvcmXEzY2h"
    "dgGjZmVkxBABI0VniavN7wEjRWeJq83vo3J1brVyMjAyNjAxMDItMDMwNDA1LTBhMGKjZGlypnVwZGF0ZaRmcm9t"
    "umFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFho2tlecQQajgD1fBZkCocba+8m6RykqJ0b6ZzZXJ2ZXKkbWV0aKZw"
    "aWxvcmGjc2NoxCBeXl5eXl5eXl5eXl5eXl5eXl5eXl5eXl5eXl5eXl5eXqR0YXNrA6NybmQRpGtpbmSldHJhaW6k"
    "YmFzZSimc2VhbGVkWaVwbGFpbhGlY2h1bmvNQACmaGFzaGVzxCBRQtWJxTdfiPOPvnP+ifI7v6SQohLWNaz41/yc"
    "rsX02851sMUD3do96Jfg/tIgnmOZKowlos+jT1Sb17xT4irdIaoeim8kNoZn2hKGbbRjVS6S73oHs09WTDGl0zIN"
    "BQKwQoWTBefP1sKpjfS9kPPGPlx3vRcB/U/OHG3Az0eSxBzDq/c0gKyTfakriyu4UFIC26QkPdY3SK/UwsuWg0jw"
    "IIyrdVkjptpipDWrgKJeIrutIXCuNS0jGLEzFjw4OADQxVJT7XDnYfYzICVp9bd1hhiQuq0tFfA3K8XZG7LOCyDQ"
    "HY+sjo5YYPn/pRalrCmOB4P0ErpRWjVoIf+d1owIr79t4FO+rnJUPgDTp2BvOYtkeib5k4crwBWhtzZ7yGDiJCED"
    "CiHGMuRcP+OyG1eu1tMKth8oX85cHOnMZperAsxdJOy/s1GQ9y6YaoKnOWmSaQtlRtvOj2/NmvKOXC00BNlG5qbX"
    "U8Yepserr1ujwn1tNJdJixGk8eDjUXjZlPTpIK+D71FBB7n625n7kib/tZYdXunF+yDxd6sLTZVlJ5PEaIRv8DPS"
    "2NKYAZ+ckQ0pzFdwjYF5dWwVYRMyALprhuJNAewuo/lvjCwzdwezN8M27RMA/5qGZBkiLI8iF5Evhy9cXkno/3WS"
    "s9pcDqk1RoU3lE3gWn1jF4dIdZJGa8hGCwDIi/fWP21FhFCjKbEVwvncpLOCz9auUfMhm9Ik97SRRs+THwAD77SD"
    "oXbzG1Ufu77zyfojsxMw4NJ1Xi62699SoY1poD+NKQoelJnNVLB3+qXYfhkZ6rQpTWZc7Oag7JEba5a22fPWV6hd"
    "6zuhUTbUSNNYDZ4I4mwF4gZmor4EdO+GfqCtsvdwRW8nIzthpxc3hQnZ1KnX/vkish9ATNj8r6e3b0nXElYLECJQ"
    "t471BhGo6LRChnKQzSS9GuQ5adVMXZY5WeZxaxBb48LY6j1WVzkwcJMflgF3b1KolYhbU13GXtQ10D+H78anL4gF"
    "+JC2W+qAy5UktKyRNdOb9t950Qs7NgPyQtpMp/7Tuq20mM/Ed+Wicyw5jjpAvKss4vsHQHPkH47GS2nQB8wibeUG"
    "dv7EC8E0wGMF+1Z3etBPOQ4gqrLQ2HhYtwCmSs8f3hkrny6DJ/LBzdWdYY3eeFnVRhwzYS4zcK6kkOs2z8q56nwz"
    "pJfO8XxoAdGZcyBDh5iWctdzgg1jiqAz19Ue2je8KBDnZzyRC9HEbCKtoUY7T2iEsv26iv074WABNo46QjgAgzVZ"
    "iq6xt20EXwosmq1te4xDMqcvdpyJTpoDH3xHh/EL8Kagrv2Mkofvq9l/NEnxBwh76jT3uQgR8gSzUL8lJZ0h7KSe"
    "bSlsXpJaGp3xbolh6xHMQITD+x00J/UTBuP0oLX8kUyVabIQztPnZuQAQd0RTjLcptig4boZzAzsJgylCimoH9L4"
    "d5cZF0c9pKiknGdWJawKq/bAmoCUIWT9SfBxT1yMBhtchYh8KiO5RpDH0dW5oBTpKKF7Xa178J036/s/wmvclbGo"
    "M7GoVYWLx2hoUNvLaDbtlGtUFbyNY5bdfAEfFXg/EgkC2MlDj8rkeXgcFaBAo4dQoJU6QqswNfHBRX96JBXid8kI"
    "fSwXDbgVTN1lKZE9fSy/eKHdHL5P3VUy6uou32w3c1ITYnAo9eof389YB+zHI7dAuEcIB7rsEOYhit/locd2Amk8"
    "WLXVqkt85DpKIFyOHlXc2OQN+15XHuFXpsjJe3E2NoLD3UpwnP3X0oIr02GIi3pckjJfzH/PjUUFCJbaeyUS2gAU"
    "pctOZZQ="
)
STORED_ID = "2d0b52fb324e620adbeab1c4522b24edfd52a1b075da999a54360b86f3ef22ad"


def test_a_core_is_encoded_as_pinned():
    assert make_core().to_bytes().hex() == CORE_HEX


def test_a_header_is_encoded_as_pinned():
    body = bytes(sealed_size(20_000))
    data = header_of(make_core().to_bytes(), body, 20_000, 16 * KIB)
    assert data.hex() == BEFORE_CORE_HEX + CORE_HEX + AFTER_CORE_HEX


def test_an_envelope_of_version_1_opens_for_ever(tmp_path):
    data = base64.b64decode(STORED_BASE64)
    (tmp_path / "x").write_bytes(data)
    stored = read_envelope(tmp_path / "x")
    assert stored.to_bytes() == data
    assert parse_header(stored.header, max_plain_bytes=LIMIT).update_id == STORED_ID
    pieces = (stored.header, stored.signature, stored.wrap, stored.body)
    assert receive(*pieces) == b"class-incremental"


def test_the_update_id_is_the_hash_of_the_header_as_received(sent):
    sealed, _ = sent
    assert sealed.parsed.update_id == hashlib.sha256(sealed.header).hexdigest()


# --- reading cores --------------------------------------------------------------------------


def test_a_core_is_read_as_it_was_written():
    for core in (make_core(), make_core(SERVER, **BROADCAST), make_core(schema="", task=-1)):
        assert Core.from_bytes(core.to_bytes()) == core


def core_fields() -> dict[str, object]:
    names = ("v", "fed", "run", "dir", "from", "key", "to", "meth", "sch", "task", "rnd", "kind")
    parsed = Fields(make_core().to_bytes(), "core", max_bytes=4096)
    return {name: parsed.get(name) for name in (*names, "base")}


def test_unknown_fields_of_a_core_and_a_header_are_tolerated(sent):
    assert Core.from_bytes(pack_map({**core_fields(), "new": [1, {"a": 2}]})) == make_core()
    parsed = Fields(sent[0].header, "header", max_bytes=LIMIT)
    known = {k: parsed.get(k) for k in ("core", "sealed", "plain", "chunk", "hashes")}
    more = parse_header(pack_map({**known, "new": None}), max_plain_bytes=LIMIT)
    assert more.hashes == sent[0].parsed.hashes


@pytest.mark.parametrize("name", list(core_fields()))
def test_every_field_of_a_core_is_needed_and_typed(name):
    good = core_fields()
    bad = [None, 1.5, [1], {}, True, "", "x" * 129, "a\nb", b"", b"x" * 129, -2, 2**60]
    if name == "sch":
        bad.remove(b"")  # a payload without a schema
    for value in bad:
        with pytest.raises(WireError) as caught:
            Core.from_bytes(pack_map({**good, name: value}))
        assert len(str(caught.value)) < 300
    with pytest.raises(WireError):
        Core.from_bytes(pack_map({k: v for k, v in good.items() if k != name}))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 2**31 - 1])
def test_the_version_is_judged_before_every_other_field(version):
    with pytest.raises(VersionMismatch, match=f"version {version}, expected"):
        Core.from_bytes(pack_map({"v": version}))


@pytest.mark.parametrize(
    "changes",
    [
        {"federation": "xyz"},
        {"federation": "AB" * 16},
        {"schema": "5e" * 31},
        {"run": ""},
        {"method": "m" * 129},
        {"kind": "two\nlines"},
        {"task": -2},
        {"base": 2**54},
    ],
)
def test_a_core_that_receivers_would_refuse_is_not_sent(changes):
    with pytest.raises(WireError):
        seal(b"", make_core(**changes), CLIENT, chunk_bytes=16 * KIB)


# --- reading headers ------------------------------------------------------------------------


def header_with(**changes) -> bytes:
    plain_bytes = 40_000
    size = sealed_size(plain_bytes)
    good = {
        "core": make_core().to_bytes(),
        "sealed": size,
        "plain": plain_bytes,
        "chunk": 16 * KIB,
        "hashes": bytes(32 * -(-size // (16 * KIB))),
    }
    return pack_map({**good, **changes})


def test_a_consistent_header_is_read():
    parsed = parse_header(header_with(), max_plain_bytes=40_000)
    assert isinstance(parsed, Header)
    assert (parsed.plain_bytes, parsed.sealed_bytes, parsed.chunk_bytes) == (40_000, 40_104, 16384)
    assert len(parsed.hashes) == 3
    assert [parsed.chunk_size(i) for i in range(3)] == [16384, 16384, 7336]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sealed": 40_105}, "40000 bytes become 40104 bytes when sealed, got 40105"),
        ({"plain": 39_999}, "got 40104"),
        ({"plain": -1}, "'plain'"),
        ({"chunk": 16 * KIB - 1}, "'chunk'"),
        ({"chunk": (1 << 20) + 1}, "'chunk'"),
        ({"chunk": 0}, "'chunk'"),
        ({"chunk": 32 * KIB}, "expected 64 bytes"),
        ({"hashes": bytes(64)}, "expected 96 bytes, got bytes of length 64"),
        ({"hashes": bytes(128)}, "expected 96 bytes"),
        ({"hashes": bytes(97)}, "expected 96 bytes"),
        ({"hashes": "x" * 96}, "got str"),
        ({"core": b""}, "core is not msgpack"),
        ({"core": {}}, "'core'"),
        ({"plain": True}, "'plain'"),
        ({"sealed": 2**63}, "'sealed'"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(changes, words):
    with pytest.raises(WireError, match=words):
        parse_header(header_with(**changes), max_plain_bytes=LIMIT)


def test_a_payload_above_the_limit_is_refused_with_both_numbers():
    with pytest.raises(TooLarge, match="40000 bytes exceeds the limit of 39999"):
        parse_header(header_with(), max_plain_bytes=39_999)


def test_a_header_longer_than_any_allowed_payload_needs_is_not_parsed(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("parsed")

    monkeypatch.setattr("msgpack.unpackb", never)
    with pytest.raises(TooLarge):
        parse_header(bytes(4000), max_plain_bytes=1000)
    with pytest.raises(TooLarge):
        verify_header(bytes((8 << 20) + 1), bytes(64), CLIENT.public)
    with pytest.raises(TooLarge):
        parse_header(bytes((8 << 20) + 1), max_plain_bytes=1 << 60)


def test_the_aead_adds_exactly_what_the_header_is_checked_against():
    for size in (0, 1, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 5 * 16 * KIB, 100_001):
        sealed, _ = seal(bytes(size), make_core(), CLIENT, chunk_bytes=1 << 20)
        assert len(sealed.body) == sealed_size(size)


@given(st.binary(max_size=400))
def test_random_bytes_as_a_header_raise_only_named_errors(data):
    with pytest.raises(FcilError):
        parse_header(data, max_plain_bytes=LIMIT)
    with pytest.raises(FcilError):
        Core.from_bytes(data)


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_header_is_read_or_refused_by_name(data):
    """Bits flipped, bytes replaced, cut out or inserted; never anything but FcilError."""
    changed = bytearray(header_with())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        end = data.draw(st.integers(at, min(len(changed), at + 8)))
        changed[at:end] = data.draw(st.binary(max_size=8))
    try:
        parsed = parse_header(bytes(changed), max_plain_bytes=LIMIT)
    except FcilError:
        return
    assert parsed.sealed_bytes == sealed_size(parsed.plain_bytes)
    assert sum(parsed.chunk_size(i) for i in range(len(parsed.hashes))) == parsed.sealed_bytes
    assert Core.from_bytes(parsed.core.to_bytes()) == parsed.core


# Values that msgpack can carry, with names that the header and the core use.
NAMES = st.sampled_from(["core", "sealed", "plain", "chunk", "hashes", "v", "fed", "dir", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("ab\n\u20ac")
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_well_formed_nonsense_as_a_header_raises_only_named_errors(content):
    with pytest.raises(FcilError):
        parse_header(pack_map(content), max_plain_bytes=LIMIT)
    if content.get("v") != PROTOCOL_VERSION:
        with pytest.raises(FcilError):
            Core.from_bytes(pack_map(content))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        b"\x81\xa1v",
        b"\x81\x01\x01",
        b"\x81\xc4\x01a\x01",
        b"\x01\x01",
    ],
)
def test_broken_msgpack_is_malformed(data):
    with pytest.raises(WireError):
        Fields(data, "header", max_bytes=10_000)


# --- envelope files -------------------------------------------------------------------------


def test_an_envelope_file_gives_back_what_was_written(tmp_path, sent):
    sealed, wrap = sent
    write_envelope(tmp_path / "x", sealed.stored(wrap))
    stored = read_envelope(tmp_path / "x")
    assert stored == StoredEnvelope(sealed.header, sealed.signature, wrap, sealed.body)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_flipped_bit_anywhere_in_an_envelope_file_is_corruption(tmp_path, sent):
    sealed, wrap = sent
    path = tmp_path / "x"
    data = sealed.stored(wrap).to_bytes()
    small = len(data) - len(sealed.body)
    for bit in [*range(0, small * 8, 5), *(small * 8 + b for b in bits_of(sealed.body))]:
        path.write_bytes(flip(data, bit))
        with pytest.raises(CorruptFile, match="is damaged"):
            read_envelope(path)


def test_a_cut_or_lengthened_envelope_file_is_corruption(tmp_path, sent):
    sealed, wrap = sent
    path = tmp_path / "x"
    data = sealed.stored(wrap).to_bytes()
    for size in (0, 1, 24, 55, 56, 57, 400, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptFile, match="expected"):
            read_envelope(path)
        with pytest.raises(CorruptFile, match="expected"):
            StoredEnvelope.from_bytes(data[:size])
    path.write_bytes(data + b"x")
    with pytest.raises(CorruptFile, match=f"expected {len(data)} bytes, got {len(data) + 1}"):
        read_envelope(path)


def test_an_envelope_file_with_the_body_of_another_is_corruption(tmp_path, sent):
    sealed, wrap = sent
    other, _ = seal(PLAIN, make_core(), CLIENT, chunk_bytes=16 * KIB)
    short, _ = seal(b"", make_core(), CLIENT, chunk_bytes=16 * KIB)
    for body in (other.body, short.body):
        mixed = StoredEnvelope(sealed.header, sealed.signature, wrap, body)
        write_envelope(tmp_path / "x", mixed)
        with pytest.raises(CorruptFile, match=r"chunk 0 of 4 was altered|sealed bytes"):
            read_envelope(tmp_path / "x")


def test_a_missing_envelope_file_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        read_envelope(tmp_path / "none")


@given(st.binary(max_size=200))
def test_random_bytes_as_a_stored_envelope_are_corruption(data):
    with pytest.raises(CorruptFile):
        StoredEnvelope.from_bytes(data)


def test_a_stored_envelope_is_read_in_steps_and_checked_on_request(tmp_path):
    sealed, key = seal(bytes(700_000), make_core(), CLIENT)
    write_envelope(tmp_path / "x", sealed.stored(bytes(1168)))
    with EnvelopeFile(tmp_path / "x") as file:
        assert (file.header, file.signature) == (sealed.header, sealed.signature)
        steps = list(file.steps())
        assert max(map(len, steps)) == 256 * KIB
        assert b"".join(steps) == sealed.body
        assert file.read(range(3, 5)) == sealed.body[96 * KIB : 160 * KIB]
        file.verify()
        assert open_body(file.parsed, key, file.steps()) == bytes(700_000)
        data = bytearray((tmp_path / "x").read_bytes())
        data[-1] ^= 1
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(CorruptFile, match="chunk 21 of 22 was altered"):
            file.verify()
        (tmp_path / "x").write_bytes(data[:-1])
        with pytest.raises(CorruptFile, match="it has become shorter"):
            list(file.steps())


# --- the shape of the module ----------------------------------------------------------------


def test_the_cipher_is_fed_in_steps_so_that_other_threads_run(monkeypatch):
    """Encryption holds the interpreter: no single call may see more than a step."""
    sizes = []

    class Spy:
        generate_key = envelope.Cobblestone256Encryptor.generate_key

        def __init__(self, key, context):
            self._inner = REAL(key, context)

        def update_into(self, data, buf):
            sizes.append(len(data))
            return self._inner.update_into(data, buf)

        def finalize(self):
            return self._inner.finalize()

    REAL = envelope.Cobblestone256Encryptor
    monkeypatch.setattr(envelope, "Cobblestone256Encryptor", Spy)
    plain = bytes(3 * (1 << 20) + 5)
    sealed, key = seal(plain, make_core(), CLIENT, chunk_bytes=1 << 20)
    assert sizes == [128 * KIB] * 24 + [5]
    assert open_body(sealed.parsed, key, sealed.parsed.split(sealed.body)) == plain


@pytest.mark.parametrize("sizes", [(), (0, 0), (1, 0, 20_000), (16_384, 16_384), (300_001, 70)])
def test_a_payload_is_sealed_in_pieces_as_it_would_be_whole(sizes):
    pieces = [bytes([n]) * size for n, size in enumerate(sizes)]
    whole = b"".join(pieces)
    sealed, key = seal([memoryview(p) for p in pieces], make_core(), CLIENT)
    assert sealed.parsed.plain_bytes == len(whole)
    assert all(sealed.parsed.fits(i, sealed.chunk(i)) for i in range(len(sealed.parsed.hashes)))
    assert open_body(sealed.parsed, key, sealed.parsed.split(sealed.body)) == whole
