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
    SessionSide,
    is_mac_of,
    mac_of,
)

C, S = b"c" * 16, b"s" * 16


def sha(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def side(made: KeyAgreement, nonce: bytes = C, signing: bytes = b"1" * 32) -> SessionSide:
    return SessionSide(nonce, signing, made.public)


def test_both_sides_derive_the_keys_that_the_protocol_defines() -> None:
    secret = bytes(range(32))
    client, server = KeyAgreement(secret), KeyAgreement()
    sides = side(client), side(server, S, b"2" * 32)
    keys = server.agree(*sides)
    assert client.agree(*sides) == keys
    # RFC 5869 by hand: extract with the salt, then two blocks of the expansion.
    public = X25519PublicKey.from_public_bytes(server.public)
    shared = X25519PrivateKey.from_private_bytes(secret).exchange(public)
    drawn = sha(C + S, shared)
    info = b"fcil/1/session" + b"1" * 32 + b"2" * 32 + client.public + server.public
    first = sha(drawn, info + b"\x01")
    second = sha(drawn, first + info + b"\x02")
    assert (keys.to_server, keys.to_client) == (first, second)


def test_other_nonces_signers_or_keys_give_other_keys() -> None:
    client, server = KeyAgreement(), KeyAgreement()
    other = KeyAgreement()
    found = {
        client.agree(side(client), side(server, S)),
        client.agree(side(client), side(server, bytes(16))),
        client.agree(side(client, bytes(16)), side(server, S)),
        client.agree(side(client, signing=bytes(32)), side(server, S)),
        client.agree(side(client), side(server, S, bytes(32))),
        client.agree(side(client), side(other, S)),
        other.agree(side(other), side(server, S)),
        client.agree(side(server), side(client, S)),
    }
    assert len(found) == 8
    assert len({one for keys in found for one in (keys.to_server, keys.to_client)}) == 16


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_point_of_small_order_is_refused(point: bytes) -> None:
    client = KeyAgreement()
    with pytest.raises(BadSignature, match="not usable"):
        client.agree(side(client), SessionSide(S, b"2" * 32, point))


def test_a_mac_is_the_beginning_of_the_hmac_and_matches_nothing_else() -> None:
    key, data = b"k" * 32, b"some body"
    mac = mac_of(key, data)
    assert mac == sha(key, data)[:MAC_BYTES]
    assert is_mac_of(mac, key, data)
    for wrong in (mac[:-1], mac + b"\0", bytes(16), b"", sha(key, data)):
        assert not is_mac_of(wrong, key, data)
    assert not is_mac_of(mac, b"l" * 32, data)
    assert not is_mac_of(mac, key, data + b".")


def test_no_key_shows_in_a_repr() -> None:
    client = KeyAgreement()
    keys = client.agree(side(client), side(KeyAgreement(), S))
    assert repr(keys) == "SessionKeys()"
