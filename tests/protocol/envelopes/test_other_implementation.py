"""PROTOCOL.md says enough to open an envelope: here it is opened by that text alone.

No module of fcil and no construction of the library is used but these primitives: SHA-2, SHA-3,
SHAKE, HMAC, AES-GCM, Ed25519, X25519, ML-KEM-768. The numbers in brackets are sections.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VECTORS = Path(__file__).parents[2] / "vectors" / "1"
BLOCK = 16_384


def said(name: str) -> dict:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def secret(who: str, kind: str) -> bytes:
    return hashlib.sha256(f"fcil test vectors, never use: {who} {kind}".encode()).digest()


def fingerprint(who: str) -> str:  # [3]
    public = Ed25519PrivateKey.from_private_bytes(secret(who, "signing")).public_key()
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:32]


def pieces(stored: bytes) -> tuple[bytes, bytes, bytes, bytes]:  # [6.7]
    magic, version, *sizes = struct.unpack_from("<7sBIHHQ", stored)
    assert (magic, version) == (b"fcilenv", 1)
    at, found = 56, []
    for size in sizes:
        found.append(stored[at : at + size])
        at += size
    assert stored[24:56] == hashlib.sha256(stored[:24] + b"".join(found[:3])).digest()
    assert at == len(stored)
    return tuple(found)


def expand(hash_name: str, key: bytes, info: bytes, size: int) -> bytes:  # RFC 5869, section 2.3
    made, block = b"", b""
    for counter in range(1, 256):
        block = hmac.digest(key, block + info + bytes([counter]), hash_name)
        made += block
        if len(made) >= size:
            break
    return made[:size]


def xor(base: bytes, number: int) -> bytes:
    return (int.from_bytes(base, "big") ^ number).to_bytes(12, "big")


# --- the body [6.4.1] -----------------------------------------------------------------------


def body_keys(key: bytes, salt: bytes, context: bytes) -> tuple[bytes, bytes, bytes]:
    name = b"c2sp.org/chunked-encryption@v1+AEAD_AES_256_GCM\0"
    made = expand("sha512", key, name + salt + context, 32 + 12 + 32)
    return made[:32], made[32:44], made[44:]


def open_body(key: bytes, core: bytes, body: bytes) -> bytes:
    context = b"fcil/1/body\0" + hashlib.sha256(core).digest()
    aes, base, commitment = body_keys(key, body[:24], context)
    assert hmac.compare_digest(commitment, body[24:56])
    blocks = [body[at : at + BLOCK + 16] for at in range(56, len(body), BLOCK + 16)]
    assert blocks, "there is always a last block"
    assert 16 <= len(blocks[-1]) < BLOCK + 16, "it is never full"
    return b"".join(AESGCM(aes).decrypt(xor(base, n), b, b"") for n, b in enumerate(blocks))


def seal_body(key: bytes, core: bytes, salt: bytes, plain: bytes) -> bytes:
    context = b"fcil/1/body\0" + hashlib.sha256(core).digest()
    aes, base, commitment = body_keys(key, salt, context)
    blocks = [plain[at : at + BLOCK] for at in range(0, len(plain) // BLOCK * BLOCK + 1, BLOCK)]
    sealed = [AESGCM(aes).encrypt(xor(base, n), b, b"") for n, b in enumerate(blocks)]
    return salt + commitment + b"".join(sealed)


# --- the wrap [6.4.2] -----------------------------------------------------------------------


def decapsulate(seed: bytes, sent: bytes) -> bytes:
    """Return X-Wing's shared secret."""
    stretched = hashlib.shake_256(seed).digest(96)
    mlkem = MLKEM768PrivateKey.from_seed_bytes(stretched[:64])
    x25519 = X25519PrivateKey.from_private_bytes(stretched[64:])
    first = mlkem.decapsulate(sent[:1088])
    second = x25519.exchange(X25519PublicKey.from_public_bytes(sent[1088:]))
    own = x25519.public_key().public_bytes_raw()
    return hashlib.sha3_256(first + second + sent[1088:] + own + b"\\.//^\\").digest()


def unwrap(seed: bytes, wrap: bytes, header: bytes, recipient: str) -> bytes:
    """Open by RFC 9180, base mode: KEM 0x647a, KDF 0x0001, AEAD 0x0002."""
    suite = b"HPKE" + bytes.fromhex("647a00010002")

    def extract(salt: bytes, label: bytes, data: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + data, "sha256")

    def labelled(key: bytes, label: bytes, data: bytes, size: int) -> bytes:
        info = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + data
        return expand("sha256", key, info, size)

    info = b"fcil/1/wrap\0" + hashlib.sha256(header).digest() + recipient.encode()
    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", info)
    key = extract(decapsulate(seed, wrap[:1120]), b"secret", b"")
    aes, nonce = labelled(key, b"key", context, 32), labelled(key, b"base_nonce", context, 12)
    return AESGCM(aes).decrypt(nonce, wrap[1120:], b"")


# --- whole envelopes ------------------------------------------------------------------------


ENDS = {
    "update": ("client", "server"),
    "update-compact": ("client", "server"),
    "inventory": ("client", "server"),
    "part": ("server", "client"),
    "part-compact": ("server", "client"),
}


@pytest.mark.parametrize(("name", "sender", "recipient"), [(n, *e) for n, e in ENDS.items()])
def test_a_frozen_envelope_is_opened_by_the_text_of_the_protocol(name, sender, recipient):
    header, signature, wrap, body = pieces((VECTORS / f"{name}.envelope").read_bytes())
    signer = Ed25519PrivateKey.from_private_bytes(secret(sender, "signing")).public_key()
    signer.verify(signature, b"fcil/1/envelope\0" + header)  # [3.1]
    fields = msgpack.unpackb(header)  # [6.6]
    assert msgpack.unpackb(fields["core"])["key"].hex() == fingerprint(sender)  # [6.5]
    chunks = [body[at : at + fields["chunk"]] for at in range(0, len(body), fields["chunk"])]
    assert fields["hashes"] == b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    key = unwrap(secret(recipient, "sealing"), wrap, header, fingerprint(recipient))
    assert key.hex() == said(name)["content_key"]["hex"]
    plain = open_body(key, fields["core"], body)
    assert (len(body), len(plain)) == (fields["sealed"], fields["plain"])
    assert hashlib.sha256(plain).hexdigest() == said(name)["plain_sha256"]
    assert seal_body(key, fields["core"], body[:24], plain) == body


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_bodies_of_every_shape_are_opened_by_either_side(size):
    from fcil_protocol.envelopes import envelope, header  # noqa: PLC0415 - what is compared with

    key, core, plain = bytes(range(32)), b"a core", bytes(i % 251 for i in range(size))
    ours = seal_body(key, core, bytes(24), plain)
    theirs, _ = envelope._encrypt([memoryview(plain)], envelope.ContentKey(key), core, BLOCK)
    assert open_body(key, core, bytes(theirs)) == plain
    assert len(ours) == len(theirs) == header.sealed_size(size)
    decryptor = envelope.Cobblestone256Decryptor(key, envelope._context(core))
    assert decryptor.update(ours) + decryptor.finalize() == plain


# --- payloads [6.1] -------------------------------------------------------------------------

SIZES = {"F32": ("f", 4), "F16": ("e", 2), "I64": ("q", 8), "I32": ("i", 4), "U8": ("B", 1)}


def read_payload(plain: bytes) -> tuple[dict, dict]:
    """Return tensors as (dtype, shape, numbers), and the metadata."""
    (number,) = struct.unpack_from("<Q", plain)
    size = number % 2**63
    text, body = plain[8 : 8 + size], plain[8 + size :]
    if number < 2**63:
        header = json.loads(text)
        meta = header.pop("__metadata__")["fcil"]
        listed = [[name, t["dtype"], t["shape"]] for name, t in header.items()]
        listed.sort(key=lambda one: header[one[0]]["data_offsets"])
    else:
        assert size % 8 == 0
        meta, *listed = json.loads(zlib.decompress(text, wbits=-15))
    tensors = {}
    for name, dtype, shape in listed:
        code, width = SIZES[dtype]
        count = 1
        for side in shape:
            count *= side
        tensors[name] = (dtype, shape, struct.unpack_from(f"<{count}{code}", body))
        body = body[count * width :]
    assert body == b""
    return tensors, json.loads(meta)


@pytest.mark.parametrize("name", ENDS)
def test_a_frozen_payload_is_read_by_the_text_of_the_protocol(name):
    header, _, _, body = pieces((VECTORS / f"{name}.envelope").read_bytes())
    key = bytes.fromhex(said(name)["content_key"]["hex"])
    plain = open_body(key, msgpack.unpackb(header)["core"], body)
    assert (struct.unpack_from("<Q", plain)[0] >= 2**63) is name.endswith("-compact")
    tensors, meta = read_payload(plain)
    expected = said(name)["payload"]
    assert meta == expected["meta"]
    assert tensors.keys() == expected["tensors"].keys()
    for tensor, t in expected["tensors"].items():
        dtype, shape, numbers = tensors[tensor]
        assert (dtype, shape) == (t["dtype"], t["shape"])
        assert list(numbers) == [t["first"] + t["step"] * i for i in range(len(numbers))]
