"""From frames to the spool: header, chunks, open, schema, fsync, Ack.

The order of trust (DESIGN.md 3): the signed header is judged before the first chunk is
stored, every chunk against its hash, the opened payload against the schema of its round,
and the Ack leaves after the fsync. What fails is answered with a Nack that carries a stable
code, and nothing of it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fcil_adapters.contract import TaskInfo
from fcil_protocol.envelope import (
    Core,
    Header,
    StoredEnvelope,
    open_body,
    parse_header,
    unwrap_key,
    verify_header,
)
from fcil_protocol.errors import (
    FcilError,
    InternalError,
    SchemaMismatch,
    TooLarge,
    WireError,
    WrongFederation,
)
from fcil_protocol.ids import ClientId
from fcil_protocol.keys import PrivateKeys
from fcil_protocol.messages import Ack, Chunk, Message, Nack, Received, Update
from fcil_protocol.pace import share
from fcil_protocol.payload import Payload, unpack
from fcil_protocol.schema import PayloadSchema
from fcil_protocol.spool import Spool
from fcil_protocol.transfer import Inflow, Receiving, unasked
from fcil_protocol.wellknown import INVENTORY, inventory_faults
from fcil_server.incoming import Arriving
from fcil_server.peers import Peer

SLACK_BYTES = 1 << 20  # safetensors header and metadata
MAX_INVENTORY_BYTES = 4 << 20  # 10,000 names of 128 bytes and their counts
MAX_UPLOADS = 4  # envelopes that one client may have under way


@dataclass(frozen=True)
class Expectation:
    """What a payload of the open round must be."""

    task: TaskInfo
    schema: PayloadSchema
    dims: dict[str, int]
    check: Callable[[Payload, TaskInfo], list[str]]


@dataclass(frozen=True)
class Accepted:
    """A validated upload: an update to be made durable, or an inventory."""

    client: ClientId
    digest: str
    core: Core
    tensor_bytes: int
    sealed_bytes: int
    samples: int


class Intake:
    """Takes uploads of all clients.

    Args:
        credit: bytes of one client that may be asked for and not yet received.
        expect: returns what is expected of an update with this core, or raises why not
            (`RoundClosed`, `AlreadyHave`, `StaleUpdate`).
        recorded: says whether the ledger has this update.
        stored: called after the fsync, before the Ack.
        announced: called with a client's inventory.
        refused: told of what is refused here, other than by an error of `offer` or `chunk`.
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
        expect: Callable[[ClientId, Core], Expectation],
        recorded: Callable[[ClientId, Core, str], bool],
        stored: Callable[[Accepted], None],
        announced: Callable[[Peer, Payload], Awaitable[None]],
        send: Callable[[Peer, Message], bool],
        refused: Callable[[Peer, FcilError], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._federation = federation
        self._keys = keys
        self._arriving = Arriving(incoming, MAX_UPLOADS)
        self._spool = spool
        self._credit = credit
        self._max_payload_bytes = max_payload_bytes
        self._max_classes = max_classes
        self._expect = expect
        self._recorded = recorded
        self._stored = stored
        self._announced = announced
        self._send = send
        self._refused = refused
        self._clock = clock
        self._inflows: weakref.WeakSet[Inflow] = weakref.WeakSet()  # of connections that live
        self._batch: list[tuple[Peer, Accepted]] = []
        self._pending: set[str] = set()  # appended, not yet in the ledger
        self._complete: set[str] = set()  # all chunks there, being opened or about to be
        self._newest: dict[str, Peer] = {}  # of those two, who offered them again meanwhile
        self._flush: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()  # one opened payload in memory at a time

    # --- header -----------------------------------------------------------------------------

    async def offer(self, peer: Peer, received: Received, message: Update) -> None:
        """Judge the header of an update and ask for its chunks, or Ack what is stored."""
        data, signature, wrap = received.blobs
        verify_header(data, signature, peer.keys)
        header = parse_header(data, max_plain_bytes=self._max_payload_bytes)
        if header.update_id != message.digest:
            raise WireError("an update's digest is not that of its header.")
        if message.digest in self._pending or message.digest in self._complete:
            self._newest[message.digest] = peer  # the answer is on its way, to whoever asks
            return
        if message.digest in self._spool:
            if self._recorded(peer.client, header.core, message.digest):
                self._send(peer, Ack(digest=message.digest))
                return
            # A kill came between the spool and the ledger: it was never acknowledged.
            self._spool.remove([message.digest])
        if message.digest in peer.inflow.under_way:
            return  # said twice; its chunks are on their way
        self._check_core(peer, header.core)
        self._check_size(peer, header)
        if len(peer.inflow.under_way) >= MAX_UPLOADS:
            self.forget(peer, next(iter(peer.inflow.under_way)))
        assembly = self._arriving.take(peer.client, header)
        receiving = Receiving(header, data, signature, wrap, assembly)
        self._inflows.add(peer.inflow)
        coming = min(message.unasked, unasked(header))
        peer.inflow.begin(receiving, self._clock(), unasked=coming)
        await self._continue(peer, message.digest, receiving)

    def _check_size(self, peer: Peer, header: Header) -> None:
        """Refuse what its schema cannot need before anything is set aside for it."""
        limit = MAX_INVENTORY_BYTES
        if header.core.kind != INVENTORY:
            expectation = self._expect(peer.client, header.core)
            limit = expectation.schema.max_bytes(expectation.dims) + SLACK_BYTES
        if header.plain_bytes > limit:
            raise TooLarge(
                f"a payload of {header.plain_bytes} bytes exceeds the {limit} bytes that "
                f"{header.core.kind} can need."
            )

    def _check_core(self, peer: Peer, core: Core) -> None:
        expected = (self._federation, "update", peer.client, "server")
        got = (core.federation, core.direction, core.sender, core.recipient)
        if got != expected:
            raise WrongFederation(f"an update names {got}, expected {expected}.")

    # --- chunks -----------------------------------------------------------------------------

    async def chunk(self, peer: Peer, received: Received, message: Chunk) -> None:
        """Store the chunks of a message if their hashes fit, and go on."""
        receiving = peer.inflow.under_way.get(message.digest)
        if receiving is None:
            return  # late, of an update that was refused or is stored: not worth a word
        try:
            peer.inflow.put(message.digest, message.index, received.blobs[0], self._clock())
        except WireError as error:
            if not receiving.retries:
                raise
            self._refused(peer, error)
        await self._continue(peer, message.digest, receiving)

    def _ask(self, peer: Peer) -> None:
        """Ask for what the client's link and the server's memory have room for."""
        busy = sum(bool(inflow.under_way) for inflow in self._inflows)
        peer.inflow.pace.most_bytes = share(self._credit, busy)
        for want in peer.inflow.wants(self._clock()):
            self._send(peer, want)

    def revive(self, peers: Iterable[Peer]) -> None:
        """Ask again for what was asked for and never came over a connection that lives."""
        for peer in peers:
            if peer.inflow.revive(self._clock()):
                self._ask(peer)

    async def _continue(self, peer: Peer, digest: str, receiving: Receiving) -> None:
        if not receiving.complete:
            self._ask(peer)
            return
        peer.inflow.end(digest)
        self._ask(peer)
        self._complete.add(digest)
        try:
            async with self._opening:
                await self._finish(peer, digest, receiving)
        finally:
            self._complete.discard(digest)
            self._arriving.drop(peer.client, digest)

    # --- complete ---------------------------------------------------------------------------

    async def _finish(self, peer: Peer, digest: str, receiving: Receiving) -> None:
        header = receiving.header
        payload = await asyncio.to_thread(self._open, header, receiving)
        if header.core.kind == INVENTORY:
            self._check_inventory(payload)
            await self._announced(peer, payload)
            self._send(peer, Ack(digest=digest))
            return
        expectation = self._expect(peer.client, header.core)
        faults = expectation.schema.check_upload(payload, expectation.dims)
        faults = faults or expectation.check(payload, expectation.task)
        if faults:
            raise SchemaMismatch("; ".join(faults[:10]) + ".")
        accepted = Accepted(
            client=peer.client,
            digest=digest,
            core=header.core,
            tensor_bytes=payload.tensor_bytes,
            sealed_bytes=header.sealed_bytes,
            samples=int(payload.i64("n").sum()),
        )
        stored = StoredEnvelope(
            receiving.header_bytes, receiving.signature, receiving.wrap, receiving.assembly.body()
        )
        self._spool.append(digest, stored.to_bytes())
        self._batch.append((peer, accepted))
        self._pending.add(digest)
        if self._flush is None or self._flush.done():
            self._flush = asyncio.get_running_loop().create_task(self._commit())

    def _open(self, header: Header, receiving: Receiving) -> Payload:
        key = unwrap_key(receiving.wrap, receiving.header_bytes, self._keys)
        return unpack(open_body(header, key, receiving.assembly.chunks()))

    def _check_inventory(self, payload: Payload) -> None:
        faults = inventory_faults(payload, self._max_classes)
        if faults:
            raise SchemaMismatch("; ".join(faults[:10]) + ".")

    async def _commit(self) -> None:
        """Make a batch durable with one fsync, then Ack all of it."""
        while self._batch:
            batch, self._batch = self._batch, []
            try:
                await asyncio.to_thread(self._spool.sync)
            except FcilError as error:
                for peer, accepted in batch:
                    self._refuse(peer, accepted, error)
                continue
            for peer, accepted in batch:
                try:
                    self._stored(accepted)
                except FcilError as error:
                    self._refuse(peer, accepted, error)
                except Exception as error:  # our defect must not stop the other Acks
                    text = f"{type(error).__name__}: {error}"
                    self._refuse(peer, accepted, InternalError(text))
                else:
                    self._pending.discard(accepted.digest)
                    answer = Ack(digest=accepted.digest)
                    self._send(self._newest.pop(accepted.digest, peer), answer)

    def _refuse(self, peer: Peer, accepted: Accepted, error: FcilError) -> None:
        """Take an update back that could not be made durable or was not the first."""
        self._pending.discard(accepted.digest)
        peer = self._newest.pop(accepted.digest, peer)
        with contextlib.suppress(FcilError):  # a full disk: it is removed at the next start
            self._spool.remove([accepted.digest])
        self._refused(peer, error)
        self._send(peer, nack_of(error, accepted.digest))

    def forget(self, peer: Peer, digest: str) -> None:
        """Drop what has come of an update that was refused."""
        if peer.inflow.end(digest) is not None:
            self._arriving.drop(peer.client, digest)

    def sweep(self, peers: Iterable[Peer]) -> None:
        """After a round, remove what nobody goes on with: its updates could not count any more.

        Inventories are sealed anew in every session, so theirs are never taken up again.
        """
        live = {digest for peer in peers for digest in peer.inflow.under_way}
        with contextlib.suppress(FcilError):  # what is left goes after the next round
            self._arriving.sweep(live | self._complete)

    async def drain(self) -> None:
        """Wait until everything appended is durable and acknowledged."""
        if self._flush is not None:
            await asyncio.shield(self._flush)  # a cancelled round must not cancel an Ack


def nack_of(error: FcilError, digest: str = "") -> Message:
    """Return the Nack that tells a peer of an error."""
    return Nack(
        code=error.code,
        text=error.message[:2000],
        action=(error.action or type(error).default_action())[:2000],
        digest=digest,
    )
