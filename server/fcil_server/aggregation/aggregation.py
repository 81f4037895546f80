"""The methods' work on the server, carried out by a worker process.

The worker holds no keys. Updates are opened here, one at a time, as the worker asks for them, into
anonymous memory which it maps; so the server's memory does not grow with the number of clients, and
no plain text touches the disk.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import (
    BackboneInfo,
    Context,
    Hparams,
    Method,
    Part,
    State,
    backbone_info,
    registry,
)
from fcil_adapters.resources import machine
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.loop import context_fields
from fcil_adapters.worker.memory_files import Blob, MemoryFile
from fcil_adapters.worker.pipe import Blobs
from fcil_adapters.worker.retry import UNKNOWN_BATCH, Effort, persist
from fcil_protocol.envelopes.envelope import open_to, unwrap_key
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile
from fcil_protocol.errors import CorruptFile, FcilError, WorkerError
from fcil_protocol.ids import ClientId
from fcil_protocol.link.flood_watch import give_back
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.combining import Combined, Combining, limit_s
from fcil_server.aggregation.kept_updates import KeptUpdates
from fcil_server.aggregation.staleness import OlderStates
from fcil_server.aggregation.start import RunStart
from fcil_server.aggregation.trials import Trials
from fcil_server.federation.config import Config
from fcil_server.ledger.rows import UpdateRow

TOGETHER_BYTES = 4 << 20  # sealed updates that go to the worker in one message
LARGE_BYTES = 32 << 20  # sealed updates of a round: with as many, free memory is given back
Opened = MemoryFile | bytes  # an update on its way to the worker

_CORRECT = "Correct the method's aggregator if it is yours; else report it to its author."


def as_sent(updates: Sequence[UpdateRow]) -> list[list[UpdateRow]]:
    """Return the updates in groups, one for each record of the spool, in order of the first."""
    found: dict[str, list[UpdateRow]] = {}
    for update in updates:
        found.setdefault(update.record, []).append(update)
    return list(found.values())


def _one_row(updates: Sequence[UpdateRow]) -> UpdateRow:
    """Return the row of one record of the spool: an update, or a sum of some."""
    samples, size = (sum(u.samples for u in updates), sum(u.sealed_bytes for u in updates))
    return replace(updates[0], samples=samples, sealed_bytes=size)


def _first_few(updates: Sequence[UpdateRow]) -> Sequence[UpdateRow]:
    """Return the first updates, as many as go to the worker in one message."""
    sizes = accumulate(update.sealed_bytes for update in updates)
    return updates[: max(1, sum(size <= TOGETHER_BYTES for size in sizes))]


def threads_of(config: Config) -> int:
    """Return the number of threads of the server's worker."""
    return config.run.threads or machine.cores()


class Aggregation:
    """Calls of the server's worker for one run.

    Args:
        notify: receives a sentence when the worker failed and is tried again.

    Attributes:
        log: file of the worker's own output.
        device: the worker's device, once it has reported it.
        described: its description of that device, for the run's environment.
        class_conflicts: class ids, each with two clients that seem to mean different things by it,
            as of the last aggregation.
    """

    def __init__(
        self,
        method: Method,
        hparams: Hparams,
        config: Config,
        *,
        log: Path,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.log = log
        self.device = "cpu"
        self.described: dict[str, Any] = {}
        self.class_conflicts: list[tuple[int, ClientId, ClientId]] = []
        self._method = method
        self._hparams = hparams
        self._config = config
        self._notify = notify
        self._told_faults: set[str] = set()
        self._info: BackboneInfo | None = None
        self._keys: PrivateKeys | None = None
        self._spool: Spool | None = None
        self._kept: KeptUpdates | None = None
        self._trials_at: Path | None = None
        self._trials: Trials | None = None
        self._start: RunStart | None = None
        self._effort = Effort()
        self._host = WorkerHost(
            "fcil_server.aggregation.worker",
            name="server",
            threads=threads_of(config),
            idle_s=config.run.worker_idle_s,
            stall_s=config.run.work_timeout_s or None,
            log=log,
        )

    def use(
        self,
        info: BackboneInfo,
        keys: PrivateKeys,
        spool: Spool,
        kept: KeptUpdates | None = None,
        trials: Path | None = None,
        start: RunStart | None = None,
    ) -> None:
        """Provide everything needed to open updates.

        Args:
            info: the backbone's.
            keys: the server's.
            spool: the store of received updates.
            kept: the store of counted updates.
            trials: the file that keeps the results of tries to combine them.
            start: the LoRA that the run begins with; None: as drawn.
        """
        self._start = start
        self._info, self._keys, self._spool, self._kept = info, keys, spool, kept
        self._trials_at = trials

    @property
    def worker(self) -> WorkerHost:
        """The process that computes."""
        return self._host

    async def close(self) -> None:
        """End the worker."""
        await self._host.stop()

    def _backbone(self) -> dict[str, Any]:
        run = self._config.run
        return {
            "name": run.backbone,
            "weights": run.weights or None,
            "device": run.device,
            "image_size": run.image_size or None,
        }

    async def load_backbone(self) -> tuple[BackboneInfo, NDArray[np.float32] | None]:
        """Load the backbone; return its description and its (4, d) probe features.

        A method that needs none gets `NO_BACKBONE`, and nothing is loaded.
        """
        if not self._method.needs_backbone:
            self.described = {"device": self.device}
            return backbone_info.NO_BACKBONE, None
        reply, blobs = await self._call("backbone", self._backbone())
        self.device = str(reply["device"])
        self.described = {"device": self.device, "text": str(reply["description"])}
        info = backbone_info.backbone_from_fields(reply["info"])
        return info, unpack(blobs[0]).f32("probe")

    def _fields(self, ctx: Context) -> dict[str, Any]:
        return {
            "method": self._method.name,
            "context": context_fields(ctx),
            "backbone": self._backbone(),
        }

    async def _call(
        self, op: str, fields: dict[str, Any], blobs: Blobs = ()
    ) -> tuple[dict[str, Any], list[Blob]]:
        """Call the worker; retry once if it dies, in smaller steps if it lacks memory."""
        return await persist(
            self._host, self._effort, op, fields, blobs, batch=UNKNOWN_BATCH, notify=self._notify
        )

    async def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        _, blobs = await self._call("init", self._fields(ctx))
        return unpack(blobs[0])

    async def open_task(self, ctx: Context, state: State) -> State:
        """Draw the parameters that a task starts with.

        Raises:
            CorruptFile: the adapter that the run begins with is damaged.
        """
        _, blobs = await self._call("open_task", self._fields(ctx), [state])
        opened = unpack(blobs[0])
        first = self._start if ctx.task.index == 0 else None
        return opened if first is None else first.into(opened, ctx.forms)

    async def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return all parts of a state, as clients receive them.

        Raises:
            WorkerError: clients would refuse one: it violates the method's broadcast schemas, or is
                too large.
        """
        reply, blobs = await self._call("broadcast", self._fields(ctx), [state])
        most = int(self._config.wire.max_payload_mb * 1e6)
        parts, faults, action = [], [], _CORRECT
        assert self._info is not None
        for name, blob in zip(reply["parts"], blobs, strict=True):
            part = Part(str(name), unpack(blob))
            parts.append(part)
            faults += registry.part_faults(self._method, self._hparams, self._info, ctx.task, part)
            if len(blob) > most:
                action = f"Raise wire.max_payload_mb if the part is meant so. {_CORRECT}"
                limit = f"{most} that wire.max_payload_mb allows"
                faults.append(f"part {name!r}: {len(blob)} bytes, more than the {limit}")
        if faults:
            raise WorkerError(
                f"method {self._method.name} made a state whose broadcast every client would "
                f"refuse: {'; '.join(faults[:5])}.",
                action=action,
            )
        return tuple(parts)

    def _tell_faults(self, folder: str, faults: list[str]) -> None:
        """Say once that images of the server's own folder are not tested as they should be."""
        new = [fault for fault in faults if fault not in self._told_faults]
        self._told_faults.update(new)
        if new:
            more = f", and {len(new) - 1} more" if len(new) > 1 else ""
            self._notify(f"the test images in {folder}: {new[0].rstrip('.')}{more}")

    async def evaluate(
        self, ctx: Context, parts: Sequence[Part], folder: str, classes: dict[str, int]
    ) -> dict[int, tuple[int, int]]:
        """Test the global model on the server's own folder: class id -> (correct, total).

        Args:
            ctx: of the evaluation.
            parts: of the model.
            folder: the folder.
            classes: name -> id of those to test; one may have several names.
        """
        fields = {
            **self._fields(ctx),
            "data": folder,
            "classes": classes,
            "parts": [p.name for p in parts],
        }
        blobs = [p.payload for p in parts]
        said, answer = await self._call("evaluate", fields, blobs)
        self._tell_faults(folder, [str(fault) for fault in said["faults"]])
        result = unpack(answer[0])
        rows = zip(
            result.i64("classes").tolist(),
            result.i64("correct").tolist(),
            result.i64("total").tolist(),
            strict=True,
        )
        return {c: (correct, total) for c, correct, total in rows}

    # --- aggregation ------------------------------------------------------------------------

    def open_update(self, row: UpdateRow) -> Payload:
        """Open one accepted update from the spool."""
        return unpack(self._opened(row))

    def keep(self, rows: Sequence[UpdateRow]) -> None:
        """Write updates to disk permanently, if the run keeps them.

        Raises:
            CorruptFile, DiskFull, StorageError.
        """
        if self._kept is not None:
            self._kept.put((row.update_id, self._opened(row)) for row in rows)

    def undo_keep(self, rows: Sequence[UpdateRow]) -> None:
        """Undo `keep`, for a state that is not committed."""
        if self._kept is not None:
            self._kept.remove(row.update_id for row in rows)

    def _opened(self, row: UpdateRow) -> bytes:
        plain = io.BytesIO()
        self._open_to(row, plain.write)
        return plain.getvalue()

    def _shared(self, rows: Sequence[UpdateRow]) -> list[Opened]:
        """Open accepted updates: one into memory that the worker maps, several to be copied.

        Of several, those before one that cannot be opened: the error comes at its own turn.
        """
        if len(rows) == 1:
            file = MemoryFile()
            self._open_to(rows[0], file.write)
            return [file]
        opened: list[Opened] = []
        for row in rows:
            try:
                opened.append(self._opened(row))
            except FcilError:
                if not opened:
                    raise
                break
        return opened

    def _open_to(self, row: UpdateRow, write: Callable[[bytes], object]) -> None:
        """Decrypt an update from the spool step by step, or read a kept one.

        The envelope authenticates every byte. If it does not open, the spool's own checksum
        identifies a disk error.
        """
        assert self._spool is not None
        if self._kept is not None and row.update_id in self._kept:
            write(self._kept.get(row.update_id))
            return
        assert self._keys is not None
        try:
            with self._spool.open(row.record, EnvelopeFile) as stored:
                key = unwrap_key(stored.wrap, stored.header, self._keys)
                if stored.parsed.update_id != row.record:
                    raise CorruptFile(f"the spool's record {row.record!r} is another update.")
                open_to(stored.parsed, key, stored.steps(), write)
        except FcilError:
            self._spool.get(row.record)
            raise

    async def aggregate(
        self,
        ctx: Context,
        state: State,
        updates: Sequence[UpdateRow],
        older: OlderStates,
    ) -> Combined:
        """Combine updates in ClientId order, and check the state and its broadcast.

        Updates far from the others' (`[trust] outlier_factor`) are excluded with their reason, and
        so are those that make it fail, as far as single ones are at fault (`combining`).

        Args:
            ctx: of the round.
            state: that it starts from.
            updates: at least one.
            older: the older states that some of them start from.

        Raises:
            StorageError: the disk is at fault.
        """
        about = (
            *(version("fcil"), self._method.name, self._method.version),
            *(ctx.kind, str(ctx.task.index), str(ctx.round)),
            *(u.record for u in updates),
        )
        self._trials = Trials(self._trials_at, about)
        if sum(u.sealed_bytes for u in updates) >= LARGE_BYTES:
            # The allocator keeps what the arriving updates took; now the worker needs memory.
            await asyncio.to_thread(give_back)
        sent = as_sent(updates)
        combining = Combining(
            lambda some: self._combine(ctx, state, some, older),
            [_one_row(rows) for rows in sent],
            self._trials,
            limit_s(self._config.run.work_timeout_s, len(sent)),
            self._notify,
        )
        combined = await combining.run()
        of_sender = {rows[0].client: rows for rows in sent}
        excluded = {u.client: why for c, why in combined.excluded.items() for u in of_sender[c]}
        return replace(combined, excluded=excluded)

    def settled(self) -> None:
        """Forget the tries of the last aggregation: its round is closed."""
        if self._trials is not None:
            self._trials.forget()

    async def _combine(
        self, ctx: Context, state: State, updates: Sequence[UpdateRow], older: OlderStates
    ) -> Combined:
        """Return the combined state, checked, and the excluded clients with reasons."""
        trust = self._config.trust

        async def open_some(fields: dict[str, Any]) -> tuple[dict[str, Any], list[Opened]]:
            few = _first_few([updates[int(n)] for n in fields["updates"]])
            return {}, await asyncio.to_thread(self._shared, few)

        ages = [older.staleness(u.base_state) for u in updates]
        states = [state, *(older.states[older.current - age] for age in sorted({*ages} - {0}))]
        fields = {
            **self._fields(ctx),
            "staleness": ages,
            "clients": [u.client for u in updates],
            "samples": [u.samples for u in updates],
            "outliers": {
                "factor": trust.outlier_factor,
                "min_clients": trust.outlier_min_clients,
            },
        }
        reply, blobs = await self._host.call("aggregate", fields, states, on_request=open_some)
        combined = unpack(blobs[0])
        self.class_conflicts = [
            (int(c), ClientId(a), ClientId(b)) for c, a, b, _ in reply["far_apart"]
        ]
        bad = [
            n
            for n, t in combined.tensors.items()
            if t.dtype.kind == "f" and not np.isfinite(t).all()
        ]
        if bad:
            raise WorkerError(
                f"method {self._method.name} made a state that holds NaN or infinity in "
                f"{', '.join(bad[:5])}.",
                action=_CORRECT,
            )
        parts = await self.broadcast(ctx, combined)
        excluded = {ClientId(c): str(why) for c, why in reply["excluded"].items()}
        return Combined(combined, parts, excluded)
