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
from fcil_protocol.transfer import UNASKED_SPAN_BYTES, runs, unasked

Send = Callable[..., None]
MAX_PLAIN_BYTES = 1 << 40  # our own files: the server's limit was checked when they were made


class Outbox:
    """Access to a client's outgoing envelopes; small ones of the session stay in memory."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._held: dict[str, StoredEnvelope] = {}
        self._open: tuple[str, StoredEnvelope, Header] | None = None
        self._span_bytes = UNASKED_SPAN_BYTES  # of a message, as the server last wanted them

    def waiting(self) -> tuple[RoundOpen | None, str]:
        """Return the order and digest of the newest update that was not acknowledged.

        Older ones, and any whose note or file is damaged, are dropped: their rounds are over
        or will be asked for again. The states that came with them stay until the next round:
        an update that is half removed may be one that the server has, and its verdict comes.
        """
        found: tuple[RoundOpen | None, str] = (None, "")
        for digest in self._home.unsent_notes():
            self._home.drop_outgoing(digest)
        by_age = sorted(
            self._home.outbox(), key=lambda d: self._home.outbox_path(d).stat().st_mtime
        )
        for digest in by_age:
            try:
                read_envelope(self._home.outbox_path(digest))
                fields = json.loads(self._home.note_path(digest).read_bytes())
                order = RoundOpen.model_validate(fields, strict=False)
            except (FcilError, OSError, ValueError, RecursionError):
                self._home.drop_outgoing(digest)
                continue
            older = digest
            # By the state it starts from: a file's time says little after a jump of the clock.
            if found[0] is None or order.base >= found[0].base:
                found, older = (order, digest), found[1]
            if older:
                self._home.drop_outgoing(older)
        return found

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

    def offer(self, digest: str, send: Send, *, again: bool) -> None:
        """Send an envelope's header, and its first chunks if the server has none of it.

        With ``again`` it may have some of it and asks for the rest, unless one chunk is all.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope, header = self._envelope(digest)
        count = 0 if again and len(header.hashes) > 1 else unasked(header)
        message = Update(digest=digest, unasked=count)
        send(message, envelope.header, envelope.signature, envelope.wrap)
        span = max(1, self._span_bytes // header.chunk_bytes)
        self.send_chunks(digest, range(count), send, span=span)

    def send_chunks(self, digest: str, indices: Sequence[int], send: Send, *, span: int) -> None:
        """Send the chunks that the server asks for, at most ``span`` in a message.

        Raises:
            CorruptFile: the file in the outbox is damaged.
        """
        envelope, header = self._envelope(digest)
        self._span_bytes = span * header.chunk_bytes
        there = (i for i in indices if 0 <= i < len(header.hashes))
        for run in runs(header, there, span):
            send(Chunk(digest=digest, index=run.start), envelope.body[header.extent(run)])

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
