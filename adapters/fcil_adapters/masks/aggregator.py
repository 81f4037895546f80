"""The server's half of masked rounds, around a method's own (torch-free by itself)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fcil_adapters.contract import (
    Aggregator,
    Context,
    Exchange,
    Part,
    Progress,
    State,
    Update,
    Updates,
)
from fcil_adapters.contract.averaging import ABOUT, HIDDEN, Additive
from fcil_adapters.masks.exchanges import KEYS, SHARES, UNMASK, VOTE
from fcil_adapters.masks.graph import LEAST_MEMBERS, degree, threshold, with_enough_holders
from fcil_adapters.masks.record import (
    I64,
    U8,
    MaskList,
    MaskRecord,
    about_owner,
    tied,
    without_record,
)
from fcil_adapters.masks.shares import (
    add_stream,
    commitment,
    join,
    mask_key,
    pair_seed,
    stream_of_pair,
    stream_of_self,
    unseal,
)
from fcil_adapters.numerics.fixed_point import added
from fcil_adapters.numerics.relay_sums import TOGETHER, written
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.errors import InternalError
from fcil_protocol.ids import ClientId


@dataclass(frozen=True)
class MaskedAggregator:
    """Collects keys and shares, adds masked sums, and hands the unmasked ones to the method.

    Attributes:
        inner: the method's own half, which sees one update with the images of all.
        exchanges: the method's, by kind.
        run: id of the run.
    """

    inner: Aggregator
    exchanges: Mapping[str, Exchange]
    run: str

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        return self.inner.init(ctx)

    def open_task(self, ctx: Context, state: State) -> State:
        """Open a task without what a masked round of the last one may have left."""
        return self.inner.open_task(ctx, without_record(state))

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the method's parts, and those of the masked round under way.

        That of another run, from which this one was forked, is not under way here.
        """
        record = MaskRecord.read(state)
        parts = self.inner.broadcast(ctx, without_record(state))
        if record is None or record.run != self.run:
            return parts
        return (*parts, *record.parts(self._digest(ctx, record.members)))

    def _digest(self, ctx: Context, members: MaskList) -> bytes:
        return members.digest(self.run, ctx.task.index)

    # --- rounds -----------------------------------------------------------------------------

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Close one of the rounds of `masks.exchanges`."""
        if ctx.kind == KEYS:
            return MaskRecord.new(self._list(ctx, updates), self.run).into(state)
        record = self._record(ctx, state)
        if ctx.kind == SHARES:
            return _delivered(record, self._digest(ctx, record.members), updates).into(state)
        if ctx.kind == VOTE:
            return _voted(record, updates).into(state)
        if ctx.kind == UNMASK:
            return self._unmask(ctx, state, record, updates)
        return self._total(ctx, record, updates).into(state)

    def twins(self, ctx: Context, updates: Updates) -> dict[ClientId, str]:
        """Return the clients whose keys another one has too, each with a reason to exclude it.

        Every client refuses a list with one key twice, and only who knows it can send it.
        """
        if ctx.kind != KEYS:
            return {}
        members = self._list(ctx, updates)
        found: dict[ClientId, str] = {}
        for rows in (members.keys, members.signing):
            owners: dict[bytes, list[ClientId]] = {}
            for client, row in zip(members.clients, rows, strict=True):
                owners.setdefault(row.tobytes(), []).append(client)
            for several in owners.values():
                if len(several) > 1:
                    why = f"{len(several)} clients have sent one key: {', '.join(several[:3])}"
                    found |= dict.fromkeys(several, why)
        return found if len(found) < len(members.clients) else {}

    def _list(self, ctx: Context, updates: Updates) -> MaskList:
        sent = list(updates)
        columns = (
            np.concatenate([np.asarray(u.payload.tensors[name], np.uint8) for u in sent])
            for name in ("keys", "signing", "signature")
        )
        return MaskList(ctx.round, tuple(u.client for u in sent), *columns)

    def _record(self, ctx: Context, state: State) -> MaskRecord:
        record = MaskRecord.read(state)
        if record is None:
            raise InternalError(f"a round of {ctx.kind} has no list of mask keys before it.")
        return record

    def _total(self, ctx: Context, record: MaskRecord, updates: Updates) -> MaskRecord:
        clients = set(updates.clients)
        strangers = clients - {
            c for c, came in zip(record.members.clients, record.delivered, strict=True) if came
        }
        if strangers:
            raise InternalError(
                f"masked sums came from {len(strangers)} clients that have sent no shares, first "
                f"{min(strangers)}."
            )
        sums = [s.name for s in _additive(self.exchanges[ctx.kind]).sums]
        vectors = ({name: u.payload.i64(name) for name in sums} for u in updates)
        survivors = np.array([int(c in clients) for c in record.members.clients], np.int64)
        signed = [
            (np.array(u.payload.tensors[HIDDEN], np.uint8), np.array(u.payload.tensors[ABOUT]))
            for u in updates
        ]
        return replace(
            record,
            survivors=survivors,
            hidden=np.concatenate([one for one, _ in signed]),
            about=np.asarray(signed[0][1], np.uint8),
            total=added(vectors),
            of=f"{ctx.kind}/{ctx.round}",
        )

    def _unmask(self, ctx: Context, state: State, record: MaskRecord, updates: Updates) -> State:
        kind, number = record.of.split("/")
        vector = {name: np.array(array, np.int64) for name, array in record.total.items()}
        self._remove_masks(ctx, record, updates, vector)
        exchange = self.exchanges[kind]
        additive = _additive(exchange)
        payload = written(additive, vector, ctx.task.classes)
        inner_ctx = replace(ctx, kind=kind, round=int(number), rounds=int(number) + 1)
        before = without_record(state)
        if not int(payload.i64("n").sum()):
            return before  # no client had an image
        return self.inner.aggregate(inner_ctx, before, UpdateList((Update(TOGETHER, payload),)))

    def _remove_masks(
        self, ctx: Context, record: MaskRecord, updates: Updates, vector: Mapping[str, I64]
    ) -> None:
        members, digest = record.members, self._digest(ctx, record.members)
        around = members.around(digest)
        least = threshold(degree(len(members.clients)))
        held = self._held(members, digest, updates)
        rows, seeds = record.rows(), record.sealed_seeds(digest)
        for owner, row in rows.items():
            ctx.progress(Progress(row, len(rows)))  # a secret of shares takes a tenth of a second
            name = members.clients[owner]
            shares = held[owner][:least]
            if len(shares) < least:
                raise InternalError(
                    f"{len(held[owner])} neighbours of client {name} gave a share, and {least} "
                    "are needed."
                )
            secret = join(shares)
            if record.survivors[owner]:
                wanted = record.own[row].tobytes()
                if commitment(secret, about_owner(digest, owner), "own") != wanted:
                    raise InternalError(f"the shares of client {name} do not give its self-mask.")
                add_stream(vector, stream_of_self(secret, digest, name), -1)
                continue
            key = mask_key(secret)
            if key.public.sealing != members.mask_public(owner):
                raise InternalError(f"the shares of client {name} do not give its mask key.")
            for other in around[owner]:
                if not record.survivors[other]:
                    continue
                low, high = sorted((owner, other))
                names = members.clients[low], members.clients[high]
                if low == owner:
                    pair = pair_seed(secret, digest, *names)
                else:
                    pair = unseal(key, seeds[low, high].tobytes(), tied(digest, low, high))
                # The survivor has added (if it is the lower) or subtracted it; nobody else has.
                sign = -1 if other == low else 1
                add_stream(vector, stream_of_pair(pair, digest, *names), sign)

    def _held(
        self, members: MaskList, digest: bytes, updates: Updates
    ) -> dict[int, list[tuple[int, bytes]]]:
        """Return the shares given of each client: (number among its neighbours, share)."""
        held: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        around = members.around(digest)
        for update in updates:
            holder = members.clients.index(update.client)
            shares = np.asarray(update.payload.tensors["shares"], np.uint8)
            for owner, share in zip(update.payload.i64("owners").tolist(), shares, strict=True):
                place = around[owner].index(holder)
                held[owner].append((place, share.tobytes()))
        return held


def _additive(exchange: Exchange) -> Additive:
    assert exchange.additive is not None, "masked exchanges have sums"
    return exchange.additive


def _delivered(record: MaskRecord, digest: bytes, updates: Updates) -> MaskRecord:
    """Return the record with the letters of the clients whose secrets others can open.

    Raises:
        InternalError: they are fewer than a masked round needs.
    """
    sent = {u.client: u.payload for u in updates}
    members = record.members
    came = [i for i, client in enumerate(members.clients) if client in sent]
    kept = sorted(with_enough_holders(members.around(digest), came))
    if len(kept) < LEAST_MEMBERS:
        raise InternalError(
            f"{len(came)} of {len(members.clients)} clients have sent shares, and {len(kept)} of "
            "them have enough neighbours among these: too few for a masked sum."
        )
    clients = [members.clients[i] for i in kept]

    def stacked(name: str) -> U8:
        return np.stack([np.asarray(sent[c].tensors[name], np.uint8) for c in clients])

    return replace(
        record,
        delivered=_flags(len(members.clients), kept),
        letters=stacked("letters"),
        committed=stacked("committed"),
        signed=stacked("signed"),
        pairs=np.concatenate([np.asarray(sent[c].tensors["pairs"], np.uint8) for c in clients]),
        own=np.concatenate([np.asarray(sent[c].tensors["own"], np.uint8) for c in clients]),
    )


def _voted(record: MaskRecord, updates: Updates) -> MaskRecord:
    """Return the record with the votes for its set of survivors."""
    sent = {u.client: u.payload for u in updates}
    voted = [i for i, client in enumerate(record.members.clients) if client in sent]
    rows = [
        np.asarray(sent[record.members.clients[i]].tensors["signature"], np.uint8) for i in voted
    ]
    return replace(
        record, voted=_flags(len(record.members.clients), voted), votes=np.concatenate(rows)
    )


def _flags(count: int, where: Collection[int]) -> I64:
    flags = np.zeros(count, np.int64)
    flags[list(where)] = 1
    return flags
