"""Folders of exports: complete or not at all, and never in the place of anything else (torch-free).

A folder replaces an earlier one of the same kind by two renames. A kill between them leaves none;
the earlier one is then next to it, under a hidden name, until the next export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fcil_adapters.contract import Context, Method, Predictor, Preprocessing
from fcil_adapters.export.exported_model import (
    BackboneName,
    Checked,
    LearningFacts,
    Origin,
    RunExport,
    origin_fields,
)
from fcil_protocol.errors import DataError
from fcil_protocol.formats import format_bytes
from fcil_protocol.storage.atomic_files import scratch, storage_errors, sync_directory, write_atomic

ABOUT = "fcil.json"
CARD = "README.md"

MLFLOW_DATA = "model.onnx"
MLFLOW_FILES = (ABOUT, "MLmodel", MLFLOW_DATA, "python_env.yaml", "requirements.txt")

Scores = Literal["same", "shifted", "scaled", "none"]


class FolderInfo(RunExport):
    """Description of a model in a folder, `ABOUT` in it; without a head it has classes too.

    Attributes:
        scores: what the head's outputs are: ``same``, ``shifted`` or ``scaled``
            (`heads.scorer.LinearLayer`), or ``none`` without a head.
        checked: result of the comparison with the torch model; ``provider`` is the library.
        learned: None: the exporting side does not know it.
        created: ISO 8601, UTC.
    """

    format: int = 1
    preprocessing: Preprocessing
    backbone: BackboneName
    scores: Scores
    checked: Checked
    learned: LearningFacts | None = None
    created: str


def common_fields(
    method: Method, ctx: Context, predictor: Predictor, origin: Origin, scores: Scores
) -> dict[str, Any]:
    """Return the fields of a `FolderInfo`, without the result of the comparison."""
    fields = origin_fields(method, ctx, predictor.classes, origin)
    return {**fields, "scores": scores, "learned": origin.learned}


def write_description(folder: Path, info: FolderInfo, card: str) -> None:
    """Write `ABOUT` and `CARD`."""
    about = json.dumps(info.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    write_atomic(folder / ABOUT, about.encode(), mode=0o644)
    write_atomic(folder / CARD, card.encode(), mode=0o644)


def learned_facts(info: FolderInfo) -> tuple[str, ...]:
    """Return sentences about data, accuracy and bytes for a model card; none if unknown."""
    known = info.learned
    if known is None:
        return ()
    data = (
        f"Data: {known.images} training images of {known.clients} clients, which stayed on their "
        f"devices; {known.rounds} rounds."
    )
    tested = "Accuracy: this state is not tested."
    if known.accuracy is not None:
        whose = "the clients" if known.tester == "clients" else "the server"
        tested = (
            f"Accuracy: {known.accuracy:.2f} % of {known.tested} test images of {whose}, over all "
            "classes seen, without a task id."
        )
    up, down = format_bytes(known.up_bytes), format_bytes(known.down_bytes)
    return data, tested, f"Traffic: {up} from the clients and {down} to them, as TCP payload."


def checked_fact(checked: Checked) -> str:
    """Return the result of the comparison as a sentence for a model card."""
    return (
        f"Loaded by {checked.provider}, its results on {checked.images} images differ from the "
        f"federation's model by at most {checked.error:.1e} of their spread."
    )


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
