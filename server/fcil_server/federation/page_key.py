"""The key that signs the page's sessions: ``page.key`` in the federation's directory, 0600.

It is the server's to make. Whoever has it could let in any browser, so it is kept as other
keys are, but for backups: a federation that is restored makes a new one, and sessions end.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from fcil_protocol.errors import KeyFileError
from fcil_protocol.storage.atomic_files import read_private, storage_errors, write_atomic

KEY_NAME = "page.key"
LEFT_NAME = "page.left"  # beside it: the sessions that signed out
MIN_KEY_BYTES = 32


def make_key(directory: Path) -> None:
    """Make the key where there is none.

    Raises:
        KeyFileError: there is one that cannot be used, or that others may read.
        StorageError: it cannot be read or written.
    """
    if not (directory / KEY_NAME).exists():
        renew_key(directory)
    check_key(directory)


def check_key(directory: Path) -> None:
    """Refuse a key that cannot be used.

    Raises:
        KeyFileError, StorageError: why.
    """
    refuse_short(read_private(directory / KEY_NAME))


def refuse_short(key: bytes) -> None:
    """Refuse a key that is too short to be one.

    Raises:
        KeyFileError: it is.
    """
    if len(key) < MIN_KEY_BYTES:
        raise KeyFileError(
            f"the page's key has {len(key)} bytes, expected {MIN_KEY_BYTES} or more.",
            action="Make a new one with: fcil-server page --sign-out",
        )


def renew_key(directory: Path) -> None:
    """Put a new key in place of the old one: every session is over.

    Raises:
        DiskFull, StorageError: the old one is still there.
    """
    write_atomic(directory / KEY_NAME, secrets.token_bytes(MIN_KEY_BYTES))
    left = directory / LEFT_NAME
    with storage_errors("remove", left):  # with their key they are over for ever
        left.unlink(missing_ok=True)
