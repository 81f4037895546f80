"""From frames to the spool: header, chunks, open, schema, fsync, Ack.

The order of trust (PROTOCOL.md 10): the signed header is checked before the first chunk is stored,
every chunk against its hash, the opened payload against the schema of its round, and the Ack leaves
after the fsync. A failure is answered with a Nack that carries a stable code, and nothing is kept.

The three stages overlap: while chunks of some clients come in, others' updates are opened and
spooled in a thread, one after the other, and earlier ones are synced to disk and committed to the
ledger together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    WRAP_BYTES,
    Core,
    Header,
    open_body,
    parse_header,
    unwrap_key,
    verify_header,
)
from fcil_protocol.envelopes.partial_envelopes import Arriving
from fcil_protocol.envelopes.stored_envelope import head_of
from fcil_protocol.envelopes.transfer import IncomingEnvelope, Receiver, unrequested_chunks
from fcil_protocol.envelopes.window import ASKED_BYTES, share
from fcil_protocol.errors import (
    AlreadyHave,
    CommitUnknown,
    CorruptFile,
    FcilError,
    SchemaMismatch,
    StorageError,
    TooLarge,
    WireError,
    WrongFederation,
    as_fcil_error,
)
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import Ack, Chunk, Update, nack_of
from fcil_protocol.payloads.builtin import INVENTORY, inventory_faults, training_metrics
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.event_loop import Yielder
from fcil_server.sessions.held_offers import HeldOffers, summed
from fcil_server.sessions.offers import OfferLine, UploadOffer
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Accepted, Expectation, IntakePorts, ReceivedUpdate

SLACK_BYTES = 1 << 20  # safetensors header and metadata
MAX_INVENTORY_BYTES = 4 << 20  # 10,000 names of 128 bytes and their counts
MAX_UPLOADS = 4  # envelopes of one client under way
MAX_OPENING = 2  # complete envelopes of one client that wait to be opened; then its next ones wait
OPENED_BYTES = 4 << 20  # envelopes that are opened in one visit to the thread, all together
MAX_OPENED = 16  # of them, however small: the first one waits for the last
WHOLE_BYTES = 32 << 20  # of updates that arrived whole and wait; then no message is read
MAX_BATCH = 64  # updates that are acknowledged together: none waits for more than that
MAX_COMMIT = 8  # of them in one transaction: the loop does nothing else meanwhile


@dataclass(frozen=True)
class _Complete:
    """An envelope with all its chunks."""

    peer: Peer
    envelope: IncomingEnvelope
    over: asyncio.Event  # set once it is in the spool, or refused
    whole: bool  # it arrived so, and not chunk by chunk


class Intake:
    """Takes uploads of all clients.

    Args:
        incoming: the folder for partially received envelopes.
        credit: bytes of one client that may be requested and not yet received.
        ports: the run that the uploads are for.

    Attributes:
        room: called with a client when intake has room for it again after it was busy.
    """

    def __init__(
        self,
        *,
        federation: str,
        keys: PrivateKeys,
        incoming: Path,
        spool: Spool,
        credit: int,
        max_payload_bytes: int,
        max_classes: int,
        ports: IntakePorts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._federation = federation
        self._keys = keys
        self.arriving = Arriving(incoming, MAX_UPLOADS)
        self._spool = spool
        self._credit = credit
        self._max_payload_bytes = max_payload_bytes
        self._max_classes = max_classes
        self._ports = ports
        self._clock = clock
        # Of live connections, those with envelopes under way: counted at every chunk.
        self._receiving: weakref.WeakSet[Receiver] = weakref.WeakSet()
        self._line = OfferLine()
        self._held = HeldOffers()
        self._waiting: deque[_Complete] = deque()  # the first one is being opened
        self._opener: asyncio.Task[None] | None = None
        self._opening: Counter[ClientId] = Counter()  # of `_waiting`
        self._whole_bytes = 0  # of `_waiting`, those that arrived whole
        self._opened = asyncio.Event()
        self.room: Callable[[ClientId], None] = lambda _: None
        self._batch: list[tuple[Peer, Accepted]] = []
        self._pending: set[str] = set()  # in the spool, not yet acknowledged
        self._complete: set[str] = set()  # all chunks received; being opened or waiting for it
        self._newest: dict[str, Peer] = {}  # for those two, the peer that offered them again
        self._flush: asyncio.Task[None] | None = None

    # --- header -----------------------------------------------------------------------------

    def is_busy(self, client: ClientId) -> bool:
        """Return True if a client should send nothing more until `room` is called."""
        return self._opening[client] >= MAX_OPENING

    def offer(self, peer: Peer, received: Received, message: Update) -> None:
        """Check the header of an update and ask for its chunks, or Ack a stored one."""
        data, signature, wrap, *_ = received.blobs
        if len(wrap) != WRAP_BYTES:
            raise WireError(
                f"an update has a wrapped key of {len(wrap)} bytes, expected {WRAP_BYTES}."
            )
        verify_header(data, signature, peer.keys)
        header = parse_header(data, max_plain_bytes=self._max_payload_bytes)
        if header.update_id != message.digest:
            raise WireError("an update's digest is not that of its header.")
        if self._is_known(peer, message.digest):
            return
        if message.digest in peer.receiver.under_way:
            self._ask(peer)  # offered twice: its chunks are on their way, or had to wait
            return
        self._check_core(peer, header.core)
        self._check_size(peer, header)
        offer = UploadOffer(peer, header, received.blobs[:3], message.unasked)
        taken = len(received.blobs) > 3 and not received.blobs[3]
        relay = self._ports.summing_relay(peer, header.core) if taken else None
        if relay is not None and self._held.hold(replace(offer, relay=relay)):
            self._line.leave(peer.client)
            self._forget_abandoned(peer)
            return
        if header.core.kind != INVENTORY:
            self._held.forget(peer.client)
        self._receive(replace(offer, unasked=0) if taken else offer)

    async def has_room(self) -> None:
        """Wait while updates that arrived whole fill the memory until they are opened."""
        while self._whole_bytes > WHOLE_BYTES:
            self._opened.clear()
            await self._opened.wait()

    def take_whole(self, peer: Peer, update: ReceivedUpdate) -> None:
        """Take an update that an intake process has received, or Ack a stored one."""
        header = parse_header(update.blobs[0], max_plain_bytes=self._max_payload_bytes)
        if self._is_known(peer, update.digest):
            return
        self._check_core(peer, header.core)
        self._line.leave(peer.client)
        self._held.forget(peer.client)
        self._forget_abandoned(peer)
        assembly = Assembly.of_verified(header, update.blobs[3:])
        self._whole_bytes += header.sealed_bytes
        self._await_opening(peer, IncomingEnvelope(update.blobs[:3], assembly), whole=True)

    def keep_partial(self, peer: Peer, update: ReceivedUpdate, indices: Sequence[int]) -> None:
        """Keep chunks of an update that an intake process gave up; its client has the others."""
        header = parse_header(update.blobs[0], max_plain_bytes=self._max_payload_bytes)
        digest = update.digest
        if digest in self._pending or digest in self._complete or self._ports.recorded(digest):
            return
        self._check_core(peer, header.core)
        assembly = self.arriving.take(peer.client, header)
        for index, chunk in zip(indices, update.blobs[3:], strict=True):
            assembly.put(index, chunk)

    def _is_known(self, peer: Peer, digest: str) -> bool:
        """Return True if an update is here already; its answer is sent, or on its way."""
        if digest in self._pending or digest in self._complete:
            self._newest[digest] = peer  # the answer is on its way, to the newest peer
            return True
        if self._ports.recorded(digest):
            # The Ack was lost. Its round may be over, and the spool without it: it was in time.
            self._ports.send(peer, Ack(digest=digest))
            return True
        return False

    def release(self, digests: Iterable[str]) -> None:
        """Ask for updates that their relay does not add up."""
        for offer in self._held.release(digests):
            try:
                self._receive(offer)
            except Exception as error:
                self._turn_down(offer.peer, offer.header.update_id, as_fcil_error(error))

    def _receive(self, offer: UploadOffer) -> None:
        """Ask for an envelope's chunks, now or when it is its turn."""
        peer = offer.peer
        counts = peer.receiver in self._receiving  # with an update that it has given up
        if offer.may_wait and not counts and self._line.is_full(self._arriving_now):
            self._line.put(offer)
            self._call_next()
        else:
            self._begin(offer)

    @property
    def _arriving_now(self) -> int:
        return len(self._receiving) + len(self._waiting)

    def _begin(self, offer: UploadOffer) -> None:
        """Set room aside for an envelope, and ask for its chunks."""
        peer, header = offer.peer, offer.header
        if len(peer.receiver.under_way) >= MAX_UPLOADS:
            self.forget(peer, next(iter(peer.receiver.under_way)))
        if header.core.kind != INVENTORY:
            self._line.leave(peer.client)
            self._forget_abandoned(peer)
        assembly = self.arriving.take(peer.client, header)
        self._receiving.add(peer.receiver)
        coming = min(offer.unasked, unrequested_chunks(header))
        now = self._clock()
        self._continue(peer, peer.receiver.begin(offer.blobs, assembly, now, unasked=coming))

    def _call_next(self) -> None:
        """Begin the first updates in line, as many as there is room for."""
        while (offer := self._line.next(self._arriving_now)) is not None:
            if not self._ports.is_here(offer.peer):
                continue  # it offers its update again when it is back
            try:
                self._begin(offer)  # once it has arrived, its round decides if it takes it
            except Exception as error:
                self._turn_down(offer.peer, offer.header.update_id, as_fcil_error(error))

    def _forget_abandoned(self, peer: Peer) -> None:
        """Forget a client's unfinished update as it offers another: it sends one at a time."""
        for digest, envelope in list(peer.receiver.under_way.items()):
            if envelope.header.core.kind != INVENTORY:
                self.forget(peer, digest)

    def _check_size(self, peer: Peer, header: Header) -> None:
        """Refuse payloads larger than the schema allows before space is set aside for them."""
        limit = MAX_INVENTORY_BYTES
        if header.core.kind != INVENTORY or peer.sums:
            limit = self._expectation(peer, header.core).max_bytes + SLACK_BYTES
        if header.plain_bytes > limit:
            raise TooLarge(
                f"a payload of {header.plain_bytes} bytes exceeds the {limit} bytes that "
                f"{header.core.kind} can need."
            )

    def _expectation(self, peer: Peer, core: Core) -> Expectation:
        if peer.sums:
            return self._ports.expect_sum(core)
        return self._ports.expect(peer.client, core)

    def _check_core(self, peer: Peer, core: Core) -> None:
        expected = (self._federation, "update", peer.client, "server")
        got = (core.federation, core.direction, core.sender, core.recipient)
        if got != expected:
            named, right = (", ".join(names) for names in (got, expected))
            raise WrongFederation(
                f"an update names federation, direction, sender and recipient {named}; expected "
                f"{right}."
            )

    # --- chunks -----------------------------------------------------------------------------

    def chunk(self, peer: Peer, received: Received, message: Chunk) -> None:
        """Store the chunks of a message if their hashes fit, and continue."""
        envelope = peer.receiver.under_way.get(message.digest)
        if envelope is None:
            return  # late, of an update that was refused or is stored: not worth an answer
        try:
            peer.receiver.put(message.digest, message.index, received.blobs[0], self._clock())
        except WireError as error:
            if not envelope.retries:
                raise
            self._ports.refused(peer, error)
        self._continue(peer, envelope)

    def _ask(self, peer: Peer) -> None:
        """Ask for as many bytes as the client's link and the server's memory have room for."""
        peer.receiver.pace.most_bytes = share(self._credit, len(self._receiving), ASKED_BYTES)
        for want in peer.receiver.wants(self._clock()):
            self._ports.send(peer, want)

    def revive(self, peers: Iterable[Peer]) -> None:
        """Ask again for requested chunks that never came over a live connection.

        Connections that ended, or send nothing, make room for the next in line.
        """
        now = self._clock()
        for peer in peers:
            if peer.receiver.revive(now):
                self._ask(peer)
        self._line.look(self._receiving, now)
        self._call_next()

    def _continue(self, peer: Peer, envelope: IncomingEnvelope) -> None:
        if not envelope.complete:
            self._ask(peer)
            return
        self._end(peer, envelope.digest)
        self._ask(peer)
        self._await_opening(peer, envelope)

    def _await_opening(
        self, peer: Peer, envelope: IncomingEnvelope, *, whole: bool = False
    ) -> None:
        self._complete.add(envelope.digest)
        self._waiting.append(_Complete(peer, envelope, asyncio.Event(), whole))
        self._opening[peer.client] += 1
        if self._opener is None or self._opener.done():
            self._opener = asyncio.get_running_loop().create_task(self._open_all())

    # --- complete ---------------------------------------------------------------------------

    async def _open_all(self) -> None:
        """Open waiting envelopes one after the other: one opened update in memory at a time.

        Small ones share a visit to the thread, which costs as much as opening one.
        """
        while self._waiting:
            await self._open_few(self._next_few())

    async def _open_few(self, few: Sequence[_Complete]) -> None:
        turns, ready = Yielder(), []
        for one in few:
            ready.append(self._expect(one))
            await turns.yield_if_long()
        try:
            opened = await asyncio.to_thread(_attempt_all, ready)
        except Exception as error:  # no thread, for instance
            opened = [error] * len(few)
        for one, result in zip(few, opened, strict=True):
            digest = one.envelope.digest
            try:
                if isinstance(result, Exception):
                    self._turn_down(one.peer, digest, as_fcil_error(result))
                else:
                    self._take(one.peer, digest, result)
            except Exception as error:
                self._turn_down(one.peer, digest, as_fcil_error(error))
            finally:
                self._waiting.popleft()
                if one.whole:
                    self._whole_bytes -= one.envelope.header.sealed_bytes
                    self._opened.set()
                self._complete.discard(digest)
                with contextlib.suppress(FcilError):  # a bad disk: `sweep` tries again
                    self.arriving.drop(one.peer.client, digest)
                one.over.set()
                self._opening[one.peer.client] -= 1
                self.room(one.peer.client)
                self._call_next()
            await turns.yield_if_long()

    def _next_few(self) -> list[_Complete]:
        """Return the first waiting envelopes, as many as are opened together."""
        few: list[_Complete] = []
        size = 0
        for one in self._waiting:
            size += one.envelope.header.sealed_bytes
            if len(few) == MAX_OPENED or (few and size > OPENED_BYTES):
                break
            few.append(one)
        return few

    def _expect(self, one: _Complete) -> Callable[[], Accepted | Payload]:
        """Return the work in the thread for an envelope; if it is not taken, that raises why."""
        peer, envelope = one.peer, one.envelope
        if envelope.header.core.kind == INVENTORY:
            return partial(self._open_inventory, envelope)
        try:
            expectation = self._expectation(peer, envelope.header.core)
        except Exception as error:
            return partial(_raise, error)
        offers = self._held.of_relay(peer.client) if peer.sums else {}
        return partial(self._keep, peer, envelope, expectation, offers)

    def _turn_down(self, peer: Peer, digest: str, error: FcilError) -> None:
        if isinstance(error, CorruptFile):  # one of this server's: the peer sends its own again
            error = StorageError(error.message, action=error.action)
        peer = self._newest.pop(digest, peer)
        self._ports.refused(peer, error)
        self._ports.send(peer, nack_of(error, digest))

    def _take(self, peer: Peer, digest: str, result: Accepted | Payload) -> None:
        """Announce an inventory, or let an update in the spool be committed."""
        if isinstance(result, Payload):
            peer = self._newest.pop(digest, peer)
            self._ports.announced(peer, result)
            self._ports.send(peer, Ack(digest=digest))
            return
        self._ports.opened(result)
        self._batch.append((peer, result))
        self._pending.add(digest)
        self._pending.update(update.digest for update in result.summed)
        if self._flush is None or self._flush.done():
            self._flush = asyncio.get_running_loop().create_task(self._commit())

    def _keep(
        self,
        peer: Peer,
        envelope: IncomingEnvelope,
        expected: Expectation,
        offers: Mapping[str, UploadOffer],
    ) -> Accepted:
        """Open, check and spool an update, or a sum of offered ones; runs in a thread."""
        header = envelope.header
        payload = self._open(envelope)
        faults = expected.schema.check_upload(payload, expected.dims)
        faults = faults or expected.check(payload, expected.task)
        if faults:
            raise SchemaMismatch("; ".join(faults[:10]) + ".")
        accepted = Accepted(
            client=peer.client,
            digest=envelope.digest,
            core=header.core,
            tensor_bytes=payload.tensor_bytes,
            sealed_bytes=header.sealed_bytes,
            samples=int(payload.i64("n").sum()),
            metrics=training_metrics(payload),
            summed=summed(header.core, payload, offers) if peer.sums else (),
        )
        del payload  # before the sealed body is copied
        head = head_of(
            envelope.header_bytes, envelope.signature, envelope.wrap, header.sealed_bytes
        )
        body = (head, *envelope.assembly.body())
        try:
            self._spool.append(envelope.digest, *body)
        except AlreadyHave:
            # The server was killed, or failed, between the spool and the ledger: the record was
            # never acknowledged.
            self._spool.remove([envelope.digest])
            self._spool.append(envelope.digest, *body)
        return accepted

    def _open(self, envelope: IncomingEnvelope) -> Payload:
        key = unwrap_key(envelope.wrap, envelope.header_bytes, self._keys)
        return unpack(open_body(envelope.header, key, envelope.assembly.steps()))

    def _open_inventory(self, envelope: IncomingEnvelope) -> Payload:
        payload = self._open(envelope)
        faults = inventory_faults(payload, self._max_classes)
        if faults:
            raise SchemaMismatch("; ".join(faults[:10]) + ".")
        return payload

    async def _commit(self) -> None:
        """Sync the spool and the ledger to disk once for each batch of updates, then Ack it."""
        try:
            while self._batch:
                batch, self._batch = self._batch[:MAX_BATCH], self._batch[MAX_BATCH:]
                await self._commit_batch(batch)
        except Exception as error:
            # The ledger's own disk, or no thread, no memory: the server can promise nothing any
            # more, and the clients of the batch wait for an answer.
            self._ports.failed(as_fcil_error(error))

    async def _commit_batch(self, batch: Sequence[tuple[Peer, Accepted]]) -> None:
        turns = Yielder()
        try:
            await asyncio.to_thread(self._spool.sync)
        except FcilError as error:
            for peer, accepted in batch:
                await self._refuse(peer, accepted, error)
            return
        kept: list[tuple[Peer, Accepted]] = []
        for start in range(0, len(batch), MAX_COMMIT):
            few = batch[start : start + MAX_COMMIT]
            faults = self._commit_few([accepted for _, accepted in few])
            # At once: nothing may happen to a client between its update's commit and this.
            for (peer, accepted), fault in zip(few, faults, strict=True):
                if fault is None:
                    self._ports.committed(accepted)
                    kept.append((peer, accepted))
            for (peer, accepted), fault in zip(few, faults, strict=True):
                if fault is not None:
                    await self._refuse(peer, accepted, fault)
            await turns.yield_if_long()
        await asyncio.to_thread(self._ports.wait_until_durable)
        for peer, accepted in kept:
            self._pending.discard(accepted.digest)
            answer = Ack(digest=accepted.digest)
            self._ports.send(self._newest.pop(accepted.digest, peer), answer)
            for update in accepted.summed:
                self._pending.discard(update.digest)
                offered = self._held.counted(update)
                newest = self._newest.pop(update.digest, offered)
                if newest is not None:
                    self._ports.send(newest, Ack(digest=update.digest))
            await turns.yield_if_long()

    def _commit_few(self, few: Sequence[Accepted]) -> list[FcilError | None]:
        """Commit updates to the ledger in one transaction; return for each why it is refused.

        Raises:
            CommitUnknown: it may have them or not; no update may be refused, or leave the spool.
        """
        faults: list[FcilError | None] = []
        try:
            with self._ports.together():
                for accepted in few:
                    try:
                        self._check_durable(accepted)
                        self._ports.stored(accepted)
                    except Exception as error:  # our defect must not stop the other Acks
                        faults.append(as_fcil_error(error))
                    else:
                        faults.append(None)
        except CommitUnknown:
            raise  # the ledger may have them: their records stay, and the next start decides
        except FcilError as error:  # nothing of it is in the ledger
            return [*(fault or error for fault in faults), *[error] * (len(few) - len(faults))]
        return faults

    def _check_durable(self, accepted: Accepted) -> None:
        # A sync that failed for an earlier batch has dropped this record too if it was appended
        # before that; the sync of its own batch had nothing left to do.
        if accepted.digest not in self._spool:
            raise StorageError(
                "the update was lost with a failed write to the disk.",
                action="Nothing: the client sends it again.",
            )

    async def _refuse(self, peer: Peer, accepted: Accepted, error: FcilError) -> None:
        """Withdraw an update that could not be synced or was not the first."""
        with contextlib.suppress(FcilError):  # a full disk: it is removed at the next start
            await asyncio.to_thread(self._spool.remove, [accepted.digest])
        self._pending.discard(accepted.digest)
        for update in accepted.summed:  # the relay releases them, and they are requested
            self._pending.discard(update.digest)
            newest = self._newest.pop(update.digest, None)
            if newest is not None:
                self._held.offered_by(update, newest)
        peer = self._newest.pop(accepted.digest, peer)
        self._ports.refused(peer, error)
        self._ports.send(peer, nack_of(error, accepted.digest))

    def forget(self, peer: Peer, digest: str) -> None:
        """Drop a partially received update that was refused; another may have its room."""
        self._line.leave(peer.client, digest)
        if digest:  # else the message was about no update
            self._held.forget(peer.client, digest)
        if self._end(peer, digest) is not None:
            self.arriving.drop(peer.client, digest)
            self._ask(peer)

    def _end(self, peer: Peer, digest: str) -> IncomingEnvelope | None:
        ended = peer.receiver.end(digest)
        if not peer.receiver.under_way:
            self._receiving.discard(peer.receiver)
        return ended

    def sweep(self, peers: Iterable[Peer], continues: RoundKey | None = None) -> None:
        """Remove unfinished updates that no peer continues after a round: they could not count.

        Every session seals inventories afresh, so theirs are never resumed.

        Args:
            peers: the connected ones.
            continues: the round, if unfinished updates of its task and kind can count later.
        """
        live = {digest for peer in peers for digest in peer.receiver.under_way}
        later = set[str]() if continues is None else self.arriving.of_kind(continues)
        self._line.sweep(continues)
        self._held.clear()
        with contextlib.suppress(FcilError):  # leftovers go after the next round
            self.arriving.sweep(live | self._complete | later, files=continues is None)

    async def drain(self) -> None:
        """Wait until every update that is complete now is on disk and acknowledged, or refused."""
        for one in list(self._waiting):
            await one.over.wait()
        if self._flush is not None:
            await asyncio.shield(self._flush)  # a cancelled round must not cancel an Ack


def _attempt_all(
    works: Iterable[Callable[[], Accepted | Payload]],
) -> list[Accepted | Payload | Exception]:
    """Return the result of each work, or its error, which does not stop the others."""
    results: list[Accepted | Payload | Exception] = []
    for work in works:
        try:
            results.append(work())
        except Exception as error:
            _clear_frames(error)
            results.append(error)
    return results


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's frames: among them is the opened payload.

    The lines stay, for the log.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _raise(error: Exception) -> NoReturn:
    raise error
