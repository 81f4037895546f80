"""Encryption under a passphrase: scrypt, then AES-256-GCM, both as the library provides them.

magic 8, log2 of scrypt's n 1, salt 16, nonce 12, ciphertext with its tag
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from fcil_protocol.errors import CannotOpen, CorruptFile, UsageError
from fcil_protocol.storage.atomic_files import storage_errors

MIN_PASSPHRASE_CHARS = 12
MAX_PASSPHRASE_BYTES = 1024
_MAGIC = b"fcilpwd1"
_LOG2_N = 17  # 128 MiB and about 0.4 s per guess
_MAX_LOG2_N = 20  # 1 GiB: more than any file of fcil requires
_SALT_BYTES = 16
_NONCE_BYTES = 12
_HEAD_BYTES = len(_MAGIC) + 1 + _SALT_BYTES + _NONCE_BYTES


def seal_with_passphrase(plain: bytes, passphrase: str, context: bytes) -> bytes:
    """Encrypt bytes; ``context`` is bound to them and must be given again to open them.

    Raises:
        UsageError: the passphrase is too short.
    """
    if len(passphrase) < MIN_PASSPHRASE_CHARS:
        raise UsageError(
            f"a passphrase has at least {MIN_PASSPHRASE_CHARS} characters, got {len(passphrase)}.",
            action="Choose a longer one, such as five random words.",
        )
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    head = _MAGIC + bytes((_LOG2_N,)) + salt + nonce
    key = _key(passphrase, salt, _LOG2_N)
    return head + AESGCM(key).encrypt(nonce, plain, head + context)


def open_with_passphrase(data: bytes, passphrase: str, context: bytes) -> bytes:
    """Return the sealed bytes, decrypted.

    Raises:
        CorruptFile: the bytes do not have this form.
        CannotOpen: the passphrase or the context differs, or the bytes were altered.
    """
    log2_n = data[len(_MAGIC)] if len(data) > _HEAD_BYTES else 0
    if not data.startswith(_MAGIC) or not 1 <= log2_n <= _MAX_LOG2_N:
        raise CorruptFile(
            f"expected data sealed with a passphrase ({_MAGIC.decode()}), got {len(data)} bytes "
            "of something else.",
            action="Use another copy of the file.",
        )
    head = data[:_HEAD_BYTES]
    salt = head[len(_MAGIC) + 1 : -_NONCE_BYTES]
    try:
        key = _key(passphrase, salt, log2_n)
        return AESGCM(key).decrypt(head[-_NONCE_BYTES:], data[_HEAD_BYTES:], head + context)
    except InvalidTag as error:
        raise CannotOpen(
            "the passphrase is wrong, or the sealed data was altered.",
            action="Check the passphrase; nothing was used.",
        ) from error


def read_passphrase(path: Path) -> str:
    """Return the first line of a file, without its line end.

    Raises:
        UsageError: the line is empty, too long or no text.
        StorageError: it cannot be read.
    """
    with storage_errors("read", path), path.open("rb") as file:
        line = file.readline(MAX_PASSPHRASE_BYTES + 1).rstrip(b"\r\n")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or len(line) > MAX_PASSPHRASE_BYTES:
        raise UsageError(
            f"expected a passphrase on the first line of {path}, got {len(line)} bytes.",
            action="Write one line of UTF-8 text into it.",
        )
    return text


def _key(passphrase: str, salt: bytes, log2_n: int) -> bytes:
    try:
        text = passphrase.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the passphrase holds bytes that are no valid text.", action="Type it again."
        ) from error
    return Scrypt(salt=salt, length=32, n=1 << log2_n, r=8, p=1).derive(text)
