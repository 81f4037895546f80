"""Updates on their way out: sealed once, on disk before the first chunk, until the Ack."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from fcil_client.home import Home
from fcil_protocol.envelope import read_envelope, write_envelope
from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.files import write_atomic
from fcil_protocol.header import Header, parse_header
from fcil_protocol.messages import Chunk, RoundOpen, Update
from fcil_protocol.stored import StoredEnvelope

Send = Callable[..., None]
MAX_PLAIN_BYTES = 1 << 40  # our own files: the server's limit was checked when they were made


class Outbox:
    """Access to a client's outgoing envelopes; small ones of the session stay in memory."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._held: dict[str, StoredEnvelope] = {}
        self._open: tuple[str, StoredEnvelope, Header] | None = None

    def waiting(self) -> tuple[RoundOpen | None, str]:
        """Return the order and digest of the newest update that was not acknowledged.

        Older ones, and any whose note or file is damaged, are dropped: their rounds are over
        or will be asked for again.
        """
        found: tuple[RoundOpen | None, str] = (None, "")
        for digest in self._home.unsent_notes():
            self._drop(digest)
        by_age = sorted(
            self._home.outbox(), key=lambda d: self._home.outbox_path(d).stat().st_mtime
        )
        for digest in by_age:
            try:
                read_envelope(self._home.outbox_path(digest))
                fields = json.loads(self._home.note_path(digest).read_bytes())
                order = RoundOpen.model_validate(fields, strict=False)
            except (FcilError, OSError, ValueError, RecursionError):
                self._drop(digest)
                continue
            if found[1]:
                self._drop(found[1])
            found = (order, digest)
        return found

    def _drop(self, digest: str) -> None:
        self._home.drop_outgoing(digest)
        self._home.settle(digest, counted=False)

    def put(self, digest: str, envelope: StoredEnvelope, order: RoundOpen) -> None:
        """Keep a sealed update; it is on disk when this returns.

        Raises:
            DiskFull, StorageError: nothing of it was kept.
        """
        note = order.model_dump_json(exclude={"parts", "verdict", "nonce"}).encode()
        try:
            write_atomic(self._home.note_path(digest), _with_parts(note))
            write_envelope(self._home.outbox_path(digest), envelope)
        except StorageError:
            self._home.drop_outgoing(digest)
            raise

    def hold(self, digest: str, envelope: StoredEnvelope) -> None:
        """Keep an envelope for this session only (an inventory is made anew each time)."""
        self._held = {digest: envelope}

    def load(self, digest: str) -> None:
        """Open an envelope; `offer` does not touch the disk any more then.

        Raises:
            CorruptFile, StorageError: the file in the outbox is damaged, or gone.
        """
        self._envelope(digest)

    def offer(self, digest: str, send: Send, credit: int) -> None:
        """Send an envelope's header and its first chunks.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope, header = self._envelope(digest)
        send(Update(digest=digest), envelope.header, envelope.signature, envelope.wrap)
        self.send_chunks(digest, range(min(credit, len(header.hashes))), send)

    def send_chunks(self, digest: str, indices: Sequence[int], send: Send) -> None:
        """Send the chunks that the server asks for.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope, header = self._envelope(digest)
        for index in indices:
            if 0 <= index < len(header.hashes):
                start = index * header.chunk_bytes
                data = envelope.body[start : start + header.chunk_bytes]
                send(Chunk(digest=digest, index=index), data)

    def _envelope(self, digest: str) -> tuple[StoredEnvelope, Header]:
        if self._open is None or self._open[0] != digest:
            envelope = self._held.get(digest) or read_envelope(self._home.outbox_path(digest))
            header = parse_header(envelope.header, max_plain_bytes=MAX_PLAIN_BYTES)
            self._open = (digest, envelope, header)
        return self._open[1], self._open[2]


def _with_parts(note: bytes) -> bytes:
    fields = json.loads(note)
    fields["parts"] = []  # not needed to send, and required by the message
    return json.dumps(fields).encode()
