"""``fcil-server backup``: one consistent file of a federation, even while its server runs.

SQLite's backup interface copies the ledger as of one moment; then follow the states that this copy
names as kept, and the counted updates that a run keeps. Updates of an open round are not included:
a restored federation does not continue their run, but forks it. Parts are sealed again from the
state.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fcil_protocol.errors import (
    CorruptFile,
    FcilError,
    KeyFileError,
    StorageError,
    UsageError,
    WireError,
)
from fcil_protocol.ids import RunId
from fcil_protocol.process.terminal import printable
from fcil_protocol.storage.atomic_files import (
    place_new,
    read_private,
    scratch,
    storage_errors,
    sync_data,
)
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.passphrase import seal_with_passphrase
from fcil_server.aggregation import start
from fcil_server.aggregation.kept_updates import SUFFIX, KeptUpdates, kept_folder
from fcil_server.aggregation.store import StateStore, check_state, states_folder
from fcil_server.federation.config import load
from fcil_server.federation.directory import CONFIG
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import StateRow
from fcil_server.runs.run_queue import RunQueue
from fcil_server.storage.archive import CERTIFICATE, KEYS, ArchiveWriter, BackupManifest

KEY_FILES = ("server.json", "root.json")
SCRATCH = "fcil-backup"  # prefix of unfinished files' names, after a dot
_TRIES = 3  # a running server may remove a state while it is copied


@dataclass(frozen=True)
class Backup:
    """A written backup."""

    file: Path
    manifest: BackupManifest
    size_bytes: int


def key_context(federation: str) -> bytes:
    """Return the context that sealed keys are bound to."""
    return b"fcil/1/backup/" + federation.encode("ascii")


def backup(directory: Path, file: Path, *, passphrase: str | None) -> Backup:
    """Write a backup; it is on disk, complete and 0600, when this returns.

    Args:
        directory: the federation's; its server may run.
        file: does not exist yet.
        passphrase: the server's keys are sealed with it; None omits them.

    Raises:
        UsageError: the file exists.
        CorruptFile: the ledger or a state is damaged.
        DiskFull, StorageError, KeyFileError: no file was left.
    """
    if file.exists() or file.is_symlink():
        raise _taken(file)
    folder = file.absolute().parent
    with scratch(folder, SCRATCH) as name:
        whole = name("file")
        manifest = _write_patiently(directory, whole, name("ledger"), passphrase)
        with storage_errors("write", file):
            size = whole.stat().st_size
            try:
                place_new(whole, file)
            except FileExistsError as error:
                raise _taken(file) from error
    return Backup(file, manifest, size)


def _taken(file: Path) -> UsageError:
    return UsageError(f"{file} exists already.", action="Give the backup a new name.")


def audit_backup(directory: Path, done: Backup, actor: str) -> bool:
    """Note a backup in the audit log, even while a server runs; return True if that worked.

    It does not bring the ledger of an older version up to date: that version may still use it.
    """
    path = directory / LEDGER_NAME
    try:
        with Ledger(path, read_only=True) as ledger:
            if ledger.database.is_older:
                return False
        with Ledger(path) as ledger:
            keys = "with sealed keys" if done.manifest.keys else "without keys"
            ledger.audit.add(actor, "backup", f"{printable(done.file.name)}, {keys}")
    except FcilError:
        return False
    return True


def _write_patiently(
    directory: Path, whole: Path, ledger: Path, passphrase: str | None
) -> BackupManifest:
    """Write the backup; again if the running server removed a state meanwhile."""
    with Ledger(directory / LEDGER_NAME, read_only=True) as live:
        live.database.refuse_damage()
    certificate = _read_certificate(directory)
    # Slow by design, so before the ledger is copied: from then on states may be pruned.
    sealed = None if passphrase is None else _seal_keys(directory, certificate, passphrase)
    for attempt in range(_TRIES):
        for temporary in (whole, ledger):
            temporary.unlink(missing_ok=True)
        try:
            return _write(directory, whole, ledger, certificate, sealed)
        except CorruptFile as error:
            if not _went_on(directory, ledger):
                raise
            if attempt == _TRIES - 1:
                raise StorageError(
                    f"the server was faster than the backup, {_TRIES} times: it made new states "
                    "and removed the one that was to be copied.",
                    action="Pause it (fcil-server pause), or try again.",
                ) from error
    raise AssertionError("the last attempt returns or raises")


def _went_on(directory: Path, snapshot: Path) -> bool:
    """Return True if the server has made a state since a copy of its ledger."""
    newest = []
    try:
        for path in (directory / LEDGER_NAME, snapshot):
            with Ledger(path, read_only=True) as ledger:
                run = ledger.runs.newest()
                newest.append(ledger.states.newest(run.run_id) if run else None)
    except FcilError:
        return False  # the caller's error describes the fault of the ledger
    return newest[0] != newest[1]


def _write(
    directory: Path, path: Path, snapshot: Path, certificate: Certificate, sealed: bytes | None
) -> BackupManifest:
    created = time.time()
    # Before the ledger: a run that begins meanwhile is then in both, and begins once.
    queued = RunQueue(directory).files()
    with Ledger(directory / LEDGER_NAME, read_only=True) as live:
        live.database.copy_to(snapshot)
    mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with storage_errors("write", path), os.fdopen(os.open(path, mode, 0o600), "wb") as out:
        writer = ArchiveWriter(out, created)
        _add_small(writer, directory, certificate, sealed)
        for name, text in queued:
            writer.add(name, text)
        writer.add_file(LEDGER_NAME, snapshot)
        with Ledger(snapshot, read_only=True) as ledger:
            run = ledger.runs.newest()
            newest = ledger.states.newest(run.run_id) if run else None
            for row in ledger.runs.all():
                _add_states(writer, directory, ledger.states.all(row.run_id), newest)
                _add_kept(writer, directory, ledger, row.run_id)
                begun = states_folder(directory, row.run_id).with_name(start.NAME)
                if begun.exists():
                    writer.add_file(f"runs/{row.run_id}/{start.NAME}", begun)
        manifest = BackupManifest(
            fcil=version("fcil"),
            created_at=created,
            federation=certificate.federation,
            name=load(directory / CONFIG).federation.name,
            run=run.run_id if run else None,
            state=newest.state if newest else None,
            keys=sealed is not None,
            files=writer.files,
        )
        writer.finish(manifest)
        out.flush()
        sync_data(out.fileno())
    return manifest


def _add_small(
    writer: ArchiveWriter, directory: Path, certificate: Certificate, sealed: bytes | None
) -> None:
    config = directory / CONFIG
    with storage_errors("read", config):
        writer.add(CONFIG, config.read_bytes())
    writer.add(CERTIFICATE, certificate.to_bytes())
    if sealed is not None:
        writer.add(KEYS, sealed)


def _seal_keys(directory: Path, certificate: Certificate, passphrase: str) -> bytes:
    found = {
        name: read_private(path).decode("utf-8")
        for name in KEY_FILES
        if (path := directory / "keys" / name).exists()
    }
    if KEY_FILES[0] not in found:
        raise KeyFileError(
            f"there is no {directory / 'keys' / KEY_FILES[0]}, so the backup would be without it.",
            action="Restore it, or leave keys out: --without-keys",
        )
    context = key_context(certificate.federation)
    return seal_with_passphrase(json.dumps(found).encode(), passphrase, context)


def _read_certificate(directory: Path) -> Certificate:
    path = directory / "keys" / "certificate"
    try:
        with storage_errors("read", path):
            return Certificate.from_bytes(path.read_bytes())
    except WireError as error:
        raise CorruptFile(f"{path} is damaged: {error.message}") from error


def _add_states(
    writer: ArchiveWriter, directory: Path, rows: list[StateRow], newest: StateRow | None
) -> None:
    """Add the kept states of a run; the newest of all must be there and intact."""
    folder = states_folder(directory, rows[0].run) if rows else None
    if folder is None or not folder.is_dir():
        return
    store = StateStore(folder)
    held = set(store.numbers())
    for row in rows:
        if row.state not in held and row != newest:
            continue  # pruned
        try:
            check_state(store, row.state, {row.state: row.digest})
            pieces = store.pair(row.state)
        except CorruptFile:
            if row == newest:
                raise
            continue  # pruned meanwhile, or damaged: `check` names it
        for suffix, data in zip(("safetensors", "json"), pieces, strict=True):
            writer.add(f"runs/{row.run}/states/{row.state:06d}.{suffix}", data)


def _add_kept(writer: ArchiveWriter, directory: Path, ledger: Ledger, run: RunId) -> None:
    """Add the counted updates that a run keeps; `check` names missing ones."""
    kept = KeptUpdates(kept_folder(directory, run))
    counted = ledger.updates.counted_ids(run)
    for update in kept.names():
        if update in counted:  # not of a round that closed after the ledger was copied
            writer.add_file(f"runs/{run}/kept/{update}{SUFFIX}", kept.path(update))
