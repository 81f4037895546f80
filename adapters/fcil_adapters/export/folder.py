"""Folders of exports: complete or not at all, and never in the place of anything else (torch-free).

A folder replaces an earlier one of the same kind by two renames. A kill between them leaves none;
the earlier one is then next to it, under a hidden name, until the next export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fcil_protocol.errors import DataError
from fcil_protocol.storage.atomic_files import scratch, storage_errors, sync_directory


def check_folder(target: Path, files: Sequence[str], option: str) -> None:
    """Refuse a path at which no folder of an export can be written, before any work.

    Args:
        target: of the folder; it may be missing, empty, or of an earlier export.
        files: the names that the export writes; the first is one that nothing else writes.
        option: of the command, for the message.

    Raises:
        DataError: it is something else, or the folder that it would be in is missing.
    """
    action = f"Give the path of a folder that is not there yet: {option} FOLDER"
    try:
        free = target.resolve().parent.is_dir() and not target.is_symlink()
        free = free and (target.is_dir() or not target.exists())
        found = {p.name for p in target.iterdir()} if target.is_dir() else set()
    except OSError:  # too long a name, or one that this user may not see
        free, found = False, set()
    others = sorted(found - set(files))
    if not free:
        raise DataError(
            f"{str(target)[:200]} cannot be written: expected a folder, in one that exists.",
            action=action,
        )
    if others or (found and files[0] not in found):
        why = f"holds {others[0][:100]!r}" if others else f"lacks {files[0]!r}"
        raise DataError(
            f"{str(target)[:200]} {why}, so it is no earlier export; expected one, or an empty "
            "folder.",
            action=action,
        )


@contextmanager
def place_folder(target: Path, files: Sequence[str]) -> Iterator[Path]:
    """Provide an empty folder that gets the name ``target`` at the end, unless the block fails.

    Args:
        target: `check_folder` has passed it; a folder that is there stays until then.
        files: the names that the export writes.

    Raises:
        DiskFull, StorageError: it cannot be written; what was there is there.
    """
    place = target.resolve()
    with scratch(place.parent, place.name) as name:
        made, old = name("new"), name("old")
        with storage_errors("create", target):
            made.mkdir(mode=0o755)
        yield made
        sync_directory(made)
        check_folder(target, files, "")  # it may have changed since
        with storage_errors("write", target):
            if place.exists():
                place.rename(old)
            try:
                made.rename(place)
            except OSError:
                if old.exists():
                    old.rename(place)
                raise
            sync_directory(place.parent)
