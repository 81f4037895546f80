"""Publication of a state: its parts are sealed once and served to every client that lacks them.

A part's content key is kept wrapped to the server itself and wrapped for a client when the client
asks, so an unchanged part is encrypted once however many clients fetch it, and a late client gets
exactly what the others had.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import fcil_protocol
from fcil_adapters.contract import Part
from fcil_protocol.envelopes.envelope import (
    ContentKey,
    Core,
    Header,
    Plain,
    StoredEnvelope,
    parse_header,
    seal,
    unwrap_key,
    wrap_key,
)
from fcil_protocol.envelopes.stored_envelope import Body
from fcil_protocol.envelopes.transfer import OBJECT_BYTES, Sender, granted
from fcil_protocol.errors import FcilError, WireError
from fcil_protocol.ids import ClientId, Digest, FederationId, RunId, sha256_of
from fcil_protocol.link.interface import SharedFrame, SharedFrames
from fcil_protocol.messages.messages import PartRef, Parts, Want
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.payloads.payload import pieces
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.object_store import ObjectStore
from fcil_server.aggregation.store import PartStore
from fcil_server.ledger.ledger import Ledger
from fcil_server.sessions.intake_pool.transfers import PART_BYTES, SmallPart
from fcil_server.sessions.peers import Peer

RECENT_PARTS = 1_000  # whose sizes are remembered
CACHE_BYTES = 256 << 20  # sealed parts kept in memory while clients fetch them
SHARED_BYTES = 8 << 20  # of their chunks, sent last: clients fetch them at about the same time


@dataclass(frozen=True)
class _CachedPart:
    """A sealed part in memory, with what every client that fetches it needs.

    Attributes:
        key: of its content, to be wrapped for each client.
        private: only clients that it was published for may fetch it.
    """

    stored: StoredEnvelope
    header: Header
    key: ContentKey
    private: bool


@dataclass(frozen=True)
class Stamp:
    """Fields of the headers of a state's parts, in addition to their names."""

    method: str
    schema_digest: str
    task: int
    round: int
    kind: str
    base: int


class Publisher:
    """Seals and serves the parts of one run."""

    def __init__(
        self,
        *,
        federation: FederationId,
        run: RunId,
        keys: PrivateKeys,
        ledger: Ledger,
        store: PartStore,
        max_plain_bytes: int,
        compact: bool,
        send: Callable[..., bool],
        objects: ObjectStore | None = None,
    ) -> None:
        self._federation = federation
        self._run = run
        self._keys = keys
        self._ledger = ledger
        self._store = store
        self._max_plain_bytes = max_plain_bytes
        self._compact = compact
        self._send = send
        self._objects = objects
        self._of_round: set[str] = set()  # digests of the rounds' state, of parts for all
        # Of these and earlier ones: a client reports later what it has fetched elsewhere.
        self._public_sizes: OrderedDict[str, int] = OrderedDict()
        self._tidying: asyncio.Task[None] | None = None  # a task that is not held may vanish
        self._cache: OrderedDict[str, _CachedPart] = OrderedDict()
        self._cached_bytes = 0
        self._shared = SharedFrames[tuple[str, range]](SHARED_BYTES)
        self._tensor_bytes: dict[str, int] = {}
        # The one private part that a client may fetch: of the rounds' state, and of another one.
        self._private: dict[ClientId, str] = {}
        self._private_beside: dict[ClientId, str] = {}
        self._beside: set[str] = set()  # digests of the other state's parts
        # The last one: clients with the same classes get the same part, often in a row.
        self._newest_private: tuple[Part, PartRef] | None = None
        self._turn = asyncio.Lock()

    async def publish(self, parts: Sequence[Part], stamp: Stamp) -> list[PartRef]:
        """Return references to a state's sealed parts, sealing those whose content is new.

        Parts of earlier states that this one no longer names are removed: no client needs
        them to catch up.
        """
        refs = [await self._reference(part, stamp) for part in parts]
        self._of_round = {ref.digest for ref in refs}
        self._note_public(refs)
        async with self._turn:  # no part is looked up, sealed or given to a client meanwhile
            await self._remove_others()
        await self._offer()
        if self._objects is not None:  # beside the round
            self._tidying = asyncio.create_task(self._objects.keep_only(self._public_digests))
        return refs

    async def _remove_others(self) -> None:
        """Remove all parts that no client may fetch any more: after a task, one of each client."""
        private = {*self._private.values(), *self._private_beside.values()}
        kept = {Digest(digest) for digest in self._public_digests() | private}
        old = [d for d in self._ledger.parts.digests(self._run) if d not in kept]
        self._ledger.parts.remove(self._run, *old)
        for digest in old:
            self._uncache(digest)
            self._tensor_bytes.pop(digest, None)
        await asyncio.to_thread(self._store.keep_only, kept)

    def _public_digests(self) -> set[str]:
        return self._of_round | self._beside

    def _note_public(self, refs: Sequence[PartRef]) -> None:
        for ref in refs:
            self._public_sizes[ref.digest] = ref.sealed_bytes
            self._public_sizes.move_to_end(ref.digest)
        while len(self._public_sizes) > RECENT_PARTS:
            self._public_sizes.popitem(last=False)

    async def _offer(self) -> None:
        """Put large parts of both states into the object store, if there is one."""
        if self._objects is None:
            return
        sizes = self._public_sizes
        large = [d for d in self._public_digests() if sizes.get(d, 0) >= OBJECT_BYTES]
        await self._objects.hold({Digest(d): partial(self._body, d) for d in sorted(large)})

    def _body(self, digest: str) -> Body:
        found = self._find(digest)
        assert found is not None, "a published part has a row"
        return found.stored.body

    def small_parts(self) -> list[SmallPart]:
        """Return the parts of the rounds' state that intake processes give clients."""
        found = []
        for digest in sorted(self._of_round):
            if not 0 < self.public_size(digest) <= PART_BYTES or self._url(digest):
                continue
            part = self._find(digest) if self._intact(digest) else None
            if part is not None and not part.private:
                stored = part.stored
                head = (part.header, stored.header, stored.signature, part.key)
                found.append(SmallPart(*head, bytes(stored.body)))
        return found

    def _url(self, digest: str) -> str:
        """Return the address of a part in the object store; empty: it is not there."""
        return "" if self._objects is None else self._objects.url(digest)

    def public_size(self, digest: str) -> int:
        """Return the sealed bytes of a recent part for all clients; 0: it is none."""
        return self._public_sizes.get(digest, 0)

    async def publish_beside(self, parts: Sequence[Part], stamp: Stamp) -> list[PartRef]:
        """Return references to the parts of one more state, which stay while rounds continue."""
        refs: list[PartRef] = []
        for part in parts:
            refs.append(await self._reference(part, stamp))
            self._beside.add(refs[-1].digest)  # at once: a round may be published meanwhile
        self._beside = {ref.digest for ref in refs}
        self._private_beside.clear()  # of the state before
        self._note_public(refs)
        await self._offer()
        return refs

    async def _reference(self, part: Part, stamp: Stamp) -> PartRef:
        async with self._turn:  # two states may have a part in common
            return await self._reference_now(part, stamp)

    async def _reference_now(self, part: Part, stamp: Stamp) -> PartRef:
        plain = pieces(part.payload, compact=self._compact)
        plain_digest = sha256_of(*plain)
        known = self._ledger.parts.by_plain(self._run, part.name, plain_digest)
        if known is not None and self._intact(known.digest):
            self._tensor_bytes[known.digest] = part.payload.tensor_bytes
            return PartRef(name=part.name, digest=known.digest, sealed_bytes=known.sealed_bytes)
        if known is not None:  # its file is gone or damaged: seal it again, under a new digest
            self._ledger.parts.remove(self._run, known.digest)
        stored = await asyncio.to_thread(self._seal, plain, part.name, stamp)
        digest = sha256_of(stored.header)
        self._ledger.parts.add(
            self._run,
            part.name,
            plain_digest=plain_digest,
            digest=digest,
            file=self._store.path(digest).name,
            plain_bytes=sum(map(len, plain)),
            sealed_bytes=len(stored.body),
            wrapped=stored.wrap,
        )
        self._remember(digest, stored, part.name)
        self._tensor_bytes[digest] = part.payload.tensor_bytes
        return PartRef(name=part.name, digest=digest, sealed_bytes=len(stored.body))

    def _intact(self, digest: str) -> bool:
        """Return True if a part can be served: its file is whole, and its key opens."""
        try:
            return self._find(digest) is not None
        except FcilError:
            return False

    def _seal(self, plain: Plain, name: str, stamp: Stamp) -> StoredEnvelope:
        """Seal a part and put it on disk; runs in a thread."""
        core = Core(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            federation=self._federation,
            run=self._run,
            direction="broadcast",
            sender="server",
            sender_key=self._keys.public.fingerprint,
            recipient="client",
            method=stamp.method,
            schema=stamp.schema_digest,
            task=stamp.task,
            round=stamp.round,
            kind=stamp.kind,
            base=stamp.base,
            part=name,
        )
        sealed, key = seal(plain, core, self._keys)
        stored = sealed.stored(wrap_key(key, sealed.header, self._keys.public))
        self._store.put(Digest(sealed.parsed.update_id), *stored.pieces())
        return stored

    async def publish_for(
        self, client: ClientId, part: Part, stamp: Stamp, *, beside: bool = False
    ) -> PartRef:
        """Publish a part for one client, in place of its earlier one.

        Only clients that a part was published for may fetch it.

        Args:
            client: the client.
            part: the part.
            stamp: further fields of its header.
            beside: it belongs to the state of `publish_beside`, not to that of the rounds.
        """
        async with self._turn:
            newest = self._newest_private
            if newest is not None and newest[0] is part and self._intact(newest[1].digest):
                ref = newest[1]
            else:
                ref = await self._reference_now(part, stamp)
                self._newest_private = (part, ref)
            (self._private_beside if beside else self._private)[client] = ref.digest
        return ref

    def _may_fetch(self, client: ClientId, digest: str) -> bool:
        """Return True if a private part was published for this client."""
        return digest in (self._private.get(client), self._private_beside.get(client))

    @property
    def object_store(self) -> str:
        """Beginning of the addresses of parts in the object store; empty: there is none."""
        return self._objects.base if self._objects is not None else ""

    def tensor_bytes(self, digest: str) -> int:
        """Return the bytes of a part's tensors alone; 0 for parts of an earlier start."""
        return self._tensor_bytes.get(digest, 0)

    def _remember(self, digest: str, stored: StoredEnvelope, name: str) -> _CachedPart:
        header = parse_header(stored.header, max_plain_bytes=self._max_plain_bytes)
        key = unwrap_key(stored.wrap, stored.header, self._keys)
        part = _CachedPart(stored, header, key, private=name == REGISTRY)
        self._uncache(digest)
        self._cache[digest] = part
        self._cached_bytes += len(stored.body)
        while len(self._cache) > 1 and self._cached_bytes > CACHE_BYTES:
            self._uncache(next(iter(self._cache)))
        return part

    def _uncache(self, digest: str) -> None:
        part = self._cache.pop(digest, None)
        if part is not None:
            self._cached_bytes -= len(part.stored.body)

    def _find(self, digest: str) -> _CachedPart | None:
        """Return a published part, from memory or from its file.

        Raises:
            CorruptFile: the file is gone or damaged.
        """
        found = self._cache.get(digest)
        if found is not None:
            self._cache.move_to_end(digest)
            return found
        row = self._ledger.parts.get(self._run, Digest(digest))
        if row is None:
            return None
        stored = StoredEnvelope.from_bytes(self._store.get(row.digest))
        return self._remember(digest, stored, row.name)

    def serve(self, peer: Peer, want: Want, credit: int) -> None:
        """Send what a client requests: a part's header with its key, or chunks of it.

        It may ask for ``credit`` bytes at a time; the rest is not sent.
        """
        part = self._find(want.digest)
        if part is None or (part.private and not self._may_fetch(peer.client, want.digest)):
            raise WireError(f"no part for this client has the digest {want.digest[:16]}.")
        stored, header = part.stored, part.header
        if want.header:
            wrap = wrap_key(part.key, stored.header, peer.keys)
            url = "" if peer.relayed else self._url(want.digest)  # its relay fetches it for all
            head = Parts(digest=want.digest, url=url)
            if not self._send(peer, head, stored.header, stored.signature, wrap):
                return
        for index in want.chunks:
            if not 0 <= index < len(header.hashes):
                raise WireError(f"part {want.digest[:16]} has no chunk {index}.")
        chunks = granted(header, want.chunks, credit)
        for message, data in Sender(header, partial(self._share, part)).messages(chunks, want.span):
            if not self._send(peer, message, data):
                return  # a full queue or no connection: the client asks again for missing chunks

    def _share(self, part: _CachedPart, run: range) -> SharedFrame:
        """Return consecutive chunks of a part, the same bytes for all clients of a moment.

        Thousands of clients that fetch a part together must not fill the memory with its copies.
        """
        name = (part.header.update_id, run)
        found = self._shared.use(name)
        if found is None:
            found = self._shared.keep(name, SharedFrame(part.stored.view(run)))
        return found
