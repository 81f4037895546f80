"""Keeper of the current model during rounds (`current_model` defines and reads the files)."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fcil_adapters.contract import Context, TaskInfo
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.masks.record import is_of_masks
from fcil_adapters.worker.loop import context_fields
from fcil_client.link.handshake import Terms
from fcil_client.state.current_model import (
    FORMAT,
    ModelRecord,
    part_path,
    read_if_whole,
    record_bytes,
)
from fcil_client.state.home import Home
from fcil_protocol.errors import StaleUpdate, StorageError
from fcil_protocol.messages.messages import RoundOpen, UseModel
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.storage.atomic_files import (
    storage_errors,
    sync_data,
    sync_directory,
    write_atomic,
)

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class ModelKeeper:
    """Keeps the model of each round that a client takes part in.

    Args:
        weights: file of the backbone's weights, if the daemon was given one.
    """

    def __init__(self, home: Home, federation: str, weights: Path | None) -> None:
        self._home = home
        self._federation = federation
        self._weights = str(weights.resolve()) if weights else None
        self._turn = threading.Lock()

    @asynccontextmanager
    async def beside(
        self,
        order: RoundOpen,
        terms: Terms,
        ctx: Context,
        names: Mapping[str, int],
        notify: Callable[[str], None],
    ) -> AsyncIterator[None]:
        """Keep the model of an order while the work inside runs; it is on disk at the end.

        If that fails, ``notify`` receives the reason as a sentence, and the round continues.
        """

        async def keep() -> None:
            try:
                await asyncio.to_thread(self.keep, order, terms, ctx, names)
            except StorageError as error:
                notify(f"the model could not be saved; the previous one stays: {error}")

        keeping = asyncio.ensure_future(keep())
        try:
            yield
        finally:
            await asyncio.shield(keeping)

    def keep(self, order: RoundOpen, terms: Terms, ctx: Context, names: Mapping[str, int]) -> None:
        """Keep the model of an order whose parts were opened; none exists before the first class.

        A promoted model of the same run stays.

        Raises:
            DiskFull, StorageError: it cannot be kept; the previous model is intact.
        """
        with self._turn:
            before = self._before(order.run)
            if before is None or not before.promoted:
                self._replace(before, order, terms, ctx, names, promoted=False)

    def has(self, model: UseModel) -> bool:
        """Return True if an offered model is the current one, with all its parts on disk.

        The newest is also current as the model of its round, whose parts have other digests.
        """
        before = self._before(model.run)
        if before is None or before.promoted != model.promoted:
            return False
        parts = {ref.name: ref.digest for ref in model.parts if _is_of_model(ref.name)}
        same = (before.state, before.parts) == (model.base, parts)
        if not model.promoted:
            same = before.state >= model.base
        return same and all(part_path(self._home, d).exists() for d in before.parts.values())

    def keep_offered(
        self, model: UseModel, terms: Terms, names: Mapping[str, int]
    ) -> ModelRecord | None:
        """Keep a model that the server offers, whose parts were opened; return the current one.

        Raises:
            DiskFull, StorageError: it cannot be kept; the previous model is intact.
            StaleUpdate: a part is gone.
        """
        ctx = Context(
            kind=model.kind,
            task=TaskInfo(model.task, tuple(model.classes), tuple(model.past)),
            round=model.round,
            rounds=model.rounds,
            hparams=terms.hparams,
            backbone_info=terms.backbone,
            seed=(),
            privacy=Privacy(terms.privacy.noise_multiplier, terms.privacy.clip),
            forms=terms.method.forms,
        )
        with self._turn:
            before = self._before(model.run)
            newer = before is not None and not before.promoted and before.state > model.base
            if model.promoted or not newer:
                self._replace(before, model, terms, ctx, names, promoted=model.promoted)
            now = read_if_whole(self._home)
        if model.promoted and (now is None or not now.promoted or now.state != model.base):
            raise StaleUpdate(f"a part of state {model.base} is no longer on disk.")
        return now

    def release(self, run: str, promoted: int) -> None:
        """Let newer models replace a promoted one that is promoted no more.

        Args:
            run: the server's.
            promoted: its promoted state; -1: none.

        Raises:
            DiskFull, StorageError: that cannot be recorded.
        """
        with self._turn:
            before = self._before(run)
            if before is not None and before.promoted and before.state != promoted:
                write_atomic(
                    self._home.model_path,
                    record_bytes(before.model_copy(update={"promoted": False})),
                )

    def _before(self, run: str) -> ModelRecord | None:
        """Return the current model if it is one of this run."""
        before = read_if_whole(self._home)
        return before if before is not None and before.run == run else None

    def _replace(
        self,
        before: ModelRecord | None,
        order: RoundOpen | UseModel,
        terms: Terms,
        ctx: Context,
        names: Mapping[str, int],
        *,
        promoted: bool,
    ) -> None:
        first = next(e.kind for e in terms.exchanges if e.in_task(order.task))
        begins = order.kind == first and order.round == 0
        if not (begins and not order.past):
            record = ModelRecord(
                format=FORMAT,
                federation=self._federation,
                run=order.run,
                task=order.task,
                kind=order.kind,
                round=order.round,
                rounds=order.rounds,
                begins=begins,
                state=order.base,
                method=terms.method.name,
                method_version=terms.method.version,
                context=context_fields(ctx),
                parts={ref.name: ref.digest for ref in order.parts if _is_of_model(ref.name)},
                names=_names(names, before),
                weights=self._weights,
                fetched=time.time(),
                promoted=promoted,
            )
            whole = all(part_path(self._home, d).exists() for d in record.parts.values())
            if before is None or not whole or not _same(record, before):
                self._keep(record)

    def _keep(self, record: ModelRecord) -> None:
        folder = self._home.model_folder
        with storage_errors("keep the model in", folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            for digest in record.parts.values():
                if not _adopt(self._home.part_path(digest), part_path(self._home, digest)):
                    return  # another order has arrived meanwhile
            sync_directory(folder)
        write_atomic(self._home.model_path, record_bytes(record))
        wanted = {part_path(self._home, digest) for digest in record.parts.values()}
        with storage_errors("remove older parts from", folder):
            for path in folder.iterdir():
                if path not in wanted:
                    path.unlink(missing_ok=True)


def _is_of_model(part: str) -> bool:
    return part != REGISTRY and not is_of_masks(part)


def _same(record: ModelRecord, before: ModelRecord) -> bool:
    """Return True if the round brings no change."""
    now = record.model_copy(update={"fetched": before.fetched})
    return now.model_dump(mode="json") == before.model_dump(mode="json")


def _names(names: Mapping[str, int], before: ModelRecord | None) -> dict[int, str]:
    """Return id -> name; names of classes whose images were removed since stay known.

    Where a name or an id has a new meaning, the new one wins.
    """
    now: dict[int, str] = {}
    for name in sorted(names, reverse=True):  # two spellings of one class: the first by alphabet
        now[names[name]] = name
    kept = before.names if before else {}
    return {**{c: name for c, name in kept.items() if name not in names}, **now}


def _adopt(part: Path, path: Path) -> bool:
    """Link a part's file into the model's folder, durably; False if the part is gone."""
    if path.exists() and (not part.exists() or _is_copy(path, part)):
        return True
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        try:
            temporary.hardlink_to(part)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(part, temporary)
            temporary.chmod(0o600)
        _sync(temporary)
        temporary.replace(path)
    except FileNotFoundError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _is_copy(path: Path, part: Path) -> bool:
    """Return True if the model has this very file, and not one that was damaged and refetched."""
    ours, theirs = path.stat(), part.stat()
    same = (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
    return same or (ours.st_size == theirs.st_size and ours.st_mtime_ns > theirs.st_mtime_ns)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_data(fd)
    finally:
        os.close(fd)
