"""Headers of envelopes as anybody can make them, true or not."""

from __future__ import annotations

import hashlib

from fcil_protocol.envelopes.header import header_with


def header_of(core_bytes: bytes, body: bytes, plain_bytes: int, chunk_bytes: int) -> bytes:
    """Encode the header of a sealed body."""
    starts = range(0, len(body), chunk_bytes)
    hashes = (hashlib.sha256(body[start : start + chunk_bytes]).digest() for start in starts)
    return header_with(core_bytes, b"".join(hashes), len(body), plain_bytes, chunk_bytes)
