"""Identifiers of clients, federations, runs, rounds and updates."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from datetime import UTC, datetime
from typing import Any, NamedTuple, NewType

ClientId = NewType("ClientId", str)  # 26 characters of base32: 128 random bits
FederationId = NewType("FederationId", str)  # 32 hex digits: digest of the root key
RunId = NewType("RunId", str)  # r<UTC time>-<random>
Digest = NewType("Digest", str)  # 64 hex digits: SHA-256
UpdateId = NewType("UpdateId", str)  # the SHA-256 of an envelope's header


class RoundKey(NamedTuple):
    """Permanent name of one exchange; at most one update per client is accepted for it."""

    run: RunId
    task: int
    kind: str
    round: int

    def __str__(self) -> str:
        return f"task {self.task} {self.kind} round {self.round}"

    def precedes(self, other: RoundKey) -> bool:
        """Return True if this is an earlier round of the same task and kind."""
        return self[:3] == other[:3] and self.round < other.round


_CLIENT_ID = re.compile(r"[a-z2-7]{26}")
_RUN_ID = re.compile(r"r\d{8}-\d{6}-[0-9a-f]{4}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def new_client_id() -> ClientId:
    """Draw a client id at enrolment; it never depends on a key, so keys can rotate."""
    return ClientId(base64.b32encode(os.urandom(16)).decode("ascii").rstrip("=").lower())


def named_client_id(name: str) -> ClientId:
    """Return the id of a client in a federation whose numbers must be reproducible."""
    word = hashlib.sha256(b"fcil/1/named-client\0" + name.encode()).digest()[:16]
    return ClientId(base64.b32encode(word).decode("ascii").rstrip("=").lower())


def new_run_id() -> RunId:
    """Draw a run id that sorts by time."""
    return RunId(f"r{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.urandom(2).hex()}")


def is_client_id(text: str) -> bool:
    """Return True if the text has the form of a client id."""
    return _CLIENT_ID.fullmatch(text) is not None


def seed_word(client: ClientId) -> int:
    """Return the word by which a client's random numbers in a round differ from the others'."""
    return int.from_bytes(client.encode()[:6], "big")


def is_run_id(text: str) -> bool:
    """Return True if the text has the form of a run id."""
    return _RUN_ID.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Return True if the text has the form of a SHA-256 digest."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(content: Any) -> Digest:
    """Return the SHA-256 of JSON-ready content (hex)."""
    return sha256_of(json.dumps(content, sort_keys=True).encode())


def sha256_of(*pieces: bytes | bytearray | memoryview) -> Digest:
    """Return the SHA-256 (hex) of bytes that come in pieces, without joining them."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return Digest(sha.hexdigest())
