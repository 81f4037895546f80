"""A federation's directory: created at the first start, opened by one server at a time.

::

    <directory>/
        federation.toml   the configuration, with every key and its meaning
        keys/             root.json, server.json (0600), certificate;
                          server.next.json while new keys are put in place
        page.key          signs the sessions of the dashboard (0600), once it was served
        page.left         its sessions that signed out (0600), once one did
        api.tokens        digests of the API's tokens (0600), once one was made
        api.requests      acts through the API with an Idempotency-Key (0600), for a day
        ledger.sqlite     members, runs, rounds, states, bytes; or, where
        ledger.postgres   says where in Postgres they are
        runs/<id>/        states/ parts/ spool/ incoming/ kept/ sinks/ trials.json
                          and the run's results
        webhooks/         the place in the news that each webhook has reached
        queue/            runs that wait for their turn (`fcil-server run submit`)
        worker.log        what the worker and the method print
        lock  control.sock
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import platformdirs

from fcil_protocol.errors import (
    ConfigError,
    CorruptFile,
    KeyFileError,
    Locked,
    StorageError,
    UsageError,
    WireError,
)
from fcil_protocol.ids import Digest, FederationId, RunId, is_run_id
from fcil_protocol.process.supervisor import Notifier
from fcil_protocol.storage.atomic_files import (
    DirectoryLock,
    make_private,
    storage_errors,
    write_atomic,
)
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.config import Config, as_file, load
from fcil_server.federation.environment import (
    environment_settings,
    naming_variables,
    variables_in_force,
)
from fcil_server.federation.first_start import load_first
from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.databases.opening import (
    has_ledger,
    location_of,
    open_database,
    set_aside_moved,
)
from fcil_server.ledger.databases.sqlite import log_path, refuse_newer
from fcil_server.ledger.databases.wal_check import lost_frames
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

CONFIG = "federation.toml"
_POLL_S = 1.0  # between two looks of a standby server
WEBHOOKS = "webhooks"  # a folder: the place in the news that each webhook has reached


@contextlib.contextmanager
def stopped_ledger(directory: Path) -> Iterator[Ledger]:
    """Open the ledger of a federation that no server has open.

    Raises:
        Locked: a server has. StorageError: it cannot be opened.
    """
    with contextlib.ExitStack() as ends:
        claimed = _claim(directory)
        if claimed is not None:
            ends.enter_context(claimed)
        ends.enter_context(DirectoryLock.acquire(directory, "federation"))
        ledger = ends.enter_context(Ledger(directory / LEDGER_NAME, database=claimed))
        ledger.database.claim()  # it may have been moved before the lock
        yield ledger


def _claim(directory: Path) -> Database | None:
    """Claim a ledger that other hosts reach too; None: it is a file, and the lock is enough.

    This comes before the directory's lock, whose owner sweeps the directory: on some shared file
    systems each host has a lock of its own.

    Raises:
        Locked: another server works on it. StorageError: it cannot be reached.
    """
    path = directory / LEDGER_NAME
    if location_of(path) is None:
        return None
    database = open_database(path)
    try:
        database.claim()
    except BaseException:
        database.close()
        raise
    return database


def operator() -> str:
    """Return the name that this process's user has in the audit log."""
    return f"uid {os.getuid()}"


class Federation:
    """An opened federation directory: keys, configuration, ledger.

    Attributes:
        variables: names of the environment variables that set something of the configuration.
        overrides: ``section.key=value`` of this start.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        lock: DirectoryLock,
        claimed: Database | None = None,
        variables: tuple[str, ...] = (),
        overrides: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.config = config
        self.variables = variables
        self.overrides = overrides
        self._lock = lock
        self._root_path = directory / "keys" / "root.json"
        _refuse_lost_ledger(directory)
        set_aside_moved(directory / LEDGER_NAME)
        self._lost = describe_lost_frames(directory / LEDGER_NAME)  # opening it hides them
        self.ledger = Ledger(directory / LEDGER_NAME, database=claimed)
        try:
            self.ledger.database.claim()  # it may have been moved before the lock
            self._open_keys()
        except BaseException:
            self.ledger.close()
            raise
        self._join_file: Path | None = None

    def _open_keys(self) -> None:
        keys = self.directory / "keys"
        self._take_next_keys()  # of a key change that a kill interrupted
        if self.ledger.clients.any() or self.ledger.runs.all():
            _refuse_lost_keys(keys)
        self.keys = PrivateKeys.load_or_new(keys / "server.json")
        self.certificate = self._certificate(keys / "certificate")

    @classmethod
    def open(
        cls,
        directory: Path,
        config_path: Path | None,
        overrides: tuple[str, ...],
        kept: tuple[str, ...] = (),
    ) -> Self:
        """Open a federation, or create it if there is none.

        Args:
            directory: the federation's directory.
            config_path: a TOML to use instead of the directory's own.
            overrides: ``section.key=value``, for this start only.
            kept: the overrides that a new federation keeps in its file.

        Raises:
            ConfigError, Locked, StorageError, KeyFileError.
        """
        own = directory / CONFIG
        new = not own.exists()
        if new and config_path is None and has_ledger(directory):
            raise CorruptFile(
                f"{own} is missing, though there is a ledger next to it.",
                action="Restore it from a backup, or give another one once: "
                "fcil-server serve --config FILE",
            )
        if not new and config_path is None and not own.stat().st_size:
            raise CorruptFile(f"{own} is empty.", action="Restore it from a backup.")
        path = config_path or (None if new else own)
        try:
            with naming_variables(overrides):
                config = load_first(path, overrides) if new else load(path, overrides)
                # Choices at the first start hold for every later start.
                file = as_file(load(config_path, kept)).encode() if new else b""
        except ConfigError:
            refuse_newer(directory / LEDGER_NAME)  # which may have keys that are unknown here
            raise
        with storage_errors("create the federation directory", directory):
            make_private(directory)
            (directory / "keys").mkdir(mode=0o700, exist_ok=True)
            (directory / "runs").mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as undo:
            claimed = _claim(directory)
            if claimed is not None:
                undo.callback(claimed.close)
            lock = DirectoryLock.acquire(directory, "federation")
            undo.callback(lock.release)
            if new:
                write_atomic(own, file)
            opened = cls(directory, config, lock, claimed, variables_in_force(overrides), overrides)
            undo.pop_all()
            return opened

    @classmethod
    def open_stopped(cls, directory: Path) -> Self:
        """Open the federation of a stopped server for a command, with its file and the variables.

        Raises:
            ConfigError, Locked, StorageError, KeyFileError.
        """
        return cls.open(directory, None, environment_settings())

    def _certificate(self, path: Path) -> Certificate:
        if path.exists():
            try:
                certificate = Certificate.from_bytes(path.read_bytes())
            except WireError as error:
                raise CorruptFile(
                    f"{path} is damaged: {error.message}", action="Restore it from a backup."
                ) from error
            kept_elsewhere = not self._root_path.exists()
            root = None if kept_elsewhere else RootKey.load(self._root_path)
            federation = root.federation if root else certificate.federation
            if certificate.verify(federation, time.time()) != self.keys.public:
                raise KeyFileError(
                    f"{path} certifies {certificate.keys.fingerprint[:12]}, but the server's key "
                    f"is {self.keys.public.fingerprint[:12]}; clients would refuse it.",
                    action="Restore keys/server.json from a backup.",
                )
            return certificate
        certificate = _root_key(self._root_path).certify(self.keys.public)
        write_atomic(path, certificate.to_bytes())
        return certificate

    def tell_lost_frames(self, notify: Callable[[str, str, str], None]) -> None:
        """Report, once, acknowledged frames of the ledger's log that were damaged since."""
        if self._lost:
            action = "A backup may hold more (fcil-server restore); check the disk."
            notify("warning", CorruptFile.code, f"{self._lost} {action}")
            self.ledger.database.empty_log()
            self._lost = ""

    def tell_if_open(self, notify: Callable[[str, str, str], None]) -> None:
        """Warn if other users can change the directory."""
        if text := open_to_others(self.directory):
            notify("warning", "directory", f"{text}; run: chmod 700 {self.directory}")

    def rotate_keys(self, actor: str) -> None:
        """Give the server new signing and sealing keys; members learn them without action.

        The root key certifies them, under a higher serial number. The link key stays: sleeping
        clients know no other. Sealed parts are removed, since the old key sealed them; they are
        sealed again when the server starts.

        Raises:
            UsageError: a round is open, for which clients seal updates for the old key.
        """
        run, row = self.ledger.runs.newest(), None
        if run is not None and run.status is RunStatus.RUNNING:
            row = self.ledger.rounds.current(run.run_id)
        if row is not None:
            raise UsageError(
                f"task {row.task} {row.kind} round {row.round} is open, and clients seal their "
                "updates for the present key.",
                action="Start the server, `fcil-server pause`, let the round end (or close it: "
                "fcil-server close-round), stop the server, and try again; then resume.",
            )
        RootKey.load(self._root_path)  # without it, change nothing
        fresh = PrivateKeys.generate(curve=self.keys.curve_secret)
        fresh.save(self._next_keys)
        self.ledger.audit.add(actor, "rotate_keys", fresh.public.fingerprint)
        self._take_next_keys()
        self.keys = PrivateKeys.load_or_new(self.directory / "keys" / "server.json")
        self.certificate = self._certificate(self.directory / "keys" / "certificate")

    @property
    def _next_keys(self) -> Path:
        return self.directory / "keys" / "server.next.json"

    def _take_next_keys(self) -> None:
        """Put new keys in place, if there are any; each step can be repeated."""
        if not self._next_keys.exists():
            return
        fresh = PrivateKeys.load(self._next_keys)
        for run in self.ledger.runs.all():
            for part in self.ledger.parts.all(run.run_id):
                self.ledger.parts.remove(run.run_id, Digest(part.digest))
        path = self.directory / "keys" / "certificate"
        with storage_errors("read", path):
            before = Certificate.from_bytes(path.read_bytes())
        certificate = RootKey.load(self._root_path).certify(fresh.public, after=before.serial)
        write_atomic(path, certificate.to_bytes())
        with storage_errors("replace the server's keys in", self._next_keys.parent):
            self._next_keys.replace(self.directory / "keys" / "server.json")

    @property
    def id(self) -> FederationId:
        """The federation's permanent name: the digest of its root key."""
        return self.certificate.federation

    def run_directory(self, run: RunId) -> Path:
        """Return a run's directory."""
        return self.directory / "runs" / run

    # --- the join file ----------------------------------------------------------------------

    def leave_join_file(self, addresses: list[str]) -> None:
        """Tell this user's other programs that the server runs, and its addresses."""
        folder = servers_folder()
        with storage_errors("create", folder):
            make_private(folder)
        self._join_file = folder / f"{self.id}.json"
        fields = {
            "federation": self.id,
            "name": self.config.federation.name,
            "directory": str(self.directory.resolve()),
            "addresses": addresses,
        }
        write_atomic(self._join_file, json.dumps(fields).encode())

    def keep_port(self, port: int) -> None:
        """Listen on this port from now on: clients know it."""
        section = self.config.federation
        host = section.listen.rpartition(":")[0]
        kept = section.model_copy(update={"listen": f"{host}:{port}"})
        self.config = self.config.model_copy(update={"federation": kept})

    def close(self) -> None:
        """Release everything; remove the join file."""
        if self._join_file is not None:
            self._join_file.unlink(missing_ok=True)
        self.ledger.close()
        self._lock.release()


def open_when_free(
    opening: Callable[[], Federation], directory: Path, say: Callable[[str], None]
) -> Federation:
    """Open a federation as soon as no other process works on it: a standby server takes over.

    Args:
        opening: opens it, or raises `Locked`.
        directory: the federation's, for the sentence.
        say: called with a sentence about what it waits for, whenever that changes.

    Raises:
        As ``opening``, apart from `Locked`, and a ledger that is out of reach after it.
    """
    # The service that follows takes the variables out of the environment.
    supervisor = Notifier(dict(os.environ))
    said = ""
    while True:
        try:
            return opening()
        except Locked:
            text = f"another server works on {directory}; this one takes over when it ends"
        except StorageError as error:
            if not said or location_of(directory / LEDGER_NAME) is None:
                raise  # Postgres, too, has to answer once
            text = f"{error.message} This server waits for it"
        if text != said:
            say(text)
        said = text
        supervisor.send("READY=1", "WATCHDOG=1")
        supervisor.status(text)
        time.sleep(_POLL_S)


def servers_folder() -> Path:
    """Return the folder of the join files of this user's servers."""
    return Path(platformdirs.user_state_dir("fcil", appauthor=False)) / "servers"


def find_directory(directory: Path) -> Path:
    """Check that a directory holds a federation, for commands that only read it.

    Raises:
        StorageError: it does not.
    """
    if not (directory / CONFIG).exists():
        raise StorageError(
            f"{directory} holds no federation (no {CONFIG}).",
            action="Name its directory with --dir, or start one with: fcil-server serve",
        )
    return directory


def open_to_others(directory: Path) -> str:
    """Return a sentence without its end if other users can write to a directory; else nothing."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    return f"other users can write to {directory} ({mode:04o})" if mode & 0o022 else ""


def describe_lost_frames(ledger: Path) -> str:
    """Return a sentence about frames of an unopened ledger's log that SQLite skips; or ""."""
    path = log_path(ledger)
    if not path.exists():
        return ""
    with storage_errors("read", path):
        lost = lost_frames(path.read_bytes())
    if not lost:
        return ""
    return (
        f"{lost} frames of the ledger's log after a damaged one are lost: everything in "
        f"{path} from there on, perhaps including acknowledged updates."
    )


def _refuse_lost_ledger(directory: Path) -> None:
    """Refuse to create a new ledger if runs show that there was one.

    Raises:
        CorruptFile: the ledger is missing, or empty.
    """
    path, runs = directory / LEDGER_NAME, directory / "runs"
    names = sorted(p.name for p in runs.iterdir()) if runs.is_dir() else []
    held = [name for name in names if is_run_id(name)]
    if held and not has_ledger(directory):
        what = "is empty" if path.exists() else "is missing"
        raise CorruptFile(
            f"the ledger {path} {what}, though there are runs ({', '.join(held[-3:])}): without "
            "it the members, the tasks and the valid states are unknown.",
            action="Restore a backup into a new directory: fcil-server restore FILE --dir NEW",
        )


def _refuse_lost_keys(folder: Path) -> None:
    """Refuse to create new keys if members know others.

    Raises:
        KeyFileError: the server's keys are gone, or everything that certifies them.
    """
    server, root, certificate = (
        folder / name for name in ("server.json", "root.json", "certificate")
    )
    gone = server if not server.exists() else certificate
    if not server.exists() or not (root.exists() or certificate.exists()):
        raise KeyFileError(
            f"the key file {gone} is missing, and the federation has members or runs already; "
            "with new keys no client would know this server.",
            action="Restore it from a backup (fcil-server restore FILE), or from your own copy.",
        )


def _root_key(path: Path) -> RootKey:
    if path.exists():
        return RootKey.load(path)
    root = RootKey.generate()
    root.save(path)
    return root
