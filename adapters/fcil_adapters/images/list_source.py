"""A CSV of image paths and labels; the images stay where they are.

The first line names the columns: ``path``, ``label`` and, if the sides are given, ``split`` (train
or test). Others are ignored. Paths are relative to the CSV's folder, and lead out of it only where
they are written as absolute.
"""

from __future__ import annotations

import csv
import io
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from fcil_adapters.images.image_source import (
    MAX_FILE_BYTES,
    ImageEntry,
    ImageSource,
    LeftOut,
    Listing,
    SourcePart,
    labelled,
    oversize,
    read_file,
    same_file,
)
from fcil_protocol.errors import DataError

MAX_LIST_BYTES = MAX_FILE_BYTES  # some three million lines
HEADER = "Begin it with the line: path,label   or: path,label,split"
_SIDES: dict[str, SourcePart] = {"train": "train", "test": "test"}


class _Unusable(Exception):
    """Why a line is left out."""


class ListSource(ImageSource):
    """Images that a CSV names."""

    form = "CSV list"

    def listing(self) -> Listing:
        """List the images that the CSV names now; a line that names none is a fault."""
        left, faults = LeftOut(), list[str]()
        entries: dict[str, ImageEntry] = {}
        lines: dict[str, int] = {}  # of the entries
        for number, row in self._rows():
            try:
                entry = self._entry(row)
                if too_large := oversize(entry.name, entry.size):
                    faults.append(too_large)
                    continue
                first = entries.setdefault(entry.name, entry)
                if first is not entry:
                    same = first.class_name == entry.class_name
                    raise _Unusable(
                        "an earlier line has its path"
                        if same
                        else "an earlier line has its path with another label"
                    )
                lines[entry.name] = number
            except _Unusable as reason:
                left.add(f"line {number} of {self.path.name}", str(reason))
        return labelled(
            entries.values(),
            [*left.sentences(), *faults],
            self.path,
            lambda entry: f"line {lines[entry.name]} of {self.path.name}",
        )

    def read(self, entry: ImageEntry) -> bytes:
        """Return a file's bytes."""
        return read_file(self._place(entry.name), entry.name)

    def unchanged(self, entry: ImageEntry) -> bool:
        """Compare size and modification time."""
        return same_file(self._place(entry.name), entry.size, entry.stamp)

    def _place(self, name: str) -> Path:
        return self.path.parent / name  # an absolute name is its own place

    def _entry(self, row: dict[str, str]) -> ImageEntry:
        text = row["path"].strip()
        path = PurePosixPath(text)
        if not text or path == PurePosixPath():
            raise _Unusable("its path is empty")
        if not path.is_absolute() and ".." in path.parts:
            raise _Unusable(
                "its path leads out of the folder of the list; only an absolute path may"
            )
        side = row.get("split")
        if side is not None and side.strip() not in _SIDES:
            raise _Unusable(f"its split is {side.strip()[:40]!r}, neither train nor test")
        try:
            status = self._place(str(path)).stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise _Unusable(f"its image cannot be read ({reason})") from error
        if not stat.S_ISREG(status.st_mode):  # a pipe never ends
            raise _Unusable("its path is no file")
        part = None if side is None else _SIDES[side.strip()]
        return ImageEntry(str(path), row["label"], part, status.st_size, status.st_mtime_ns)

    # --- text -------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the number of each line below the header with its fields by column."""
        text = io.TextIOWrapper(io.BytesIO(self._data()), encoding="utf-8-sig", newline="")
        reader = csv.reader(text, strict=True)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            if header.count("path") != 1 or header.count("label") != 1 or header.count("split") > 1:
                raise DataError(
                    f"{self.path} line 1 must name the columns path and label once, and may name "
                    f"split; got {','.join(header)[:120] or 'nothing'!r}.",
                    action=HEADER,
                )
            for row in reader:
                if row and len(row) != len(header):
                    raise DataError(
                        f"{self.path} line {reader.line_num} must have {len(header)} fields, as "
                        f"the header has; got {len(row)}.",
                        action='Put a path or label with a comma into quotes: "a, b.jpg",cat',
                    )
                if row:
                    yield reader.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise DataError(
                f"{self.path} line {reader.line_num} cannot be read as CSV ({error}).",
                action="Correct it: quotes are closed, and a quote within quotes is doubled.",
            ) from error

    def _data(self) -> bytes:
        """Return the list's bytes, which are text in UTF-8."""
        try:
            if self.path.stat().st_size > MAX_LIST_BYTES:
                raise DataError(
                    f"{self.path} has more than {MAX_LIST_BYTES >> 20} MiB.",
                    action="Divide it into lists of fewer lines.",
                )
            data = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror}).") from error
        try:
            data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{self.path} line {line} is not text in UTF-8.", action="Save the list as UTF-8."
            ) from error
        return data
