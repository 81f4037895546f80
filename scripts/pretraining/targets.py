"""A teacher's features of many pictures, computed once: a folder of arrays.

    pictures.npy  (N, S, S, 3) uint8, decoded for the student
    sources.npy   (N, 32) uint8, the SHA-256 of each picture's file
    plan.json     teacher, sizes and classes; written when the two above are whole
    targets.npy   (N, 1 or 2, D) float16, the features of each picture and of the mirrored one;
                  grows by one chunk at a time
    digest.txt    SHA-256 over plan, pictures and targets; written when these are whole

So a kill at any time leaves a folder in which the same call continues, with the same result: the
last chunk is computed again, since a power cut may have left a part of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import digest
from fcil_adapters.images.image_source import ImageEntry, ImageSource
from fcil_adapters.images.sources import open_source
from fcil_protocol.errors import ConfigError, CorruptFile, DataError, RunFailed
from fcil_protocol.storage.atomic_files import scratch, storage_errors, sync_data, write_atomic
from pretraining.pictures import Pictures, check_disjoint, entries_of, plain, square_of
from pretraining.training import Sitting

_PICTURES, _SOURCES, _PLAN = "pictures.npy", "sources.npy", "plan.json"
_TARGETS, _WHOLE = "targets.npy", "digest.txt"
_FORMAT = "fcil targets 1"
CHUNK = 64  # pictures of a pass: where it begins and ends changes the last bits, so this is fixed
_AGAIN = "Remove the folder and compute them again: scripts/pretrain targets."


@dataclass(frozen=True)
class Plan:
    """Everything that decides the targets beside the pictures' content.

    Attributes:
        teacher: name, image size and digest of the backbone.
        dim: D, the width of its feature.
        size: S, the side of the student's pictures.
        mirror: the features of the mirrored pictures are there too.
        classes: name and number of pictures, in their order; a name may be there for each source.
    """

    teacher: str
    dim: int
    size: int
    mirror: bool
    classes: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        return sum(number for _, number in self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the targets."""
        return (self.count, 2 if self.mirror else 1, self.dim)

    def to_bytes(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode()

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read a folder's plan.

        Raises:
            CorruptFile: it is damaged, or something else.
        """
        try:
            found = json.loads((folder / _PLAN).read_bytes())
            if found.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            found["classes"] = tuple((name, number) for name, number in found["classes"])
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder / _PLAN, error) from error


class _Collection:
    """The training pictures of several sources, by source, class and name."""

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self._rows: list[tuple[ImageSource, ImageEntry]] = []
        for path in paths:
            source = open_source(path)
            stack.callback(source.close)
            self._rows += [(source, entry) for entry in entries_of(source, "train")]
        if not self._rows:
            raise DataError(f"{', '.join(map(str, paths))}: there are no training pictures.")
        self.digests = np.empty((len(self._rows), 32), np.uint8)  # `read_digests`

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def classes(self) -> tuple[tuple[str, int], ...]:
        groups = itertools.groupby(self._rows, lambda row: (id(row[0]), row[1].class_name))
        return tuple((name, len(list(rows))) for (_, name), rows in groups)

    def read_digests(self, how: Sitting) -> None:
        for row in how.progress(range(len(self)), "files read"):
            source, entry = self._rows[row]
            self.digests[row] = _sha256(source.read(entry))

    def square(self, row: int, prepared: Preprocessing) -> NDArray[np.uint8]:
        """Return a picture (S, S, 3).

        Raises:
            DataError: it is damaged, or another one than before.
        """
        source, entry = self._rows[row]
        data = source.read(entry)
        if not np.array_equal(_sha256(data), self.digests[row]):
            raise DataError(
                f"{source.path}, picture {entry.name!r}: it has changed since this began.",
                action="Leave the pictures alone until the end, and start again.",
            )
        return square_of(source, entry, data, prepared)

    def named(self, row: int) -> str:
        return repr(self._rows[row][1].name)


def compute(
    paths: Sequence[Path],
    teacher: Backbone,
    *,
    size: int,
    mirror: bool,
    how: Sitting,
    allow_overlap: bool = False,
) -> Plan:
    """Compute the targets of the training pictures of folders and zips, or the rest of them.

    Args:
        paths: of the sources; without parts all of their pictures are for training.
        size: side of the student's pictures.
        mirror: compute the features of the mirrored pictures too.
        how: its folder exists and is locked.
        allow_overlap: with classes of CIFAR-100 (`check_disjoint`).

    Raises:
        ConfigError: the folder has targets of another teacher, or with other options.
        DataError: a source cannot be read, a picture is damaged, or they are other pictures than
            those that the folder was begun with.
        RunFailed: a feature is no number of half precision.
        StorageError: the folder cannot be written.
    """
    folder = how.folder
    with ExitStack() as stack:
        found = _Collection(paths, stack)
        check_disjoint(tuple(name for name, _ in found.classes), allowed=allow_overlap)
        info = teacher.info
        plan = Plan(
            f"{info.name} at {info.preprocessing.size} px, digest {info.digest}",
            info.dim, size, mirror, found.classes,
        )  # fmt: skip
        if (folder / _PLAN).exists():
            kept = Plan.read(folder)
            _refuse_options(folder, kept, plan)
            found.read_digests(how)
            _refuse_pictures(folder, found)
            plan = kept  # the same pictures may lie in other classes by now
        else:
            found.read_digests(how)
            _write_pictures(folder, found, plan, how)
        if not (folder / _WHOLE).exists():
            _write_targets(folder, found, plan, teacher, how)
            write_atomic(folder / _WHOLE, _digest(folder).encode())
    return plan


def _refuse_options(folder: Path, kept: Plan, wanted: Plan) -> None:
    old, new = asdict(kept), asdict(wanted)
    other = [
        f"{name} {old[name]} (asked for: {new[name]})"
        for name in ("teacher", "size", "mirror")
        if old[name] != new[name]
    ]
    if other:
        raise ConfigError(
            f"{folder} has targets with {', '.join(other)}.",
            action="Give the options with which they were begun, or choose another folder.",
        )


def _refuse_pictures(folder: Path, found: _Collection) -> None:
    kept = _mapped(folder, _SOURCES)
    action = "Restore the pictures, or choose another folder."
    if len(kept) != len(found):
        raise DataError(
            f"{folder} was begun with {len(kept):,} pictures, there are {len(found):,}.",
            action=action,
        )
    changed = np.flatnonzero((kept != found.digests).any(1))
    if len(changed):
        raise DataError(
            f"{len(changed):,} of {len(found):,} pictures are not those that {folder} was begun "
            f"with, the first is {found.named(changed[0])}.",
            action=action,
        )


def _write_pictures(folder: Path, found: _Collection, plan: Plan, how: Sitting) -> None:
    prepared = plain(plan.size)
    with scratch(folder, "targets") as name:
        path = name("pictures")
        with storage_errors("write", path), path.open("wb") as file:
            file.write(_header((len(found), plan.size, plan.size, 3), np.uint8))
            for row in how.progress(range(len(found)), "pictures decoded"):
                file.write(found.square(row, prepared).tobytes())
            file.flush()
            sync_data(file.fileno())
            path.replace(folder / _PICTURES)
    digests = found.digests
    write_atomic(folder / _SOURCES, _header(digests.shape, np.uint8), digests.tobytes())
    # Targets of a folder without plan are of a run that was removed in part.
    (folder / _TARGETS).unlink(missing_ok=True)
    (folder / _WHOLE).unlink(missing_ok=True)
    write_atomic(folder / _PLAN, plan.to_bytes())


def _write_targets(
    folder: Path, found: _Collection, plan: Plan, teacher: Backbone, how: Sitting
) -> None:
    path = folder / _TARGETS
    header = _header(plan.shape, np.float16)
    # The whole picture, as the student has it, and not the centre for which the teacher is made.
    prepared = replace(teacher.info.preprocessing, crop_pct=1.0)
    with storage_errors("write", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with open(fd, "r+b") as file:  # noqa: PTH123
            first = _chunks_kept(os.fstat(fd).st_size - len(header), plan) * CHUNK
            file.write(header)
            for start in how.progress(range(first, plan.count, CHUNK), "targets"):
                rows = range(start, min(start + CHUNK, plan.count))
                pictures = np.stack([found.square(row, prepared) for row in rows])
                file.seek(len(header) + start * _row_bytes(plan))
                file.write(_features(teacher, pictures, mirror=plan.mirror).tobytes())
                file.flush()
                sync_data(fd)


def _chunks_kept(size: int, plan: Plan) -> int:
    return max(0, size // (_row_bytes(plan) * CHUNK) - 1)


def _row_bytes(plan: Plan) -> int:
    return 2 * plan.shape[1] * plan.dim


def _features(
    teacher: Backbone, pictures: NDArray[np.uint8], *, mirror: bool
) -> NDArray[np.float16]:
    sides = [pictures, np.ascontiguousarray(pictures[:, :, ::-1])] if mirror else [pictures]
    with np.errstate(over="ignore"):
        seen = np.stack([teacher.features(side) for side in sides], 1).astype(np.float16)
    if not np.isfinite(seen).all():
        raise RunFailed(
            f"a feature of {teacher.info.name} is no number of half precision.",
            action="Choose another teacher.",
        )
    return seen


def read_targets(folder: Path) -> Pictures:
    """Return the pictures and targets of a folder, mapped.

    Raises:
        DataError: there are none, or they are not complete.
        CorruptFile: they are damaged.
    """
    if not (folder / _PLAN).is_file():
        raise DataError(
            f"there are no targets in {folder}.", action="Compute them: scripts/pretrain targets."
        )
    if not (folder / _WHOLE).is_file():
        raise DataError(
            f"the targets in {folder} are not complete.",
            action="Call scripts/pretrain targets again as before.",
        )
    plan = Plan.read(folder)
    whole = _digest(folder)
    if whole.encode() != (folder / _WHOLE).read_bytes():
        raise _damaged(folder, "its digest is another one")
    names = tuple(sorted({name for name, _ in plan.classes}))
    labels = np.repeat(
        np.array([names.index(name) for name, _ in plan.classes], np.int64),
        [number for _, number in plan.classes],
    )
    sides = ", plain and mirrored" if plan.mirror else ""
    return Pictures(
        _mapped(folder, _PICTURES), labels, names, whole,
        _mapped(folder, _TARGETS), plan.teacher + sides,
    )  # fmt: skip


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for name in (_PLAN, _PICTURES, _TARGETS):
        with storage_errors("read", folder / name), (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _mapped(folder: Path, name: str) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise _damaged(folder / name, error) from error
    return found


def _damaged(path: Path, why: object) -> CorruptFile:
    return CorruptFile(f"{path} cannot be used ({str(why)[:160]}).", action=_AGAIN)


def _header(shape: tuple[int, ...], dtype: type) -> bytes:
    out = BytesIO()
    np.lib.format.write_array_header_1_0(
        out,
        {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False,
         "shape": shape},
    )  # fmt: skip
    return out.getvalue()


def _sha256(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(digest(data), np.uint8)
