"""Exports that a program asked for: a folder each in ``exports/``, with a record and the result.

::

    exports/ID/record.json   what was asked for, and what became of it
    exports/ID/...           the result, once it is complete
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import TypeAdapter

from fcil_protocol.storage.atomic_files import make_private, storage_errors, write_atomic

FOLDER = "exports"  # in the federation's directory
RECORD = "record.json"
KEPT = 5  # newest exports; older ones are removed
# Format -> name of the result; folders become archives.
FORMATS: Mapping[str, str] = MappingProxyType({
    "onnx": "model.onnx",
    "peft": "adapter.zip",
    "timm": "timm.zip",
    "statistics": "statistics.safetensors",
    "mlflow": "mlflow.zip",
})  # fmt: skip
FOLDERS = frozenset({"peft", "timm", "mlflow"})

_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class ExportRecord:
    """One export.

    Attributes:
        id: 16 hexadecimal digits.
        run, state, format: what was asked for.
        by: who asked.
        started_at, ended_at: seconds since 1970.
        name, bytes: of the result; None before it is complete.
        error: ``code``, ``message`` and ``action`` of a failed one.
    """

    id: str
    run: str
    state: str
    format: str
    by: str
    status: Literal["running", "done", "failed"]
    started_at: float
    ended_at: float | None = None
    name: str | None = None
    bytes: int | None = None
    error: dict[str, str] | None = None

    def folder(self, directory: Path) -> Path:
        """Return its folder in a federation's directory."""
        return directory / FOLDER / self.id

    def save(self, directory: Path) -> None:
        """Write the record, atomically.

        Raises:
            DiskFull, StorageError: it cannot be written.
        """
        folder = self.folder(directory)
        with storage_errors("create", folder):
            make_private(folder.parent)
            make_private(folder)
        write_atomic(folder / RECORD, json.dumps(asdict(self)).encode())


_RECORD = TypeAdapter(ExportRecord)


def all_records(directory: Path) -> list[ExportRecord]:
    """Return the exports of a federation, oldest first; damaged records are left out."""
    folder = directory / FOLDER
    if not folder.is_dir():
        return []
    found = [record for path in folder.iterdir() if (record := _read(path))]
    return sorted(found, key=lambda record: (record.started_at, record.id))


def find_record(directory: Path, name: str) -> ExportRecord | None:
    """Return an export by its id."""
    return _read(directory / FOLDER / name) if _ID.fullmatch(name) else None


def remove_older(directory: Path, *, keep: str = "") -> None:
    """Remove all but the newest exports, and what a kill has left.

    Args:
        directory: the federation's.
        keep: id of an export that counts as the newest, even if the clock was set back.

    Raises:
        StorageError: something cannot be removed.
    """
    folder = directory / FOLDER
    if not folder.is_dir():
        return
    by_age = sorted((r.id for r in all_records(directory)), key=keep.__eq__)  # stable
    kept = set(by_age[-KEPT:])
    for path in folder.iterdir():
        if path.name not in kept:
            with storage_errors("remove", path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _read(folder: Path) -> ExportRecord | None:
    try:
        record = _RECORD.validate_json((folder / RECORD).read_bytes())
    except (OSError, ValueError):  # also of a value of another type
        return None
    return record if record.id == folder.name and _ID.fullmatch(record.id) else None
