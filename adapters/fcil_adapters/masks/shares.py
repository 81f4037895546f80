"""A client's secrets in one masked round: keys, shares, and the letters that carry them.

A client has a *mask key*, from whose seed all its masks with neighbours follow, and a *self-mask*
seed. Its neighbours hold shares of both, and give one of the two: of the self-mask if its update
has come, else of the mask key. The key that letters are sealed for is a third one, never shared: a
server that recovers a mask key must not read what others wrote to its owner.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fcil_protocol.errors import TrustError, WireError
from fcil_protocol.ids import ClientId
from fcil_protocol.trust.keys import SEALING_BYTES, PrivateKeys, PublicKeys, Secret

SEED_BYTES = 32
SHARE_BYTES = 32  # two numbers of 128 bits
PAIR_BYTES = 1120 + SEED_BYTES + 16  # the encapsulated key, a seed, the tag
LETTER_BYTES = 1120 + 2 * SHARE_BYTES + 16
KEYS_BYTES = 2 * SEALING_BYTES

_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_HALF = 16
_PIECE = 1 << 17  # numbers of a stream that are drawn at once


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fcil/1/masks/" + purpose).derive(secret)


def mask_key(seed: bytes) -> PrivateKeys:
    """Return the X-Wing key pair of a mask key's seed."""
    return PrivateKeys.derive(seed, b"fcil/1/masks/key")


@dataclass(frozen=True)
class RoundSecrets(Secret):
    """A client's own secrets of one masked round. The repr shows none.

    Attributes:
        mask: seed of the mask key.
        own: seed of the self-mask, b.
        letters: seed of the key that letters to this client are sealed for.
    """

    mask: bytes = field(repr=False)
    own: bytes = field(repr=False)
    letters: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> RoundSecrets:
        """Draw new ones from the operating system's generator."""
        return cls(*(os.urandom(SEED_BYTES) for _ in range(3)))

    def public(self) -> bytes:
        """Return the two public keys: of masks, then of letters."""
        return mask_key(self.mask).public.sealing + self.reader().public.sealing

    def reader(self) -> PrivateKeys:
        """Return the key that opens letters."""
        return PrivateKeys.derive(self.letters, b"fcil/1/masks/letters")


def pair_seed(seed: bytes, context: bytes, low: ClientId, high: ClientId) -> bytes:
    """Return what the lower of two clients draws for both, from its mask key's seed."""
    return _derived(seed, b"pair\0" + context + f"{low}/{high}".encode())


def stream_of_pair(pair: bytes, context: bytes, low: ClientId, high: ClientId) -> bytes:
    """Return the seed of the stream that the lower client adds and the higher one subtracts."""
    return _derived(pair, b"stream\0" + context + f"{low}/{high}".encode())


def stream_of_self(own: bytes, context: bytes, client: ClientId) -> bytes:
    """Return the seed of a client's own stream."""
    return _derived(own, b"self\0" + context + client.encode())


def commitment(value: bytes, context: bytes, of: str) -> bytes:
    """Return the SHA-256 by which a secret or a share is recognised."""
    return hashlib.sha256(b"fcil/1/masks/" + of.encode() + b"\0" + context + value).digest()


def seal(to: PublicKeys, value: bytes, info: bytes) -> bytes:
    """Seal bytes for the owner of a key (HPKE with X-Wing)."""
    return _SUITE.encrypt(value, to.sealing_key, b"fcil/1/masks\0" + info)


def unseal(key: PrivateKeys, sealed: bytes, info: bytes) -> bytes:
    """Open sealed bytes.

    Raises:
        TrustError: they were sealed for another key or purpose, or altered.
    """
    try:
        return _SUITE.decrypt(sealed, key.opener, b"fcil/1/masks\0" + info)
    except (InvalidTag, ValueError) as error:
        raise TrustError("a sealed share does not open.") from error


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return the shares of 32 bytes, one for each holder, any ``threshold`` of which give it.

    Shamir, How to Share a Secret, CACM 1979; over GF(2^128), for each half of the secret.
    """
    halves = [
        Shamir.split(threshold, holders, secret[i : i + _HALF]) for i in range(0, SEED_BYTES, _HALF)
    ]
    return [low[1] + high[1] for low, high in zip(*halves, strict=True)]


def join(shares: Sequence[tuple[int, bytes]]) -> bytes:
    """Return the secret of shares, each with its holder's number, from 0.

    Too few shares, or wrong ones, give other bytes, not an error: compare the `commitment`.
    """
    if any(len(share) != SHARE_BYTES for _, share in shares):
        raise WireError(f"a share has {SHARE_BYTES} bytes.")
    return b"".join(
        Shamir.combine([(number + 1, share[i : i + _HALF]) for number, share in shares])
        for i in range(0, SHARE_BYTES, _HALF)
    )


def add_stream(total: Mapping[str, NDArray[Any]], seed: bytes, sign: int) -> None:
    """Add the stream of a seed to all tensors, or subtract it, modulo 2^64, in place.

    The stream is AES-256 in counter mode from 0, read as little-endian integers, through the
    tensors in the order of their names.

    Args:
        total: name -> int64 tensor.
        seed: 32 bytes; never used for another vector.
        sign: 1 or -1.
    """
    encryptor = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    for name in sorted(total):
        flat = total[name].reshape(-1)  # a view: the tensors are contiguous
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            drawn = np.frombuffer(encryptor.update(bytes(8 * len(piece))), "<i8")
            if sign > 0:
                piece += drawn
            else:
                piece -= drawn
