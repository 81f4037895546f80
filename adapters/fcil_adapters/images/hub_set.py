"""A data set of Hugging Face, written once as shards, through the library ``datasets``.

Only this step needs the library and the network. It reads Parquet files and nothing else: no
program of the data set, and none of the formats that are pickle inside.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fcil_adapters.images.image_source import suffix_of
from fcil_protocol.errors import DataError

OLDEST = 4  # of `datasets`: earlier ones could run a program of the data set
SHARD_BYTES = 256 << 20
HUB = "hf://datasets/"  # before the path of a file on the hub
READER = "datasets.packaged_modules.parquet.parquet"
IMAGES = ("image", "img")
LABELS = ("label", "fine_label", "labels")
CONVERTED = "refs/convert/parquet"  # where Hugging Face keeps data sets of other formats as Parquet


@dataclass(frozen=True)
class HubSet:
    """A data set of Hugging Face at one revision; the config is needed where it has several."""

    repository: str
    config: str | None
    revision: str

    @property
    def folder(self) -> str:
        """The name of its folder among the named sets."""
        words = ["hf", *self.repository.split("/"), *([self.config] if self.config else [])]
        return f"{'--'.join(words)}@{self.revision.replace('/', '--')}"

    def write_shards(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        """Download the set, and write ``SPLIT-0000.tar`` and so on for each split.

        Raises:
            DataError: the library is missing, or the set cannot be fetched or has another form.
        """
        datasets = _library()
        cache = folder / "download"
        try:
            builder = datasets.load_dataset_builder(
                self.repository, self.config, revision=self.revision, cache_dir=str(cache)
            )
            _check_files(builder, self.repository)
            builder.download_and_prepare()
            splits = builder.as_dataset()
        except DataError:
            raise
        except Exception as error:  # of requests, of the hub, of the files
            first = (str(error).strip().splitlines() or [""])[0]
            raise DataError(
                f"hf:{self.repository}@{self.revision} cannot be fetched "
                f"({type(error).__name__}: {first[:200]}).",
                action="Check its name and the network, and that it needs no login; if it has "
                "several configs, name one: hf:OWNER/NAME/CONFIG@REVISION.",
            ) from error
        try:
            for name, rows in splits.items():
                # The set gives the name, and it becomes that of files.
                write_rows(rows, datasets, folder, name.replace("/", "-"), progress)
        except ValueError as error:  # of damaged files
            raise DataError(
                f"the files of hf:{self.repository}@{self.revision} cannot be read "
                f"({str(error)[:200]}).",
                action="Take another revision, or another data set.",
            ) from error
        if not any(folder.glob("*.tar")):
            raise DataError(
                f"hf:{self.repository}@{self.revision} holds no image with a label.",
                action="Take another revision, or another data set.",
            )
        splits = rows = builder = None  # they keep files of the cache open
        shutil.rmtree(cache, ignore_errors=True)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data sets of Hugging Face are fetched with the library datasets, which is not "
            "installed.",
            action="Install it: pip install 'fcil[hub]'; no client needs it once a set is fetched.",
        ) from error
    if int(datasets.__version__.split(".")[0]) < OLDEST:
        raise DataError(
            f"the library datasets has the version {datasets.__version__}; expected {OLDEST} or "
            "later, which runs no program of a data set.",
            action="Install it: pip install --upgrade 'fcil[hub]'",
        )
    return datasets


def _check_files(builder: Any, repository: str) -> None:
    """Check that a set's files are Parquet, on the hub, and would be read as such.

    The set itself says where its files are, which may be on this machine or its network; and the
    library takes the reader for a name's most frequent suffix, not for its last one.
    """
    files: dict[str, list[str]] = builder.config.data_files or {}
    found = [f for some in files.values() for f in some]
    other = [f for f in found if not (f.startswith(HUB) and f.lower().endswith(".parquet"))]
    if not other and type(builder).__module__ != READER:
        other = found
    if other or not found:
        what = f"such as {PurePosixPath(other[0]).name}" if other else "none"
        raise DataError(
            f"hf:{repository} has other files than Parquet at this revision ({what}).",
            action=f"Most data sets have a Parquet copy: hf:{repository}@{CONVERTED}",
        )


# --- rows -----------------------------------------------------------------------------------


def write_rows(
    rows: Any, datasets: Any, folder: Path, split: str, progress: Callable[[int, int], None]
) -> None:
    """Write the labelled images of a split as shards.

    Args:
        rows: a ``datasets.Dataset``.
        datasets: the library.
        folder: an existing one.
        split: the name that the shards begin with.
        progress: called with the rows done and in all.

    Raises:
        DataError: no column, or more than one, is the image or the label.
    """
    image, label = _columns(rows, datasets)
    feature = rows.features[label]
    rows = rows.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    archive, number = None, 0
    try:
        for at, row in enumerate(rows):
            data, name = (row[image] or {}).get("bytes"), _label(row[label], feature)
            if data and name is not None:  # a path alone is of the machine that made the set
                if archive is None or archive.offset > SHARD_BYTES:
                    if archive is not None:
                        archive.close()
                    archive = tarfile.open(folder / f"{split}-{number:04d}.tar", "w")  # noqa: SIM115
                    number += 1
                path = row[image].get("path") or ""
                _add(archive, f"{at:08d}{suffix_of(path)}", data)
                _add(archive, f"{at:08d}.cls", name.encode())
            if at % 1000 == 0:
                progress(at, len(rows))
    finally:
        if archive is not None:
            archive.close()


def _columns(rows: Any, datasets: Any) -> tuple[str, str]:
    """Return the names of the columns of the image and of the label."""
    images = [name for name, f in rows.features.items() if isinstance(f, datasets.Image)]
    labels = [name for name, f in rows.features.items() if isinstance(f, datasets.ClassLabel)]
    image = next((n for n in (*IMAGES, *images) if n in images), None)
    label = next((n for n in LABELS if n in rows.features), labels[0] if len(labels) == 1 else None)
    if image is None or label is None:
        raise DataError(
            f"the data set must have a column of images and one of labels ({', '.join(LABELS)}, or "
            f"the only one of classes); got {', '.join(rows.features)[:200]}.",
            action="Take another data set, or list its images in a CSV (docs/data.md).",
        )
    return image, label


def _label(value: Any, feature: Any) -> str | None:
    """Return the class's name; None for an image without one."""
    if hasattr(feature, "int2str"):
        return None if value is None or value < 0 else str(feature.int2str(value))
    return str(value) if isinstance(value, str | int) else None


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
