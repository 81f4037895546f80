"""Keys: known answers, key files, signatures, certificates."""

import base64
import hashlib
import json
import stat
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.errors import (
    BadSignature,
    FcilError,
    KeyFileError,
    TooLarge,
    TrustError,
    WireError,
    WrongFederation,
)
from fcil_protocol.fields import pack_map
from fcil_protocol.ids import FederationId
from fcil_protocol.keys import (
    MAX_CERTIFICATE_BYTES,
    Certificate,
    PrivateKeys,
    PublicKeys,
    RootKey,
    verify_signature,
)

# RFC 7748 section 6.1 (Alice), RFC 8032 section 7.1 (test 1), and the first vector of
# draft-connolly-cfrg-xwing-kem, appendix C (its start; the rest by digest).
CURVE_SECRET = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
CURVE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
SIGNING_SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
SIGNING_PUBLIC = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
XWING_SEED = bytes.fromhex("7f9c2ba4e88f827d616045507605853ed73b8093f6efbc88eb1a6eacfa66ef26")
XWING_PUBLIC_START = "e2236b35a8c24b39b10aa1323a96a919a2ced88400633a7b07131713fc14b2b5b19cfc3d"
XWING_PUBLIC_SHA256 = "2e816deebcd76c5c80d0cd2d174478871658e8e2ff42bc9d4a6e486372e856bb"


def fixed_keys() -> PrivateKeys:
    return PrivateKeys(curve=CURVE_SECRET, signing=SIGNING_SECRET, sealing=XWING_SEED)


# --- key pairs ------------------------------------------------------------------------------


def test_public_keys_are_those_of_the_published_vectors():
    public = fixed_keys().public
    assert public.curve.hex() == CURVE_PUBLIC
    assert public.signing.hex() == SIGNING_PUBLIC
    assert public.sealing.hex().startswith(XWING_PUBLIC_START)
    assert hashlib.sha256(public.sealing).hexdigest() == XWING_PUBLIC_SHA256
    assert public.fingerprint == hashlib.sha256(bytes.fromhex(SIGNING_PUBLIC)).hexdigest()[:32]


def test_the_link_library_derives_the_same_curve_key():
    zmq = pytest.importorskip("zmq")
    from zmq.utils import z85

    keys = PrivateKeys.generate()
    assert z85.decode(zmq.curve_public(z85.encode(keys.curve_secret))) == keys.public.curve


def test_two_generated_participants_share_no_key():
    a, b = PrivateKeys.generate().public, PrivateKeys.generate().public
    assert a.curve != b.curve
    assert a.signing != b.signing
    assert a.sealing != b.sealing


def test_no_repr_shows_a_secret():
    keys, root = fixed_keys(), RootKey(SIGNING_SECRET)
    shown = repr(keys) + str(keys) + repr(root) + repr([keys])
    for secret in (CURVE_SECRET, SIGNING_SECRET, XWING_SEED):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
    assert keys.public.fingerprint in repr(keys)
    assert root.federation in repr(root)


# --- public keys from outside ---------------------------------------------------------------


def test_public_keys_survive_the_way_through_fields():
    public = PrivateKeys.generate().public
    assert PublicKeys.from_fields(public.to_fields()) == public


LOW_ORDER = [bytes(32), b"\x01" + bytes(31)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: None, "named fields"),
        (lambda f: [1], "named fields"),
        (lambda f: {}, "'curve' of 32 bytes, got NoneType"),
        (lambda f: f | {"curve": f["curve"][:31]}, "got 31 bytes"),
        (lambda f: f | {"signing": f["signing"] + b"x"}, "got 33 bytes"),
        (lambda f: f | {"sealing": f["sealing"].hex()}, "got str"),
        (lambda f: f | {"curve": LOW_ORDER[0]}, "low order"),
        (lambda f: f | {"curve": LOW_ORDER[1]}, "low order"),
        (lambda f: f | {"sealing": f["sealing"][:1184] + bytes(32)}, "low order"),
        (lambda f: f | {"sealing": b"\xff" * 1184 + f["sealing"][1184:]}, "no X-Wing key"),
    ],
)
def test_public_keys_that_cannot_work_are_refused(change, words):
    fields = PrivateKeys.generate().public.to_fields()
    with pytest.raises(WireError, match=words):
        PublicKeys.from_fields(change(dict(fields)))


# --- signatures -----------------------------------------------------------------------------


def test_a_signature_holds_for_its_key_purpose_and_bytes_only():
    keys = PrivateKeys.generate()
    signature = keys.sign("envelope", b"data")
    assert len(signature) == 64
    verify_signature(keys.public.signing, "envelope", b"data", signature)
    for public, purpose, data, given_signature in [
        (PrivateKeys.generate().public.signing, "envelope", b"data", signature),
        (keys.public.signing, "message", b"data", signature),
        (keys.public.signing, "envelope", b"Data", signature),
        (keys.public.signing, "envelope", b"data", bytes([signature[0] ^ 1]) + signature[1:]),
        (keys.public.signing, "envelope", b"data", signature[:-1]),
        (keys.public.signing, "envelope", b"data", b""),
        (b"short", "envelope", b"data", signature),
    ]:
        with pytest.raises(BadSignature):
            verify_signature(public, purpose, data, given_signature)


def test_purposes_cannot_run_into_the_data():
    """`a` + `b\\0data` and `a\\0b` + `data` would be the same bytes; the latter is no purpose."""
    with pytest.raises(AssertionError):
        fixed_keys().sign("a\0b", b"data")


# --- key files ------------------------------------------------------------------------------


def test_keys_are_the_same_after_save_and_load(tmp_path):
    keys = fixed_keys()
    keys.save(tmp_path / "keys.json")
    loaded = PrivateKeys.load(tmp_path / "keys.json")
    assert loaded.public == keys.public
    assert loaded.curve_secret == CURVE_SECRET
    assert loaded.sign("x", b"y") == keys.sign("x", b"y")
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_a_root_key_is_the_same_after_save_and_load(tmp_path):
    root = RootKey.generate()
    root.save(tmp_path / "root.json")
    loaded = RootKey.load(tmp_path / "root.json")
    assert (loaded.public, loaded.federation) == (root.public, root.federation)
    assert stat.S_IMODE((tmp_path / "root.json").stat().st_mode) == 0o600


def test_the_federation_is_named_after_the_root_key():
    root = RootKey(SIGNING_SECRET)
    assert root.federation == hashlib.sha256(bytes.fromhex(SIGNING_PUBLIC)).hexdigest()[:32]


def test_every_damaged_key_file_is_refused_without_showing_it(tmp_path):
    """Each field is changed in turn; an exchanged secret is noticed by the checksum."""
    path = tmp_path / "keys.json"
    fixed_keys().save(path)
    good = json.loads(path.read_bytes())
    other = base64.b64encode(bytes(range(32))).decode()
    short = base64.b64encode(bytes(31)).decode()
    bad = [
        *({**good, name: other} for name in ("curve", "signing", "sealing")),
        *({**good, name: short} for name in ("curve", "signing", "sealing")),
        *({**good, name: 7} for name in good),
        *({k: v for k, v in good.items() if k != name} for name in good),
        {**good, "version": 2},
        {**good, "check": "0" * 64},
        {**good, "curve": "no base64!"},
        [],
        None,
    ]
    for content in bad:
        path.write_text(json.dumps(content))
        with pytest.raises(KeyFileError) as caught:
            PrivateKeys.load(path)
        assert str(path) in str(caught.value)
        assert good["signing"] not in str(caught.value)
    path.write_bytes(b"\xff{")
    with pytest.raises(KeyFileError, match="damaged"):
        PrivateKeys.load(path)


def test_one_kind_of_key_file_does_not_serve_as_the_other(tmp_path):
    PrivateKeys.generate().save(tmp_path / "keys.json")
    RootKey.generate().save(tmp_path / "root.json")
    with pytest.raises(KeyFileError, match="expected format fcil-root-key"):
        RootKey.load(tmp_path / "keys.json")
    with pytest.raises(KeyFileError, match="expected format fcil-private-keys"):
        PrivateKeys.load(tmp_path / "root.json")


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    for keys in (PrivateKeys.generate(), RootKey.generate()):
        path = tmp_path / "key"
        keys.save(path)
        path.chmod(0o644)
        with pytest.raises(KeyFileError, match="chmod 600"):
            type(keys).load(path)


# --- certificates ---------------------------------------------------------------------------


def test_a_certificate_gives_the_servers_keys_to_members():
    root, server = RootKey.generate(), PrivateKeys.generate().public
    certificate = Certificate.from_bytes(root.certify(server).to_bytes())
    assert certificate.verify(root.federation, time.time()) == server
    assert certificate.federation == root.federation
    assert len(certificate.to_bytes()) < 2048


def test_a_certificate_of_another_federation_is_refused_with_both_names():
    root, other = RootKey.generate(), RootKey.generate()
    certificate = other.certify(PrivateKeys.generate().public)
    with pytest.raises(WrongFederation, match=f"{other.federation}, expected {root.federation}"):
        certificate.verify(root.federation, time.time())


def test_a_certificate_is_good_from_a_day_before_it_was_made_until_its_end():
    root = RootKey.generate()
    before = time.time()
    certificate = root.certify(PrivateKeys.generate().public, valid_days=10)
    day = 86_400
    for now in (before - 0.9 * day, before, before + 9.9 * day):
        certificate.verify(root.federation, now)
    for now in (0.0, before - 1.1 * day, before + 10.1 * day, 1e15):
        with pytest.raises(TrustError, match=r"valid from \d{4}-\d\d-\d\d to .* clock says"):
            certificate.verify(root.federation, now)


def test_a_later_certificate_has_a_higher_serial(monkeypatch):
    root, server = RootKey.generate(), PrivateKeys.generate().public
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    first = root.certify(server)
    monkeypatch.setattr(time, "time", lambda: 1.8e9 + 0.01)
    assert root.certify(server).serial > first.serial


def test_a_certificate_follows_the_one_before_also_on_a_clock_that_was_set_back(monkeypatch):
    root, server = RootKey.generate(), PrivateKeys.generate().public
    first = root.certify(server)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    later = root.certify(server, after=first.serial)
    later.must_follow(first)
    assert later.serial == first.serial + 1


def test_a_flipped_bit_anywhere_in_a_certificate_is_refused():
    root = RootKey.generate()
    data = root.certify(PrivateKeys.generate().public).to_bytes()
    for position in range(0, len(data), 3):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(FcilError):
            Certificate.from_bytes(bytes(changed)).verify(root.federation, time.time())


def test_fields_of_a_certificate_are_those_that_are_signed():
    """`replace` cannot put other keys beside a valid signature: they are read from the body."""
    root = RootKey.generate()
    certificate = root.certify(PrivateKeys.generate().public)
    with pytest.raises(ValueError, match="init=False"):
        replace(certificate, keys=PrivateKeys.generate().public)


def test_a_server_cannot_certify_itself():
    """A certificate that names the right root but is signed by the server's own key."""
    root, server = RootKey.generate(), PrivateKeys.generate()
    body = root.certify(server.public).body
    with pytest.raises(BadSignature):
        Certificate(body, server.sign("certificate", body)).verify(root.federation, time.time())


def test_an_oversized_certificate_is_refused_before_it_is_parsed():
    with pytest.raises(TooLarge):
        Certificate.from_bytes(b"\x81" + bytes(MAX_CERTIFICATE_BYTES))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_as_a_certificate_raise_only_named_errors(data):
    with pytest.raises(FcilError):
        Certificate.from_bytes(data)
    with pytest.raises(FcilError):
        Certificate.from_bytes(pack_map({"body": data, "signature": bytes(64)})).verify(
            FederationId("0" * 32), 0.0
        )
