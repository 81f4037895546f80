"""A list of image paths and labels, as CSV or JSON lines; the images stay where they are.

The first line of a CSV names the columns: ``path`` (or ``file_name``, as in the ``metadata.csv`` of
Hugging Face), ``label`` and, if the sides are given, ``split`` (train or test). Others are ignored.
Paths are relative to the list's folder, and lead out of it only where they are written as absolute.
"""

from __future__ import annotations

import csv
import io
import json
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
OBJECT = 'Write one object in each line, such as {"path": "a.jpg", "label": "cat"}'
_PATH, _HUB_PATH = "path", "file_name"
# Hugging Face's lists of the images in a folder; they need not hold labels.
_HUB_LISTS = ("metadata.csv", "metadata.jsonl")
_FIRST_BYTES = 64 << 10  # of a list, where its columns are
_SIDES: dict[str, SourcePart] = {"train": "train", "test": "test"}


class _Unusable(Exception):
    """Why a line is left out."""


def is_hub_list(path: Path) -> bool:
    """Return True if a file is a list of Hugging Face's form, with labels."""
    if path.name not in _HUB_LISTS:
        return False
    try:
        if not path.is_file():  # a pipe never ends
            return False
        with path.open("rb") as file:
            first = file.readline(_FIRST_BYTES).decode("utf-8-sig", errors="replace")
        if path.suffix == ".csv":
            columns = [name.strip().lower() for name in next(csv.reader([first]), [])]
        else:
            columns = list(json.loads(first))
    except (OSError, ValueError, TypeError, RecursionError, csv.Error):
        return False  # the folder's images are read without it
    return _HUB_PATH in columns and "label" in columns


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
        text = row[_PATH].strip()
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
            names = [name.strip().lower() for name in next(reader, [])]
            renames = {} if _PATH in names else {_HUB_PATH: _PATH}
            header = [renames.get(name, name) for name in names]
            if header.count(_PATH) != 1 or header.count("label") != 1 or header.count("split") > 1:
                raise DataError(
                    f"{self.path} line 1 must name the columns path and label once, and may name "
                    f"split; got {','.join(names)[:120] or 'nothing'!r}.",
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


class JsonListSource(ListSource):
    """Images that a file of JSON lines names."""

    form = "JSON list"

    def _rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the number of each line with its fields; a label that is no text or number is "".

        The text is UTF-8, so a line ends with a line feed and nowhere else.
        """
        for number, line in enumerate(self._data().decode("utf-8-sig").split("\n"), 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{self.path} line {number} cannot be read as JSON ({error}).", action=OBJECT
                ) from error
            path = next(
                (k for k in (_PATH, _HUB_PATH) if isinstance(fields, dict) and k in fields), ""
            )
            if not path or "label" not in fields:
                raise DataError(
                    f"{self.path} line {number} must be an object with path (or file_name) and "
                    f"label, got {line.strip()[:80]!r}.",
                    action=OBJECT,
                )
            row = {_PATH: fields[path], "label": fields["label"]}
            row |= {"split": fields["split"]} if "split" in fields else {}
            yield number, {name: _text(value) for name, value in row.items()}


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
