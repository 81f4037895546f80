"""A relay's sum on its way to the server: sealed, offered, and sent chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import fcil_protocol
from fcil_adapters.numerics.relay_sums import RunningSum
from fcil_protocol.envelopes.envelope import Core, Sealed, seal, wrap_key
from fcil_protocol.envelopes.transfer import UNASKED_SPAN_BYTES, Sender, unrequested_chunks
from fcil_protocol.envelopes.window import LOSS_TIMEOUT_S
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import Ack, Nack, Update, Want
from fcil_protocol.payloads.payload import pieces
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_server.sessions.relay.sum_terms import RoundTerms


@dataclass(frozen=True)
class SealedSum:
    """A sum for the server; ``digests`` are those of the updates in it."""

    sealed: Sealed
    wrap: bytes
    digests: tuple[str, ...]


class SumSender:
    """Seals sums and sends them, one at a time.

    Args:
        keys, client_id: the relay's. server: the keys for which sums are sealed.
        push: sends the server a message of the relay's own.
    """

    def __init__(
        self,
        keys: PrivateKeys,
        client_id: ClientId,
        server: PublicKeys,
        push: Callable[..., None],
    ) -> None:
        self._keys = keys
        self._client_id = client_id
        self._server = server
        self._push = push
        self._heard = 0.0  # when the server last asked for the sum
        self._out: SealedSum | None = None

    @property
    def waits(self) -> bool:
        """True while a sum has no answer."""
        return self._out is not None

    def seal(self, order: RoundTerms, total: RunningSum) -> SealedSum:
        """Seal a sum of a round; may run in a thread."""
        terms, key = order.terms, order.key
        core = Core(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            federation=terms.federation,
            run=terms.run,
            direction="update",
            sender=self._client_id,
            sender_key=self._keys.public.fingerprint,
            recipient="server",
            method=terms.method.name,
            schema=terms.schema_digest,
            task=key.task,
            round=key.round,
            kind=key.kind,
            base=order.base,
        )
        plain = pieces(total.payload(), compact=terms.compact)
        sealed, content_key = seal(plain, core, self._keys)
        wrap = wrap_key(content_key, sealed.header, self._server)
        return SealedSum(sealed, wrap, tuple(update.digest for update in total.updates))

    def send(self, made: SealedSum, now: float) -> None:
        """Offer a sum, with its first chunks."""
        self._out = made
        self._offer(now, unrequested_chunks(made.sealed.parsed))

    def _offer(self, now: float, unasked: int) -> None:
        assert self._out is not None, "a sum is under way"
        self._heard, sealed = now, self._out.sealed
        message = Update(digest=sealed.parsed.update_id, unasked=unasked)
        self._push(message, sealed.header, sealed.signature, self._out.wrap)
        self._send_chunks(range(unasked), max(1, UNASKED_SPAN_BYTES // sealed.parsed.chunk_bytes))

    def _send_chunks(self, indices: Iterable[int], span: int) -> None:
        assert self._out is not None, "a sum is under way"
        sealed = self._out.sealed
        there = (i for i in indices if 0 <= i < len(sealed.parsed.hashes))

        def read(run: range) -> bytes:
            return b"".join(sealed.chunk(index) for index in run)

        for message, data in Sender(sealed.parsed, read).messages(there, span):
            self._push(message, data)

    def on_want(self, message: Want, now: float) -> None:
        """Send the chunks that the server requests."""
        if self._is_about(message.digest):
            self._heard = now
            self._send_chunks(message.chunks, message.span)

    def _is_about(self, digest: str) -> bool:
        return self._out is not None and self._out.sealed.parsed.update_id == digest

    def on_answer(self, message: Ack | Nack) -> SealedSum | None:
        """Return the sum that the server has answered; None: this is about something else."""
        if not self._is_about(message.digest):
            return None
        answered, self._out = self._out, None
        return answered

    def revive(self, now: float) -> None:
        """Offer a sum again that has no answer for long, on a live connection."""
        if self._out is not None and now - self._heard >= LOSS_TIMEOUT_S:
            self._offer(now, 0)

    def drop(self) -> None:
        """Forget the sum: its round is over."""
        self._out = None
