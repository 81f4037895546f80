"""A federation's directory: made at the first start, opened by one server at a time.

::

    <directory>/
        federation.toml   the configuration, with every key and its meaning
        keys/             root.json, server.json (0600), certificate
        ledger.sqlite     who, what, when, how many bytes
        runs/<id>/        states/ parts/ spool/ incoming/ and the run's results
        lock  control.sock
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Self

import platformdirs

from fcil_protocol.errors import CorruptFile, KeyFileError, StorageError, WireError
from fcil_protocol.files import DirectoryLock, storage_errors, write_atomic
from fcil_protocol.ids import FederationId, RunId
from fcil_protocol.keys import Certificate, PrivateKeys, RootKey
from fcil_server.config import Config, load, to_toml
from fcil_server.ledger import Ledger

CONFIG = "federation.toml"


class Federation:
    """An opened federation directory: keys, configuration, ledger."""

    def __init__(self, directory: Path, config: Config, lock: DirectoryLock) -> None:
        self.directory = directory
        self.config = config
        self._lock = lock
        self.root = _root_key(directory / "keys" / "root.json")
        self.keys = _server_keys(directory / "keys" / "server.json")
        self.certificate = self._certificate(directory / "keys" / "certificate")
        self.ledger = Ledger(directory / "ledger.sqlite")
        self._join_file: Path | None = None

    @classmethod
    def open(cls, directory: Path, config_path: Path | None, overrides: tuple[str, ...]) -> Self:
        """Open a federation, or make one where there is none.

        Args:
            directory: the federation's directory.
            config_path: a TOML to use instead of the directory's own.
            overrides: ``section.key=value``, for this start only.

        Raises:
            ConfigError, Locked, StorageError, KeyFileError.
        """
        own = directory / CONFIG
        new = not own.exists()
        path = config_path or (None if new else own)
        config = load(path, overrides)
        with storage_errors("create the federation directory", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / "keys").mkdir(mode=0o700, exist_ok=True)
            (directory / "runs").mkdir(mode=0o700, exist_ok=True)
        lock = DirectoryLock.acquire(directory, "federation")
        try:
            if new:
                # Overrides are for this start only: the file has what the user gave as a file.
                text = to_toml(load(config_path), comments=True)
                write_atomic(own, text.encode())
            return cls(directory, config, lock)
        except BaseException:
            lock.release()
            raise

    def _certificate(self, path: Path) -> Certificate:
        if path.exists():
            try:
                certificate = Certificate.from_bytes(path.read_bytes())
            except WireError as error:
                raise CorruptFile(
                    f"{path} is damaged: {error.message}", action="Restore it from a backup."
                ) from error
            if certificate.verify(self.id, time.time()) != self.keys.public:
                raise KeyFileError(
                    f"{path} certifies {certificate.keys.fingerprint[:12]}, but the server's key "
                    f"is {self.keys.public.fingerprint[:12]}; clients would refuse it.",
                    action="Restore keys/server.json from a backup.",
                )
            return certificate
        certificate = self.root.certify(self.keys.public)
        write_atomic(path, certificate.to_bytes())
        return certificate

    @property
    def id(self) -> FederationId:
        """The federation's name for all time: the digest of its root key."""
        return self.root.federation

    def run_directory(self, run: RunId) -> Path:
        """Return a run's directory."""
        return self.directory / "runs" / run

    # --- the join file ----------------------------------------------------------------------

    def leave_join_file(self, addresses: list[str]) -> None:
        """Tell this user's other programs that the server runs, and where."""
        folder = servers_folder()
        with storage_errors("create", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._join_file = folder / f"{self.id}.json"
        fields = {
            "federation": self.id,
            "name": self.config.federation.name,
            "directory": str(self.directory.resolve()),
            "addresses": addresses,
        }
        write_atomic(self._join_file, json.dumps(fields).encode())

    def close(self) -> None:
        """Release everything; remove the join file."""
        if self._join_file is not None:
            self._join_file.unlink(missing_ok=True)
        self.ledger.close()
        self._lock.release()


def servers_folder() -> Path:
    """Return where servers of this user leave their join files."""
    return Path(platformdirs.user_state_dir("fcil", appauthor=False)) / "servers"


def find_directory(directory: Path) -> Path:
    """Check that a directory holds a federation, for commands that only look at it.

    Raises:
        StorageError: it does not.
    """
    if not (directory / CONFIG).exists():
        raise StorageError(
            f"{directory} holds no federation (no {CONFIG}).",
            action="Name its directory with --dir, or start one with: fcil-server serve",
        )
    return directory


def _root_key(path: Path) -> RootKey:
    if path.exists():
        return RootKey.load(path)
    root = RootKey.generate()
    root.save(path)
    return root


def _server_keys(path: Path) -> PrivateKeys:
    if path.exists():
        return PrivateKeys.load(path)
    keys = PrivateKeys.generate()
    keys.save(path)
    return keys
