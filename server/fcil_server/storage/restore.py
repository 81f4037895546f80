"""``fcil-server restore``: a federation directory from a backup.

Clients may have seen more than the backup holds, so an unfinished run is forked: they meet a run
that they do not know, and begin with its first state. One without a state begins again as another
run for the same reason.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from fcil_protocol.errors import ConfigError, CorruptFile, KeyFileError, UsageError, WireError
from fcil_protocol.storage.atomic_files import (
    make_private,
    scratch,
    storage_errors,
    sync_directory,
    write_atomic,
)
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.passphrase import open_with_passphrase
from fcil_server.federation.directory import CONFIG
from fcil_server.ledger.databases.sqlite import remove_older
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.runs.fork import fork
from fcil_server.runs.run_queue import RunQueue
from fcil_server.runs.run_record import begin_again
from fcil_server.storage.archive import CERTIFICATE, KEYS, BackupManifest, unpack_into, verify
from fcil_server.storage.backup import KEY_FILES, key_context


@dataclass(frozen=True)
class Keys:
    """Source of the keys of a restored federation: exactly one of these.

    Attributes:
        passphrase: opens those in the backup.
        folder: holds ``server.json``, and perhaps ``root.json``.
        fresh: new keys are made, and clients must be enrolled again.
    """

    passphrase: str | None = field(default=None, repr=False)
    folder: Path | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Restored:
    """Result of a restoration.

    Attributes:
        fork: the run that continues; None if there was none to continue.
        begun: the run that begins again, under this id, since it had no state yet; None if there
            was none.
        refused: why a run without a state does not begin again: its settings; empty: none was.
        members: names of clients that may join, including any revoked after the backup.
        withdrawn: number of open tickets that were withdrawn.
        recertified: the server's keys have a newer certificate, so that clients who saw keys that
            came after the backup accept them.
    """

    manifest: BackupManifest
    fork: RunRow | None
    begun: RunRow | None
    members: list[str]
    withdrawn: int
    recertified: bool
    refused: str = ""


def restore(file: Path, directory: Path, keys: Keys, *, actor: str) -> Restored:
    """Create a federation directory from a backup, completely or not at all.

    Raises:
        UsageError: the directory is not empty or is a mount point, or no keys are given.
        CorruptFile: the backup is damaged; nothing was written.
        CannotOpen: the passphrase does not fit.
        KeyFileError: the given keys are not this federation's.
        DiskFull, StorageError.
    """
    directory = directory.absolute()
    if directory.is_mount():
        raise UsageError(
            f"{directory} is a mount point, which cannot appear at once and complete.",
            action=f"Restore into a folder inside it: --dir {directory / 'federation'}",
        )
    if directory.is_symlink() or (directory.exists() and not _is_empty(directory)):
        raise UsageError(
            f"{directory} is not empty.", action="Restore into a new directory: --dir NEW"
        )
    manifest = verify(file)
    _check_names(file, manifest)
    _check_choice(file, manifest, keys)
    with storage_errors("create", directory.parent):
        make_private(directory.parent)
    with scratch(directory.parent, f"{directory.name}.restore") as name:
        staged = name("folder")
        with storage_errors("create", staged):
            staged.mkdir(mode=0o700)
        unpack_into(file, manifest, staged)
        _check_content(file, staged)
        recertified = _place_keys(file, staged, manifest, keys)
        done = _settle(staged, manifest, keys, actor, recertified=recertified)
        _sync_all(staged)
        with storage_errors("create", directory):
            staged.replace(directory)  # replaces an empty directory
            sync_directory(directory.parent)
    return done


def _is_empty(directory: Path) -> bool:
    with storage_errors("look into", directory):
        return directory.is_dir() and not any(directory.iterdir())


def _check_names(file: Path, manifest: BackupManifest) -> None:
    needed = [CONFIG, CERTIFICATE, LEDGER_NAME, *([KEYS] if manifest.keys else [])]
    if missing := [name for name in needed if name not in manifest.files]:
        raise _incomplete(
            file, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )


def _check_content(file: Path, staged: Path) -> None:
    """Refuse a backup that would become a federation without its settings or its members.

    Raises:
        CorruptFile: the settings are no TOML, or the ledger is none.
    """
    try:
        tomllib.loads((staged / CONFIG).read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise _incomplete(file, f"{CONFIG} in it is no TOML ({error})") from error
    if not (staged / LEDGER_NAME).stat().st_size:
        raise _incomplete(file, f"{LEDGER_NAME} in it is empty")
    try:
        with Ledger(staged / LEDGER_NAME) as ledger:  # one of an earlier version is upgraded
            ledger.database.refuse_damage()
        remove_older(staged)  # its clients have seen more than that: it must not be served again
    except CorruptFile as error:
        raise _incomplete(file, f"{LEDGER_NAME} in it is damaged") from error


def _incomplete(file: Path, why: str) -> CorruptFile:
    return CorruptFile(
        f"{file} is not a complete fcil backup: {why}.",
        action="Use another backup; nothing was written.",
    )


def _check_choice(file: Path, manifest: BackupManifest, keys: Keys) -> None:
    given = [keys.passphrase is not None, keys.folder is not None, keys.fresh]
    if sum(given) != 1:
        where = "--passphrase-file FILE" if manifest.keys else "--keys FOLDER with your own copy"
        raise UsageError(
            f"{file} holds {'sealed' if manifest.keys else 'no'} keys; say where the server's keys "
            "come from.",
            action=f"Give {where}, or --new-keys (every client must be enrolled again).",
        )
    if keys.passphrase is not None and not manifest.keys:
        raise UsageError(
            f"{file} was written without keys, so there is nothing to open with a passphrase.",
            action="Give --keys FOLDER with your own copy of keys/, or --new-keys.",
        )


def _place_keys(file: Path, staged: Path, manifest: BackupManifest, keys: Keys) -> bool:
    """Put keys and certificate in place; return True if the certificate is a new one."""
    folder, sealed, carried = staged / "keys", staged / KEYS, staged / CERTIFICATE
    with storage_errors("create", folder):
        folder.mkdir(mode=0o700)
    if keys.passphrase is not None:
        context = key_context(manifest.federation)
        found = json.loads(open_with_passphrase(sealed.read_bytes(), keys.passphrase, context))
        for name in KEY_FILES:
            if name in found:
                write_atomic(folder / name, str(found[name]).encode())
    elif keys.folder is not None:
        server, root = (keys.folder / name for name in KEY_FILES)
        PrivateKeys.load(server).save(folder / server.name)
        if root.exists():
            RootKey.load(root).save(folder / root.name)
    try:
        certificate = Certificate.from_bytes(carried.read_bytes())
    except WireError as error:
        raise _incomplete(file, f"its certificate is damaged: {error.message}") from error
    if certificate.federation != manifest.federation:
        raise _incomplete(file, "its certificate is of another federation")
    sealed.unlink(missing_ok=True)
    carried.unlink()
    if not keys.fresh:
        return _certify(folder, certificate)
    own, anew = PrivateKeys.generate(), RootKey.generate()
    own.save(folder / KEY_FILES[0])
    anew.save(folder / KEY_FILES[1])
    write_atomic(folder / "certificate", anew.certify(own.public).to_bytes())
    return True


def _certify(folder: Path, certificate: Certificate) -> bool:
    """Write the certificate: a newer one if the root key is there to make it.

    Clients refuse keys that are older than those they have seen, and the backup's may be.

    Raises:
        KeyFileError: the keys belong to another federation or server.
    """
    own = PrivateKeys.load(folder / KEY_FILES[0]).public
    root = RootKey.load(folder / KEY_FILES[1]) if (folder / KEY_FILES[1]).exists() else None
    if root is not None and root.federation != certificate.federation:
        raise KeyFileError(
            f"the root key is of federation {root.federation}, the backup of "
            f"{certificate.federation}."
        )
    if own.curve != certificate.keys.curve or (root is None and own != certificate.keys):
        raise KeyFileError(
            f"the server key {own.fingerprint} is not the one that the backup's certificate "
            f"names ({certificate.keys.fingerprint})."
        )
    certificate = certificate if root is None else root.certify(own, after=certificate.serial)
    write_atomic(folder / "certificate", certificate.to_bytes())
    return root is not None


def _settle(
    staged: Path, manifest: BackupManifest, keys: Keys, actor: str, *, recertified: bool
) -> Restored:
    """Fork the unfinished run; withdraw tickets that may have been withdrawn since."""
    with Ledger(staged / LEDGER_NAME) as ledger:
        run, going = ledger.runs.newest(), (RunStatus.RUNNING, RunStatus.FAILED)
        forked: RunRow | None = None
        begun: RunRow | None = None
        refused = ""
        if run is not None and run.status in going:
            newest = ledger.states.newest(run.run_id)
            if newest is None:  # since the backup it may have had some, under the same numbers
                try:
                    begun = begin_again(ledger, staged, run, actor=actor)
                except ConfigError as error:  # a newer version may refuse an older one's settings
                    ledger.runs.set_status(run.run_id, RunStatus.STOPPED)
                    refused = f"run {run.run_id} had no state yet and is stopped: {error.message}"
            else:
                forked = fork(
                    ledger, staged, run.run_id, newest.state, actor=actor, action="restore_fork"
                )
        with ledger.transaction():
            names = {t.name for t in ledger.tickets.all()}
            withdrawn = sum(ledger.tickets.withdraw(name) for name in sorted(names))
            if keys.fresh:
                for client in ledger.clients.all():
                    ledger.clients.revoke(client.client_id, "the federation has new keys")
                for part in (p for r in ledger.runs.all() for p in ledger.parts.all(r.run_id)):
                    ledger.parts.remove(part.run, part.digest)
            ledger.audit.add(actor, "restore", f"backup of {manifest.created_at:.0f}")
        members = [c.name for c in ledger.clients.all() if c.may_join(ledger.now)]
        RunQueue(staged).keep_numbers(ledger)
    return Restored(manifest, forked, begun, members, withdrawn, recertified, refused)


def _sync_all(directory: Path) -> None:
    """Sync every file and name under a directory to disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            with storage_errors("sync", path):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        with storage_errors("sync", Path(folder)):
            sync_directory(Path(folder))
