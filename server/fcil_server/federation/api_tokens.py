"""Tokens of the HTTP API: ``api.tokens`` in the federation's directory, 0600.

A token is 256 bits and is shown once; the file has its SHA-256 digest, which opens nothing. The
file is in no backup: a restored federation makes new tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fcil_protocol.errors import CorruptFile, UsageError
from fcil_protocol.storage.atomic_files import read_private, write_atomic

TOKENS_NAME = "api.tokens"
REQUESTS_NAME = "api.requests"  # next to it: acts that were requested with a key
VERSION = 1  # of the file's format
TOKEN_BYTES = 32  # 256 bits
PREFIX = "fcil_"  # by which scanners for secrets, and people, know a token
MAX_TOKENS = 100
MAX_TOKEN_CHARS = 128  # that are compared at all
_changes = threading.Lock()  # one change at a time; other processes wait for the directory's lock
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile("[0-9a-f]{64}")
_REMEDY = "Remove it, and make new ones with: fcil-server token new NAME"


class TokenRole(StrEnum):
    """Rights of a token; each includes those before it."""

    READ = "read"
    OPERATE = "operate"
    ADMINISTER = "administer"

    def allows(self, needed: TokenRole) -> bool:
        """Return True if this role has the rights of another."""
        order = list(TokenRole)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True)
class ApiToken:
    """One token, without its secret.

    Attributes:
        digest: SHA-256 of its text, hexadecimal.
        made_at: unix seconds.
        expires_at: unix seconds; None: it does not expire.
    """

    name: str
    role: TokenRole
    digest: str = field(repr=False)
    made_at: float
    expires_at: float | None

    def is_valid(self, now: float) -> bool:
        """Return True if it has not expired."""
        return self.expires_at is None or now < self.expires_at

    def row(self, now: float) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "name": self.name,
            "role": self.role.value,
            "made_at": self.made_at,
            "expires_at": self.expires_at,
            "valid": self.is_valid(now),
        }


def read_tokens(directory: Path) -> list[ApiToken]:
    """Return the tokens of a federation, the oldest first.

    Raises:
        CorruptFile: the file is damaged, or of another version.
        KeyFileError: others can read it.
        StorageError: it cannot be read.
    """
    path = directory / TOKENS_NAME
    if not path.exists():
        return []
    data = read_private(path)
    try:
        content = json.loads(data)
        version = content["version"]
        rows = content["tokens"] if version == VERSION else []
        found = [_token(row) for row in rows]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        text = f"{path} is damaged: it lists the API's tokens."
        raise CorruptFile(text, action=_REMEDY) from error
    if version != VERSION:
        raise CorruptFile(
            f"{path} has version {str(version)[:20]!r}, expected {VERSION}.",
            action="Use the fcil version that wrote it, or remove it and make new tokens.",
        )
    return found


def _token(row: dict[str, Any]) -> ApiToken:
    if not (_NAME.fullmatch(row["name"]) and _DIGEST.fullmatch(row["digest"])):
        raise ValueError("no name and digest of a token")
    expires = row["expires_at"]
    return ApiToken(
        name=row["name"],
        role=TokenRole(row["role"]),
        digest=row["digest"],
        made_at=float(row["made_at"]),
        expires_at=None if expires is None else float(expires),
    )


def make_token(
    directory: Path, name: Any, role: Any, *, lasts_s: float | None, now: float
) -> tuple[str, ApiToken]:
    """Add a token; return its text, which is kept nowhere, and its entry.

    Args:
        directory: of the federation.
        name: of the token; the name of an expired one is free again.
        role: a `TokenRole`.
        lasts_s: its lifetime, seconds; None: it does not expire.
        now: unix seconds.

    Raises:
        UsageError: name or role are wrong, the name is taken, or there are too many tokens.
        CorruptFile, KeyFileError, StorageError: nothing was changed.
    """
    with _changes:
        return _make(directory, check_token_name(name), _role(role), lasts_s, now)


def _make(
    directory: Path, name: str, role: TokenRole, lasts_s: float | None, now: float
) -> tuple[str, ApiToken]:
    kept = [t for t in read_tokens(directory) if t.name != name or t.is_valid(now)]
    if any(t.name == name for t in kept):
        raise UsageError(
            f"there is a token {name!r} already.",
            action=f"Choose another name, or revoke it: fcil-server token revoke {name}",
        )
    if len(kept) >= MAX_TOKENS:
        raise UsageError(
            f"there are {len(kept)} tokens, and at most {MAX_TOKENS} are allowed.",
            action="Revoke those that are not used: fcil-server token ls",
        )
    text = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    expires = None if lasts_s is None else now + lasts_s
    token = ApiToken(name, role, _digest(text), now, expires)
    _write(directory, [*kept, token])
    return text, token


def revoke_token(directory: Path, name: Any) -> ApiToken:
    """Remove a token: it is void from the next request on.

    Raises:
        UsageError: there is none of this name.
        CorruptFile, KeyFileError, StorageError: nothing was changed.
    """
    with _changes:
        return _revoke(directory, name)


def _revoke(directory: Path, name: Any) -> ApiToken:
    tokens = read_tokens(directory)
    gone = next((t for t in tokens if t.name == name), None)
    if gone is None:
        known = ", ".join(t.name for t in tokens[:8]) or "none"
        raise UsageError(
            f"there is no token {str(name)[:64]!r}; known are {known}.",
            action="List them with: fcil-server token ls",
        )
    _write(directory, [t for t in tokens if t is not gone])
    return gone


def find_token(tokens: Sequence[ApiToken], text: str, now: float) -> ApiToken | None:
    """Return the valid token with this text; None: there is none.

    Wrong tries are not counted: 256 bits need no count.
    """
    asked = _digest(text[:MAX_TOKEN_CHARS])
    # All are compared, so that the time reveals nothing.
    found = [t for t in tokens if hmac.compare_digest(t.digest.encode(), asked.encode())]
    return found[0] if found and found[0].is_valid(now) else None


def check_token_name(name: Any) -> str:
    """Return a token's name.

    Raises:
        UsageError: it is not one.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"expected a name of 1 to 64 letters, digits, dots, dashes or underscores, got "
            f"{ascii(name)[:40]}.",
            action="Name the program that will use the token, such as: grafana",
        )
    return name


def _role(role: Any) -> TokenRole:
    try:
        return TokenRole(role)
    except ValueError as error:
        raise UsageError(
            f"expected a role that is one of {', '.join(TokenRole)}, got {ascii(role)[:40]}."
        ) from error


def _write(directory: Path, tokens: Sequence[ApiToken]) -> None:
    rows = [
        {
            "name": t.name,
            "role": t.role.value,
            "digest": t.digest,
            "made_at": t.made_at,
            "expires_at": t.expires_at,
        }
        for t in tokens
    ]
    content = {"version": VERSION, "tokens": rows}
    write_atomic(directory / TOKENS_NAME, json.dumps(content).encode())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
