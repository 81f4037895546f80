"""The server's worker process: backbone, aggregator, central test. No keys, no sockets.

Started by the daemon as ``python -m fcil_server.aggregation.worker --fd N``. The state arrives with
every call and leaves with its result, so a new process can take over at any call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcil_adapters.contract import (
    AveragingAggregator,
    Context,
    Method,
    Preprocessing,
    State,
    registry,
)
from fcil_adapters.images.cache import CachedImages, ImageStore
from fcil_adapters.images.decoding import ImageEntry, digest, open_source
from fcil_adapters.images.named_sets import find
from fcil_adapters.masks.aggregator import MaskedAggregator
from fcil_adapters.masks.record import without_masks
from fcil_adapters.numerics.class_conflicts import ClassConflicts
from fcil_adapters.numerics.outliers import OutlierRule, screen
from fcil_adapters.numerics.relay_sums import SummedAggregator
from fcil_adapters.worker import loop as worker_ops
from fcil_adapters.worker.loop import Call, Reply
from fcil_adapters.worker.memory_files import Blob
from fcil_adapters.worker.models import LoadedModels, evaluate, read_parts
from fcil_protocol.errors import DataError, WireError
from fcil_protocol.payloads.payload import unpack
from fcil_protocol.payloads.schema import class_key
from fcil_server.aggregation.pulled_updates import PulledUpdates
from fcil_server.aggregation.staleness import Rebase, unmoved

CENTRAL_MEMORY_BYTES = 1 << 30  # 7,000 decoded images of 224 x 224 pixels


@dataclass(frozen=True)
class _TestImage:
    entry: ImageEntry
    digest: str


class CentralTest:
    """The server's own test images; decoded ones are kept from task to task.

    Attributes:
        store: decodes the images.
        faults: one sentence per file that cannot be used.
    """

    def __init__(self, path: Path, preprocessing: Preprocessing) -> None:
        self.path = path
        self.preprocessing = preprocessing
        self.store = ImageStore(open_source(path), preprocessing, memory_bytes=CENTRAL_MEMORY_BYTES)
        self.faults: list[str] = []
        self._images: dict[ImageEntry, _TestImage] = {}

    def look(self) -> None:
        """Read the folder again; if it has a ``test`` folder, only that counts.

        Images that are there to train on are never tested on: with ``train`` alone there are none.
        """
        source = open_source(self.path)
        self.store.source.close()
        self.store.source = source
        self.store.faults.clear()
        listing = source.listing()
        self.faults = list(listing.faults)
        parts = {entry.part for entry in listing.entries}
        if parts == {"train"}:
            self.faults.append(f"{self.path} has images in train/ and none in test/ to test on.")
        images: dict[ImageEntry, _TestImage] = {}
        for entry in listing.entries:
            self.store.alive()
            if entry.part == "train" or (entry.part is None and "test" in parts):
                continue
            try:
                known = self._images.get(entry)
                images[entry] = known or _TestImage(entry, digest(source.read(entry)).hex())
            except DataError as error:
                self.faults.append(error.message)
        self._images = images

    def view(self, classes: Mapping[str, int]) -> CachedImages:
        """Open the images of some classes, name -> id."""
        ids = {class_key(name): number for name, number in classes.items()}
        keyed = ((image, class_key(image.entry.class_name)) for image in self._images.values())
        return self.store.view([(image, ids[key]) for image, key in keyed if key in ids])


class ServerWorker:
    """The worker's operations and the data that it keeps between calls."""

    def __init__(self) -> None:
        self._engine = LoadedModels()
        self._test: CentralTest | None = None

    def operations(self) -> dict[str, worker_ops.Operation]:
        """Return the operations by name. All but ``backbone`` take `Engine.prepare`'s fields."""
        return {
            "backbone": self._engine.backbone,
            "init": self.init,
            "open_task": self.open_task,
            "aggregate": self.aggregate,
            "broadcast": self.broadcast,
            "evaluate": self.evaluate,
        }

    def init(self, call: Call) -> Reply:
        """Return the state before the first task."""
        method, ctx = self._engine.prepare(call)
        return {}, [_half(method, ctx).init(ctx)]

    def open_task(self, call: Call) -> Reply:
        """Return the state with the task opened. Payload: the state."""
        method, ctx = self._engine.prepare(call)
        state = unpack(_only(call))
        return {}, [_half(method, ctx).open_task(ctx, state)]

    def aggregate(self, call: Call) -> Reply:
        """Return the state with the round's updates combined.

        Payloads: the state, and the older ones that updates start from, the youngest first. Fields:
        ``clients`` (sorted), ``samples`` (n_k > 0), ``staleness`` (of each update, in states) and
        ``outliers`` (an `OutlierRule`'s).
        The worker requests updates with ``{"updates": indices}`` before their turn; the answer
        holds the first of them, at least one. It requests those again that were too large to keep.
        Result: ``excluded``, the clients
        whose updates are excluded, each with its reason; ``pairs``, lists of a class id, two
        clients that seem to mean different things by it, and their distance.
        """
        method, ctx = self._engine.prepare(call)
        clients, samples = call.fields["clients"], call.fields["samples"]
        if not clients or len(clients) != len(samples) or clients != sorted(set(clients)):
            raise WireError("an aggregation needs sorted clients, each with its samples.")
        state, *older = [unpack(blob) for blob in call.payloads]
        half = _half(method, ctx)
        numbers = tuple(range(len(clients)))
        updates = PulledUpdates(
            call,
            tuple(clients),
            tuple(samples),
            numbers,
            forms=ctx.forms,
            move=_rebase(call, half, ctx, state, older) if older else unmoved,
        )
        if isinstance(half, MaskedAggregator):
            # Each was checked as it came; sums have no outliers that could be seen.
            twins = half.twins(ctx, updates)
            kept = updates.without(twins)
            return {"excluded": twins, "far_apart": []}, [half.aggregate(ctx, state, kept)]
        if isinstance(half, SummedAggregator) and half.adds_up(ctx.kind):
            return {"excluded": {}, "far_apart": []}, [half.aggregate(ctx, state, updates)]
        exchange = registry.find_exchange(method, ctx.hparams, ctx.backbone_info, ctx.kind)
        excluded = screen(OutlierRule(**call.fields["outliers"]), updates, exchange.upload)
        conflicts = ClassConflicts(exchange.upload, ctx.task)
        kept = replace(updates.without(excluded), look=conflicts.take)
        combined = half.aggregate(ctx, state, kept)
        pairs = conflicts.pairs()
        apart = [[p.class_id, p.one, p.other, round(p.ratio, 2)] for p in pairs]
        return {"excluded": excluded, "far_apart": apart}, [combined]

    def broadcast(self, call: Call) -> Reply:
        """Return all parts of a state; their names are in ``parts``. Payload: the state."""
        method, ctx = self._engine.prepare(call)
        parts = _half(method, ctx).broadcast(ctx, unpack(_only(call)))
        schemas = method.broadcast(ctx.hparams, ctx.backbone_info)
        sent = [
            ctx.forms.narrow_exactly(part.payload, schemas[part.kind])
            if part.kind in schemas
            else part.payload  # the daemon refuses it
            for part in parts
        ]
        return {"parts": [part.name for part in parts]}, sent

    def evaluate(self, call: Call) -> Reply:
        """Evaluate the global model on the server's own test images.

        Fields: ``data`` (path), ``classes`` {name: id} of those to test, ``parts`` (names).
        Payloads: the parts. Result: ``images``, ``faults``; payload: as
        ``payloads.builtin.EVALUATE`` on the wire.
        """
        method, ctx = self._engine.prepare(call)
        parts = without_masks(read_parts(call, call.payloads, ctx.forms))
        test = self._open_test(call, ctx.backbone_info.preprocessing)
        images = test.view(call.fields["classes"])
        counts = evaluate(method, ctx, parts, images)
        return {"images": len(images), "faults": [*test.faults, *test.store.faults]}, [counts]

    def _open_test(self, call: Call, preprocessing: Preprocessing) -> CentralTest:
        path = find(Path(call.fields["data"]))
        if self._test is None or (self._test.path, self._test.preprocessing) != (
            path,
            preprocessing,
        ):
            if self._test is not None:
                self._test.store.close()
            self._test = CentralTest(path, preprocessing)
        self._test.store.alive = call.alive
        self._test.look()
        return self._test


def _half(method: Method, ctx: Context) -> Any:
    """Return the method's server half, within that of masked rounds or sums if the run has them."""
    half = registry.load_half(method.aggregator)
    exchanges = {e.kind: e for e in method.exchanges(ctx.hparams, ctx.backbone_info)}
    if ctx.masked_run:
        return MaskedAggregator(half, exchanges, ctx.masked_run)
    if ctx.summed:
        dims = method.dims(ctx.hparams, ctx.backbone_info, ctx.task)
        return SummedAggregator(half, exchanges, dims)
    return half


def _rebase(
    call: Call, half: AveragingAggregator, ctx: Context, state: State, older: Sequence[State]
) -> Rebase:
    """Return what moves updates that start from older states to the current one."""
    ages = call.fields["staleness"]
    starts = [half.start(ctx, one) for one in older]
    of_age = dict(zip(sorted({*ages} - {0}), starts, strict=True))
    return Rebase(half.start(ctx, state), of_age, ages)


def _only(call: Call) -> Blob:
    if len(call.payloads) != 1:
        raise WireError(f"this operation takes one state, got {len(call.payloads)} payloads.")
    return call.payloads[0]


if __name__ == "__main__":
    worker_ops.main(ServerWorker().operations())
