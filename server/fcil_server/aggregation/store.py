"""Files that the server must never lose: numbered states and sealed parts.

``states/000012.safetensors`` is exactly the packed state; ``000012.json`` next to it holds its
SHA-256, its number, its task and its parent's digest. The state is written first, the record after
it, both atomically, so a state without a valid record was never committed. The record carries its
own number, so a renamed file is refused like an altered one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fcil_protocol.envelopes.stored_envelope import Body
from fcil_protocol.errors import CorruptFile, FcilError, InternalError
from fcil_protocol.ids import Digest, RunId, is_digest, new_run_id, sha256_of
from fcil_protocol.payloads.payload import Payload, pieces, unpack
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import StateRow

KEPT_STATES = 3

_STATE_FILE = re.compile(r"(\d{6,})\.(safetensors|json)")
_PART_MAGIC = b"fcilprt1"
_HASH_BYTES = 32


@dataclass(frozen=True)
class StateRecord:
    """Record of a stored state, readable without the state itself.

    Attributes:
        digest: SHA-256 of the packed state (hex).
        parent: digest of the state it was computed from; None for a run's first.
        task: the task whose rounds it belongs to, -1 before the first.
    """

    number: int
    digest: Digest
    parent: Digest | None
    task: int
    size_bytes: int


class StateStore:
    """The numbered states of one run, in one directory.

    ``keep`` is the number of newest states that survive `prune`, besides each task's last and those
    that its caller names.
    """

    def __init__(self, directory: Path, *, keep: int = KEPT_STATES) -> None:
        assert keep >= 1, "the newest state must survive"
        self.directory = directory
        self.keep = keep
        with storage_errors("create", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        """Return the path of the packed state; ``.json`` next to it is its record."""
        return self.directory / f"{number:06d}.safetensors"

    def save(self, number: int, state: Payload, parent: Digest | None, task: int) -> Digest:
        """Write a state and its record; both are on disk when this returns.

        Saving the same state under its number again changes nothing, so an interrupted commit can
        be repeated. A number whose stored state is damaged may be written again.

        Raises:
            InternalError: a tensor holds NaN or infinity, or another state has this number.
            DiskFull, StorageError: it could not be written.
        """
        _refuse_non_finite(number, state)
        data = pieces(state)
        digest = sha256_of(*data)
        if number in self.numbers():
            try:
                held = self._verified(number)[0]
            except CorruptFile:
                held = None
            if held is not None and held.digest == digest:
                return digest
            if held is not None:
                raise InternalError(
                    f"state {number} exists with digest {held.digest[:16]}, got {digest[:16]}; "
                    "a state never changes."
                )
        write_atomic(self.path(number), *data, sync_name=False)  # with the name of its record
        record = StateRecord(number, digest, parent, task, sum(map(len, data)))
        write_atomic(self._record_path(number), _record_bytes(record))
        return digest

    def load(self, number: int) -> Payload:
        """Return a state whose content matches its record.

        Raises:
            CorruptFile: it is missing, incomplete or altered.
        """
        _, data = self._verified(number)
        try:
            return unpack(data)
        except FcilError as error:
            raise CorruptFile(
                f"{self.path(number)} is intact, but cannot be read: {error.message}",
                action="Use the fcil version that wrote it.",
            ) from error

    def record(self, number: int) -> StateRecord:
        """Return a state's record without reading the state.

        Raises:
            CorruptFile: there is none, or it is damaged.
        """
        path = self._record_path(number)
        if not path.exists():
            raise CorruptFile(
                f"{self.path(number)} has no record {path.name}: it was not written to its end.",
                action="Restore it from a backup, or start a new run: fcil-server serve --new-run",
            )
        with storage_errors("read", path):
            text = path.read_bytes()
        return _parse_record(path, number, text)

    def numbers(self) -> list[int]:
        """Return the numbers in the names of files, valid or not, in order."""
        with storage_errors("list the states in", self.directory):
            names = [p.name for p in self.directory.iterdir()]
        found = (_STATE_FILE.fullmatch(name) for name in names)
        return sorted({int(m[1]) for m in found if m is not None})

    def prune(self, also: Collection[int] = ()) -> list[int]:
        """Remove states that are neither among the newest, nor the last of their task, nor given.

        Files without a valid record are removed once ``keep`` valid ones are newer. Returns the
        numbers removed; a disk error postpones a removal.

        Args:
            also: further numbers to keep.
        """
        tasks: dict[int, int | None] = {}
        for number in self.numbers():
            try:
                tasks[number] = self.record(number).task
            except CorruptFile:
                tasks[number] = None
        valid = [n for n, task in tasks.items() if task is not None]
        last_of_task = {task: n for n, task in tasks.items() if task is not None}
        kept = {*valid[-self.keep :], *last_of_task.values(), *also}
        limit = valid[-self.keep] if len(valid) >= self.keep else -1
        victims = [n for n in tasks if n not in kept and n < limit]
        return [number for number in victims if self._removed(number)]

    def _removed(self, number: int) -> bool:
        try:
            # The record goes first: half a removal looks like an unfinished state, not damage.
            for path in (self._record_path(number), self.path(number)):
                path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def pair(self, number: int) -> tuple[bytes, bytes]:
        """Return the content of a state's file and of its record, verified.

        Raises:
            CorruptFile: it is missing, incomplete or altered.
        """
        record, data = self._verified(number)
        return data, _record_bytes(record)

    def copy_to(self, other: StateStore, number: int) -> None:
        """Copy a state and its record into another store, unchanged.

        Raises:
            CorruptFile: it is missing, incomplete or altered here.
            DiskFull, StorageError: it could not be written there.
        """
        data, record = self.pair(number)
        write_atomic(other.path(number), data)
        write_atomic(other._record_path(number), record)

    def discard_after(self, number: int) -> None:
        """Remove states that were saved after ``number`` but never committed to the ledger.

        A kill between the file and the ledger leaves one; its round is computed again.
        """
        for later in self.numbers():
            if later > number:
                for path in (self._record_path(later), self.path(later)):
                    with storage_errors("remove an uncommitted state", path):
                        path.unlink(missing_ok=True)

    def _record_path(self, number: int) -> Path:
        return self.directory / f"{number:06d}.json"

    def _verified(self, number: int) -> tuple[StateRecord, bytes]:
        record = self.record(number)
        path = self.path(number)
        if not path.exists():
            raise CorruptFile(f"{path} is missing.", action="Restore it from a backup.")
        with storage_errors("read", path):
            data = path.read_bytes()
        got = sha256_of(data)
        if got != record.digest:
            raise CorruptFile(
                f"{path} is damaged: expected SHA-256 {record.digest[:16]}, got {got[:16]} "
                f"({len(data)} of {record.size_bytes} bytes).",
                action="Restore it from a backup, or start a new run: fcil-server serve --new-run",
            )
        return record, data


class PartStore:
    """Sealed broadcast parts by the digest that clients ask for.

    A file is a magic word, SHA-256(digest + content), and the content: a read detects damage and
    exchanged files, independently of what the digest covers.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with storage_errors("create", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, digest: Digest) -> Path:
        """Return the path of a part."""
        assert is_digest(digest), "a part's name is a digest"
        return self.directory / f"{digest}.part"

    def put(self, digest: Digest, *data: Body) -> Path:
        """Store a part, whose bytes come in pieces; the same part may be put again.

        It survives the process, but no power cut: then `get` finds it missing or damaged, and it is
        sealed again.
        """
        path = self.path(digest)
        write_atomic(path, _PART_MAGIC + _part_hash(digest, *data), *data, sync=False)
        return path

    def get(self, digest: Digest) -> memoryview:
        """Return a part's bytes as they were put.

        Raises:
            CorruptFile: it is missing or altered; it can be sealed again from its state.
        """
        path = self.path(digest)
        if not path.exists():
            raise CorruptFile(f"the part {path} is missing.", action="It is sealed again.")
        with storage_errors("read", path):
            stored = memoryview(path.read_bytes())
        head = len(_PART_MAGIC) + _HASH_BYTES
        data = stored[head:]
        if stored[:head] != _PART_MAGIC + _part_hash(digest, data):
            raise CorruptFile(
                f"the part {path} is damaged: its content does not match its checksum.",
                action="It is sealed again.",
            )
        return data

    def __contains__(self, digest: Digest) -> bool:
        return self.path(digest).exists()

    def digests(self) -> list[Digest]:
        """Return the digests of all stored parts, sorted."""
        with storage_errors("list the parts in", self.directory):
            stems = [p.stem for p in self.directory.glob("*.part")]
        return sorted(Digest(s) for s in stems if is_digest(s))

    def keep_only(self, digests: Iterable[Digest]) -> list[Digest]:
        """Remove all parts but these; return the removed ones.

        A disk error postpones a removal.
        """
        wanted = set(digests)
        removed = []
        for digest in self.digests():
            if digest not in wanted:
                try:
                    self.path(digest).unlink(missing_ok=True)
                except OSError:
                    continue
                removed.append(digest)
        return removed


def _part_hash(digest: Digest, *data: Body) -> bytes:
    return bytes.fromhex(sha256_of(digest.encode("ascii"), *data))


def _refuse_non_finite(number: int, state: Payload) -> None:
    bad = [
        name
        for name, array in sorted(state.tensors.items())
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all())
    ]
    if bad:
        raise InternalError(
            f"state {number} would hold NaN or infinity in {', '.join(map(repr, bad[:5]))}"
            f"{' and others' if len(bad) > 5 else ''}; it was not stored.",
            action="Report it with the method and its options; the state before it stays.",
        )


def _record_bytes(record: StateRecord) -> bytes:
    return (json.dumps(asdict(record), sort_keys=True) + "\n").encode("ascii")


def _parse_record(path: Path, number: int, text: bytes) -> StateRecord:
    try:
        record = StateRecord(**json.loads(text))
        whole = (
            record.number == number
            and is_digest(record.digest)
            and (record.parent is None or is_digest(record.parent))
            and isinstance(record.task, int)
            and isinstance(record.size_bytes, int)
        )
    except (ValueError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CorruptFile(
            f"the record {path} is damaged: expected state {number} with its digest.",
            action="Restore it from a backup, or start a new run: fcil-server serve --new-run",
        )
    return record


def states_folder(directory: Path, run: RunId) -> Path:
    """Return the folder of a run's states in a federation's directory."""
    return directory / "runs" / run / "states"


def check_state(store: StateStore, state: int, digests: Mapping[int, str]) -> None:
    """Raise an error unless a state's file is the one that the ledger knows.

    Raises:
        CorruptFile: it is missing, damaged, or another state.
    """
    store.load(state)
    if store.record(state).digest != digests.get(state):
        raise CorruptFile(
            f"{store.path(state)} is an intact state, but not the one in the ledger.",
            action="Restore it from a backup.",
        )


def is_valid_state(store: StateStore, state: int, digests: Mapping[int, str]) -> bool:
    """Return True if `check_state` accepts a state."""
    try:
        check_state(store, state, digests)
    except CorruptFile:
        return False
    return True


def kept_states(ledger: Ledger, directory: Path, run: RunId) -> list[StateRow]:
    """Return the committed states of a run whose files are there and intact."""
    folder = states_folder(directory, run)
    if not folder.is_dir():
        return []
    store, rows = StateStore(folder), ledger.states.all(run)
    digests = {row.state: row.digest for row in rows}
    held = set(store.numbers())
    return [row for row in rows if row.state in held and is_valid_state(store, row.state, digests)]


def new_id(ledger: Ledger) -> RunId:
    """Draw the id of a new run."""
    run = new_run_id()
    while ledger.runs.get(run) is not None:
        run = new_run_id()
    return run
