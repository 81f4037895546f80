"""Backup format: one tar file, its manifest last, every member hashed.

::

    federation.toml   certificate   [keys.sealed]   ledger.sqlite
    runs/<id>/states/NNNNNN.safetensors and .json
    runs/<id>/kept/<update>.update
    runs/<id>/start.safetensors   the adapter that a run began with
    manifest.json     what it is, and the SHA-256 and size of every other member

A manifest at the end also proves that the file is complete. The content of a backup is used only
after a complete comparison with the manifest; names are taken from a fixed list, so nothing can be
written elsewhere, and only plain files are accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from fcil_protocol.errors import CorruptFile, UsageError
from fcil_protocol.ids import is_digest
from fcil_protocol.storage.atomic_files import storage_errors

FORMAT, VERSION = "fcil-backup", 1
MANIFEST, KEYS, CERTIFICATE = "manifest.json", "keys.sealed", "certificate"
MAX_MANIFEST_BYTES = 16 << 20
MAX_HEADER_BYTES = 4096  # of an extended header; ours hold a long name or a size
MAX_MOMENT_S = 1e11  # unix seconds, in the year 5138
_STEP_BYTES = 1 << 20
_EXTENDED = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_NAME = re.compile(
    r"federation\.toml|queue/\d{6}\.json|certificate|keys\.sealed|ledger\.sqlite|manifest\.json|"
    r"runs/r\d{8}-\d{6}-[0-9a-f]{4}/"
    r"(states/\d{6,12}\.(safetensors|json)|kept/[0-9a-f]{64}\.update|start\.safetensors)"
)


@dataclass(frozen=True)
class ArchiveEntry:
    """One member of a backup, as named in the manifest."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class BackupManifest:
    """Description of a backup, stored in it.

    Attributes:
        fcil: version of the package that wrote it.
        created_at: unix seconds.
        federation: its id. name: its readable name.
        run, state: the newest run and its state; None before the first.
        keys: True if it contains the server's keys, under a passphrase.
        files: every other member.
    """

    fcil: str
    created_at: float
    federation: str
    name: str
    run: str | None
    state: int | None
    keys: bool
    files: dict[str, ArchiveEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Encode as JSON."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(fields, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> BackupManifest:
        """Parse a manifest.

        Raises:
            CorruptFile: it is not one.
            UsageError: it is of a later version.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            form, version = fields.pop("format"), fields.pop("version")
            files = {str(n): ArchiveEntry(**e) for n, e in fields.pop("files").items()}
            known = {k: v for k, v in fields.items() if k in cls.__dataclass_fields__}
            manifest = cls(**known, files=files)
            whole = form == FORMAT and manifest._is_plain()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            whole, version = False, VERSION
        if not whole:
            raise CorruptFile(f"{path} is not an fcil backup: its {MANIFEST} is damaged.")
        if version != VERSION:
            raise UsageError(
                f"{path} is a backup of format {version}; this fcil reads format {VERSION}.",
                action=f"Install fcil {fields.get('fcil', '')}.",
            )
        return manifest

    def _is_plain(self) -> bool:
        """Return True if every field has its type, and can be printed."""
        texts = (self.fcil, self.federation, self.name, self.run or "")
        return (
            all(isinstance(text, str) for text in texts)
            and self.federation.isascii()
            and self.federation.isprintable()
            and type(self.created_at) in (int, float)
            and 0 <= self.created_at < MAX_MOMENT_S  # false for NaN
            and (self.state is None or type(self.state) is int)
            and isinstance(self.keys, bool)
            and all(is_digest(e.sha256) and type(e.size_bytes) is int for e in self.files.values())
        )


class ArchiveWriter:
    """Writes members into an open file; `finish` adds the manifest."""

    def __init__(self, file: BinaryIO, created_at: float) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._created_at = created_at
        self.files: dict[str, ArchiveEntry] = {}

    def add(self, name: str, data: bytes) -> None:
        """Add a member."""
        self._put(name, io.BytesIO(data), len(data))
        self.files[name] = ArchiveEntry(hashlib.sha256(data).hexdigest(), len(data))

    def add_file(self, name: str, path: Path) -> None:
        """Add a file of any size, which must not change meanwhile."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
            self._put(name, file, size)
        self.files[name] = ArchiveEntry(digest, size)

    def _put(self, name: str, file: BinaryIO, size: int) -> None:
        assert _NAME.fullmatch(name), "restore would refuse it"
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = size, 0o600, int(self._created_at)
        self._tar.addfile(member, file)

    def finish(self, manifest: BackupManifest) -> None:
        """Write the manifest and the end of the archive."""
        data = manifest.to_bytes()
        self._put(MANIFEST, io.BytesIO(data), len(data))
        self._tar.close()


def verify(path: Path) -> BackupManifest:
    """Read a complete backup and compare every member with its manifest.

    Raises:
        CorruptFile: it is damaged, incomplete, or has an unknown member.
        UsageError: it is of a later version.
        StorageError: it cannot be read.
    """
    with _errors(path):
        manifest, found = _read(path)
    if manifest is None:
        raise CorruptFile(f"{path} is not a complete fcil backup: it ends without a {MANIFEST}.")
    wrong = sorted(n for n in {*found, *manifest.files} if found.get(n) != manifest.files.get(n))
    if wrong:
        raise CorruptFile(
            f"{path} is damaged: {', '.join(wrong[:5])} "
            f"{'differs' if len(wrong) == 1 else 'differ'} from its {MANIFEST}.",
            action="Use another backup; nothing was written.",
        )
    return manifest


def _read(path: Path) -> tuple[BackupManifest | None, dict[str, ArchiveEntry]]:
    """Return the manifest, if there is one, and the real digests and sizes of other members."""
    found: dict[str, ArchiveEntry] = {}
    manifest: BackupManifest | None = None
    for name, member in _members(path):
        if manifest is not None or name in found:
            raise CorruptFile(f"{path} holds {name!r} twice, or after its end.")
        if name == MANIFEST:
            manifest = BackupManifest.from_bytes(member.read(), path)
            continue
        digest = hashlib.sha256()
        size = 0
        while piece := member.read(_STEP_BYTES):
            digest.update(piece)
            size += len(piece)
        found[name] = ArchiveEntry(digest.hexdigest(), size)
    return manifest, found


def unpack_into(path: Path, manifest: BackupManifest, directory: Path) -> None:
    """Write the members of a verified backup under a directory, all 0600.

    Raises:
        CorruptFile: the file changed since it was verified.
        DiskFull, StorageError.
    """
    with _errors(path):
        for name, member in _members(path):
            if name != MANIFEST:
                digest = _write(member, directory, name)
                entry = manifest.files.get(name)
                if entry is None or entry.sha256 != digest:
                    raise CorruptFile(f"{path} has changed while it was read ({name}).")


def _write(member: IO[bytes], directory: Path, name: str) -> str:
    """Write one member; return its SHA-256."""
    target, digest = directory / name, hashlib.sha256()
    with storage_errors("write", target):
        for folder in reversed(Path(name).parents):
            (directory / folder).mkdir(mode=0o700, exist_ok=True)
        with open(target, "xb", opener=_private) as file:
            while piece := member.read(_STEP_BYTES):
                digest.update(piece)
                file.write(piece)
    return digest.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    with storage_errors("read", path):
        try:
            yield
        # The library lets those of its own parts through for some headers.
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptFile(
                f"{path} is not an fcil backup, or is damaged: {error}.",
                action="Use another backup; nothing was written.",
            ) from error


class _BoundedHeader(tarfile.TarInfo):
    """A header of which the library, which reads extended ones at once, gets only short ones.

    These are its own methods: newer Pythons read a block without `frombuf`, all end up here.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """Process a block that was read.

        Raises:
            tarfile.ReadError: it announces a long extended header, or a map of holes.
        """
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_holes()
        if self.type in _EXTENDED and not 0 <= self.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header in it has {self.size} bytes, expected at most {MAX_HEADER_BYTES}"
            )
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]

    def _refuse_holes(self, *_args: object) -> None:
        """Refuse a sparse file, whose map may be as long as the archive."""
        raise tarfile.ReadError("a file in it is sparse")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_holes


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each member in order; unknown members are refused.

    Raises:
        CorruptFile: it has an unknown member.
        OSError, tarfile.TarError: it cannot be read.
    """
    size = path.stat().st_size
    with tarfile.open(path, "r:", tarinfo=_BoundedHeader) as tar:
        for member in tar:
            _check(path, member, size)
            content = tar.extractfile(member)
            assert content is not None, "it is a plain file"
            yield member.name, content


def _check(path: Path, member: tarfile.TarInfo, size: int) -> None:
    limit = MAX_MANIFEST_BYTES if member.name == MANIFEST else size
    plain = member.type == tarfile.REGTYPE and not member.issparse()
    ours = plain and _NAME.fullmatch(member.name)
    if ours and member.size > limit:
        raise CorruptFile(
            f"{path} is cut off or damaged: {member.name} in it would have {member.size} bytes, "
            f"and {'that is too many' if limit < size else f'the file has {size}'}.",
            action="Use another backup; nothing was written.",
        )
    if not ours:
        raise CorruptFile(
            f"{path} holds {member.name[:100]!r} ({member.size} bytes), which no backup holds.",
            action="Use another backup; nothing was written.",
        )
