"""Wire form of a message: its frames.

A message is ``[body, signature, blob, ...]``. ``body`` is a msgpack map with the type under ``t``;
``signature`` is the sender's Ed25519 over the body as sent, or a MAC of it by the session's keys
(empty for chunks, whose hash is in a signed header); blobs are opaque here. Unknown types are
answered with a Nack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from pydantic import ValidationError

from fcil_protocol.errors import TooLarge, WireError
from fcil_protocol.messages.messages import (
    MAX_WANTED,
    MESSAGES,
    RAW_DIGESTS,
    SIGNATURE_BYTES,
    TO_SERVER,
    Chunk,
    Message,
)
from fcil_protocol.messages.relay_frames import is_laned
from fcil_protocol.trust.session_keys import MAC_BYTES

MAX_BODY_BYTES = 256 * 1024
MAX_BLOBS = 4
MAX_HEADER_BLOB_BYTES = 9 << 18  # a header lists 32 bytes per chunk
_MAX_ARRAY = 100_000  # elements
MAX_CHUNK_BYTES = (1 << 20) + 64
_BLOBS = {"update": (3, 4), "parts": (3,), "chunk": (1,)}


@dataclass(frozen=True)
class Received:
    """A parsed message, with the bytes that its signature, or MAC, covers."""

    message: Message
    body: bytes
    signature: bytes
    blobs: tuple[bytes, ...]


def encode(message: Message, *, raw_digests: bool = False) -> bytes:
    """Return the body frame of a message; ``raw_digests``: with digests of envelopes as bytes."""
    context = RAW_DIGESTS if raw_digests else None
    fields = message.model_dump(exclude_defaults=True, context=context)
    fields["t"] = message.type
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def numbered(body: bytes, seq: int) -> bytes:
    """Return a body that `encode` made, with this number in it."""
    packed: bytes = msgpack.packb({**msgpack.unpackb(body), "seq": seq}, use_bin_type=True)
    return packed


def parse(frames: Sequence[bytes], *, to_server: bool = False) -> Received:
    """Parse the frames of a message from outside; limits first, signature by the caller.

    Args:
        frames: of the message.
        to_server: it comes from a client or a relay; what only servers send is refused, and so are
            long lists. Both take a server much longer to read than a stranger to write.

    Raises:
        TooLarge, WireError: with what was expected and got.
    """
    if is_laned(frames):
        raise WireError("only the connection of a relay has lanes.")
    if not 2 <= len(frames) <= 2 + MAX_BLOBS:
        raise WireError(f"a message has 2 to {2 + MAX_BLOBS} frames, got {len(frames)}.")
    body, signature, *blobs = frames
    if len(body) > MAX_BODY_BYTES:
        raise TooLarge(f"a message body of {len(body)} bytes exceeds {MAX_BODY_BYTES}.")
    if len(signature) not in (0, MAC_BYTES, SIGNATURE_BYTES):
        raise WireError(
            f"a signature has {SIGNATURE_BYTES} bytes and a MAC {MAC_BYTES}, got {len(signature)}."
        )
    fields = _unpack(bytes(body), MAX_WANTED if to_server else _MAX_ARRAY)
    name = fields.pop("t", None)
    cls = MESSAGES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown message type {str(name)[:40]!r}.")
    if to_server and cls not in TO_SERVER:
        raise WireError(f"only a server sends a {cls.type}.")
    if cls.signed and not signature:
        raise WireError(f"the message {cls.type} must be signed.")
    limit = MAX_CHUNK_BYTES if cls is Chunk else MAX_HEADER_BLOB_BYTES
    for blob in blobs:
        if len(blob) > limit:
            raise TooLarge(f"a blob of {len(blob)} bytes in {cls.type} exceeds {limit}.")
    expected = _BLOBS.get(cls.type, (0,))
    if len(blobs) not in expected:
        counts = " or ".join(map(str, expected))
        raise WireError(f"{cls.type} has {counts} blobs, got {len(blobs)}.")
    try:
        message = cls.model_validate(fields)
    except ValidationError as error:
        raise WireError(f"{cls.type}: {_first_fault(error)}.") from error
    return Received(message, bytes(body), bytes(signature), tuple(bytes(b) for b in blobs))


def _unpack(body: bytes, longest: int) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=MAX_BODY_BYTES,
            max_bin_len=MAX_BODY_BYTES,
            # msgpack allocates arrays as announced, also within each other.
            max_array_len=min(longest, len(body)),
            max_map_len=256,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        reason = str(error)[:100] or type(error).__name__
        raise WireError(f"a message body is not msgpack: {reason}.") from error
    if not isinstance(fields, dict):
        raise WireError("a message body is not a map.")
    return {str(k): v for k, v in fields.items()}


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(x) for x in fault["loc"])
    return f"field {where!r}: {fault['msg']}"
