"""Keys of a session: as defined, the same on both sides, and none from a useless point."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fcil_protocol.errors import BadSignature
from fcil_protocol.trust.session_keys import (
    MAC_BYTES,
    KeyAgreement,
    code_of,
    is_code_of,
)

C, S = b"c" * 16, b"s" * 16


def sha(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def test_both_sides_derive_the_keys_that_the_protocol_defines() -> None:
    secret = bytes(range(32))
    client, server = KeyAgreement(secret), KeyAgreement()
    keys = server.agree(client.public, C, S)
    assert client.agree(server.public, C, S) == keys
    # RFC 5869 by hand: extract with the salt, then two blocks of the expansion.
    public = X25519PublicKey.from_public_bytes(server.public)
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(public)
    drawn = sha(C + S, shared)
    first = sha(drawn, b"fcil/1/session\x01")
    second = sha(drawn, first + b"fcil/1/session\x02")
    assert (keys.to_server, keys.to_client) == (first, second)


def test_other_nonces_or_another_key_give_other_keys() -> None:
    client, server = KeyAgreement(), KeyAgreement()
    found = {
        client.agree(server.public, C, S),
        client.agree(server.public, C, bytes(16)),
        client.agree(server.public, bytes(16), S),
        KeyAgreement().agree(server.public, C, S),
        client.agree(KeyAgreement().public, C, S),
    }
    assert len(found) == 5
    assert len({one for keys in found for one in (keys.to_server, keys.to_client)}) == 10


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_point_of_small_order_is_refused(point: bytes) -> None:
    with pytest.raises(BadSignature, match="not usable"):
        KeyAgreement().agree(point, C, S)


def test_a_code_is_the_beginning_of_the_hmac_and_matches_nothing_else() -> None:
    key, data = b"k" * 32, b"some body"
    code = code_of(key, data)
    assert code == sha(key, data)[:MAC_BYTES]
    assert is_code_of(code, key, data)
    for wrong in (code[:-1], code + b"\0", bytes(16), b"", sha(key, data)):
        assert not is_code_of(wrong, key, data)
    assert not is_code_of(code, b"l" * 32, data)
    assert not is_code_of(code, key, data + b".")


def test_no_key_shows_in_a_repr() -> None:
    keys = KeyAgreement().agree(KeyAgreement().public, C, S)
    assert repr(keys) == "SessionKeys()"
