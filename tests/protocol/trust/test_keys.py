"""Keys: known answers, signatures, and what is taken from outside."""

import hashlib

import pytest

from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, verify_signature

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


def test_the_federation_is_named_after_the_root_key():
    root = RootKey(SIGNING_SECRET)
    assert root.federation == hashlib.sha256(bytes.fromhex(SIGNING_PUBLIC)).hexdigest()[:32]


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


def small_order_keys():
    """Return every encoding of a point of the curve -x^2 + y^2 = 1 + d x^2 y^2 of order 1 to 8."""
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p

    # A point of order 8 doubles to one of order 4, whose y is 0: then y^2 = -x^2, and with it
    # 2 y^2 = 1 - d y^4.
    def roots(square):
        root = pow(square, (p + 3) // 8, p)
        root = root if root * root % p == square % p else root * pow(2, (p - 1) // 4, p) % p
        return {root, p - root} if root * root % p == square % p else set()

    squares = {(-1 + r) * pow(d, -1, p) % p for r in roots(1 + d)}
    eighth = {y for square in squares for y in roots(square)}
    ys = {0, 1, p - 1, *eighth}
    assert len(ys) == 5
    values = ys | {y + p for y in ys if y + p < 2**255}
    return [(y | sign << 255).to_bytes(32, "little") for y in sorted(values) for sign in (0, 1)]


SMALL_ORDER = small_order_keys()


def test_every_key_of_small_order_would_let_one_signature_fit_any_message():
    fits = [k for k in SMALL_ORDER if verifies(k, b"\x01" + bytes(63))]
    assert (1).to_bytes(32, "little") in fits


def verifies(key, signature):
    try:
        verify_signature(key, "message", b"anything", signature)
    except BadSignature:
        return False
    return True


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
        (lambda f: f | {"sealing": b"\xff" * 1184 + f["sealing"][1184:]}, "not an X-Wing key"),
        *[(lambda f, k=k: f | {"signing": k}, "no usable Ed25519 key") for k in SMALL_ORDER],
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
