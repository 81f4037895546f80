"""A Postgres for the tests: its programs, and clusters of its own."""

import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fcil_server.ledger.databases.database import Database
from fcil_server.ledger.databases.location import LOCATION_NAME, Location
from fcil_server.ledger.databases.sqlite import LEDGER_NAME

PROGRAMS = "FCIL_POSTGRES"  # names the folder with initdb and postgres
_DEBIAN = Path("/usr/lib/postgresql")
_SOCKET = ".s.PGSQL.5432"


def programs() -> Path:
    """Return the folder of Postgres's programs; skip the test if there is none."""
    given = os.environ.get(PROGRAMS)
    found = [Path(given)] if given else sorted(_DEBIAN.glob("*/bin"))
    for folder in reversed(found):
        if (folder / "initdb").exists():
            return folder
    pytest.skip(f"Postgres is not installed here, and {PROGRAMS} names no folder of its programs")


class Cluster:
    """A running Postgres.

    Args:
        before: words before each command, if it runs on another host or as another user.
        address: where it listens besides a socket in its folder, without passwords for its
            subnet; empty: there alone.
        port: of the address.

    Attributes:
        folder: of its socket and its data.
        url: of its database, by the address if there is one.
        local_url: by the socket.
    """

    def __init__(
        self,
        folder: Path,
        bin_folder: Path,
        before: Sequence[str] = (),
        address: str = "",
        port: int = 5432,
    ) -> None:
        self.folder, self._bin, self._before = folder, bin_folder, before
        self.local_url = f"postgresql://fcil@:{port}/postgres?host={folder}"
        self.url = f"postgresql://fcil@{address}:{port}/postgres" if address else self.local_url
        # Postgres refuses to run as root.
        as_root = not os.getuid() and not before
        self._as: dict[str, str] = {"user": "nobody", "group": "nogroup"} if as_root else {}
        if self._as:
            shutil.chown(folder, **self._as)
        data = folder / "data"
        self._run(
            "initdb", "-D", str(data), "-U", "fcil", "-A", "trust", "-E", "UTF8", "--locale=C"
        )
        if address:
            with (data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet trust\n")
        options = f"-k {folder} -c listen_addresses={address} -c port={port}"
        options += " -c max_connections=200 -c fsync=off"
        self._data, self._options = str(data), options
        self.start()

    def start(self) -> None:
        """Start it, and return when it accepts connections."""
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", self._data, "-o", self._options, "-l", log, "-w", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it: immediate (as a crash), or fast."""
        self._run("pg_ctl", "-D", self._data, "-m", mode, "-w", "stop")

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [*self._before, str(self._bin / program), *words],
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            cwd="/",
            **self._as,
        )


@contextlib.contextmanager
def new_ledgers_in(url: str) -> Iterator[None]:
    """Let each new ledger that this process makes be in Postgres."""
    from fcil_server.ledger.databases import opening
    from fcil_server.ledger.databases.postgres import move_in

    in_a_file = opening.SqliteDatabase

    def moved(path: Path, **given: object) -> Database:
        if path.name != LEDGER_NAME or path.exists() or given.get("read_only"):
            return in_a_file(path, **given)
        with in_a_file(path):
            pass
        location = Location.of(url, secrets.token_hex(8))
        move_in(location, path, replace=False)
        location.write(path.with_name(LOCATION_NAME))
        for end in ("", "-wal", "-shm"):  # `move_in` has read it
            path.with_name(path.name + end).unlink(missing_ok=True)
        return opening.open_database(path, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "SqliteDatabase", moved)
        yield


@contextlib.contextmanager
def cluster(address: str = "", port: int = 5432) -> Iterator[Cluster]:
    """Start a Postgres in a folder of its own, whose path is short enough for a socket."""
    bin_folder = programs()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    try:
        started = Cluster(folder, bin_folder, address=address, port=port)
        try:
            yield started
        finally:
            started.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class CutCommits:
    """Passes connections on to a Postgres; and cuts one after its COMMIT, without a reply.

    Attributes:
        url: of the database, through this.
        armed: cut the next connection that commits.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._folder = tempfile.mkdtemp(prefix="pg-", dir="/tmp")
        self.url = f"postgresql://fcil@:5432/postgres?host={self._folder}"
        self.armed = False
        self._behind = str(cluster.folder / _SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._folder, _SOCKET)))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Pass no further connections on; those that are open must have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._pass, args=(client,)))
            self._threads[-1].start()

    def _pass(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._behind)
            cut = False
            while True:
                ready, _, _ = select.select((client, server), (), ())
                for one in ready:
                    data = one.recv(1 << 16)
                    if not data or (cut and one is server):
                        return
                    if one is client and self.armed and b"COMMIT" in data:
                        self.armed, cut = False, True
                    (server if one is client else client).sendall(data)
