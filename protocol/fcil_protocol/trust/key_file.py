"""Key files: private keys as JSON, with a digest of the public ones to detect damage."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

from fcil_protocol.errors import KeyFileError
from fcil_protocol.storage.atomic_files import read_private, write_atomic

SECRET_BYTES = 32  # of each private key; X-Wing's is its standard seed


def save_secrets(path: Path, kind: str, secrets: Mapping[str, bytes], check: str) -> None:
    """Write a key file, 0600 from the first moment.

    Args:
        path: its name.
        kind: its format.
        secrets: name -> private key, `SECRET_BYTES` each.
        check: digest of the public keys; `load_secrets` returns it.

    Raises:
        StorageError: the file could not be written.
    """
    fields: dict[str, object] = {"format": kind, "version": 1}
    fields |= {name: base64.b64encode(secret).decode() for name, secret in secrets.items()}
    write_atomic(path, json.dumps({**fields, "check": check}, indent=1).encode() + b"\n")


def load_secrets(path: Path, kind: str, names: tuple[str, ...]) -> tuple[dict[str, bytes], str]:
    """Return the secrets of a key file and the digest of its public keys.

    Raises:
        KeyFileError: it is missing, damaged, of another kind, or readable by others.
        StorageError: the system cannot read it.
    """
    data = read_private(path)
    secrets, check = {}, ""
    try:
        fields = json.loads(data)
        found = (fields["format"], fields["version"])
        if found != (kind, 1):
            raise KeyFileError(
                f"{path}: expected format {kind} 1, got {str(found[0])[:40]} {str(found[1])[:9]}.",
                action="Check the path, or use the fcil version that wrote it.",
            )
        check = str(fields["check"])
        secrets = {name: base64.b64decode(fields[name], validate=True) for name in names}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # raised below, outside of this context: a JSON error carries the whole document
    if not secrets:
        raise KeyFileError(f"the key file {path} is damaged.", action="Restore it from a backup.")
    check_checksum(path, [SECRET_BYTES] * len(names), [len(s) for s in secrets.values()])
    return secrets, check


def check_checksum(path: Path, expected: object, got: object) -> None:
    """Refuse a key file whose secrets do not match its checksum.

    Raises:
        KeyFileError: the two differ.
    """
    if expected != got:
        raise KeyFileError(
            f"the key file {path} is damaged: its keys do not match its checksum.",
            action="Restore it from a backup.",
        )
