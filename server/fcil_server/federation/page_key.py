"""The key that signs the dashboard's sessions: ``page.key`` in the federation's directory, 0600.

The server creates it. Its holder could admit any browser, so it is kept like other keys, except in
backups: a restored federation makes a new one, and sessions end.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from fcil_protocol.errors import KeyFileError
from fcil_protocol.storage.atomic_files import read_private, storage_errors, write_atomic

KEY_NAME = "page.key"
LEFT_NAME = "page.left"  # next to it: the sessions that signed out
MIN_KEY_BYTES = 32


def make_key(directory: Path) -> None:
    """Create the key if there is none.

    Raises:
        KeyFileError: the existing one cannot be used, or others may read it.
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
    """Refuse a key that is too short.

    Raises:
        KeyFileError: it is.
    """
    if len(key) < MIN_KEY_BYTES:
        raise KeyFileError(
            f"the dashboard's key has {len(key)} bytes, expected {MIN_KEY_BYTES} or more.",
            action="Make a new one with: fcil-server page --sign-out",
        )


def renew_key(directory: Path) -> None:
    """Replace the key: every session ends.

    Raises:
        DiskFull, StorageError: the old one is still there.
    """
    write_atomic(directory / KEY_NAME, secrets.token_bytes(MIN_KEY_BYTES))
    left = directory / LEFT_NAME
    with storage_errors("remove", left):  # with their key they are over for ever
        left.unlink(missing_ok=True)
