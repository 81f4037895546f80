"""A relay's cache: sealed chunks of broadcast parts, one file each, the least used removed.

It keeps the bytes that crossed the wire; without the content key, which a relay never has, they
reveal nothing. It gives out a chunk only if its hash is the one in the part's signed header, so an
altered or half-written file counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import OrderedDict
from pathlib import Path

from fcil_protocol.storage.atomic_files import storage_errors

_FILE = re.compile(r"([0-9a-f]{64})\.([0-9]{1,9})")
_Name = tuple[str, int]


class Cache:
    """The chunks in one directory.

    Args:
        directory: created if missing; other files in it are left alone.
        limit_bytes: most that it holds.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit = limit_bytes
        self._sizes: OrderedDict[_Name, int] = OrderedDict()  # the least recently used first
        self.bytes = 0
        with storage_errors("create", directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = [(p.stat().st_mtime, p) for p in directory.iterdir() if p.is_file()]
        for _, path in sorted(found):
            match = _FILE.fullmatch(path.name)
            if match:
                self._add((match[1], int(match[2])), path.stat().st_size)

    def __len__(self) -> int:
        return len(self._sizes)

    def get(self, digest: str, index: int, expected: bytes) -> bytes | None:
        """Return a chunk whose SHA-256 is ``expected``; None if there is none."""
        name = (digest, index)
        if name not in self._sizes:
            return None
        path = self._path(name)
        data = b""
        try:
            data = path.read_bytes()
            os.utime(path)  # after a restart, file times give the order of use
        except FileNotFoundError:
            pass  # somebody has removed it
        except OSError:
            return None  # too many open files, for example: the file may be whole
        if hashlib.sha256(data).digest() != expected:
            self._remove(name)
            return None
        self._sizes.move_to_end(name)
        return data

    def put(self, digest: str, index: int, data: bytes) -> None:
        """Keep a chunk. A full or broken disk keeps none, which only costs bytes."""
        name = (digest, index)
        if name in self._sizes or len(data) > self._limit:
            return
        path = self._path(name)
        # No sync: the hash reveals a file that a crash left half written.
        temporary = path.with_name(f".{path.name}.{os.getpid()}-00000000.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._add(name, len(data))

    def _add(self, name: _Name, size: int) -> None:
        self._sizes[name] = size
        self.bytes += size
        while self.bytes > self._limit:
            self._remove(next(iter(self._sizes)))

    def _remove(self, name: _Name) -> None:
        self.bytes -= self._sizes.pop(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: _Name) -> Path:
        return self._directory / f"{name[0]}.{name[1]}"
