"""Results: one small file for each finished cell, written completely or not at all.

::

    <folder>/
        cells/<key>.json    the numbers of a cell and everything that they depend on
        plan.json           digests of data, partitions and backbone, as last seen
        data/               what was written of the images, and the partitions
        work/<key>/         cells that are running, or failed: logs, keys, states
        work/features/      frozen features that the cells share
        report.md  report.html
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil_protocol.errors import NotYet
from fcil_protocol.ids import digest_of
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.lab.data import PartitionImages, save_json
from fcil_server.lab.plan import RESULT_VERSION, Cell

KEY_DIGITS = 24  # of the SHA-256; enough for a few thousand cells
PLAN = "plan.json"
_GIT_S = 10.0  # for an answer of git


@dataclass(frozen=True)
class Known:
    """Last known data and backbone: the inputs of every key.

    Attributes:
        partitions: slug of a split -> digest, source, images and notes of its file.
    """

    backbone: str
    partitions: Mapping[str, Mapping[str, Any]]

    def key(self, cell: Cell) -> str | None:
        """Return the key of a cell's result; None if its partition was never made."""
        one = self.partitions.get(cell.split.slug)
        if one is None:
            return None
        return digest_of(cell.identity(one["digest"], self.backbone))[:KEY_DIGITS]


class Results:
    """The results' folder of one experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def make(self) -> None:
        """Create the folder if it does not exist.

        Raises:
            StorageError: it cannot be created.
        """
        for name in ("cells", "data", "work"):
            with storage_errors("create", self.folder / name):
                (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def data(self) -> Path:
        """Folder of generated images and partitions."""
        return self.folder / "data"

    @property
    def features(self) -> Path:
        """Folder of the frozen features that cells share."""
        return self.folder / "work" / "features"

    def cell_directory(self, key: str) -> Path:
        """Return the directory in which a cell runs."""
        return self.folder / "work" / key

    def known(self) -> Known:
        """Return the data and backbone of the experiment's last run.

        Raises:
            NotYet: it never ran.
        """
        try:
            content = json.loads((self.folder / PLAN).read_bytes())
            return Known(str(content["backbone"]), dict(content["partitions"]))
        except FileNotFoundError as error:
            raise NotYet(
                f"{self.folder} holds no results yet.",
                action="Run the experiment first.",
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotYet(
                f"{self.folder / PLAN} cannot be read ({error}).",
                action="Run the experiment again; finished cells stay finished.",
            ) from error

    def add_sources(self, backbone: str, partitions: Mapping[str, PartitionImages]) -> Known:
        """Save the current data and backbone, in addition to those of other cells.

        Those of another data set are forgotten: a table is about one data set.
        """
        sources = {p.source for p in partitions.values()}
        try:
            seen = self.known().partitions
        except NotYet:
            seen = {}
        before = {slug: one for slug, one in seen.items() if one.get("source") in sources}
        now = {
            slug: {
                "digest": p.digest,
                "source": p.source,
                "images": p.images,
                "notes": list(p.notes),
            }
            for slug, p in partitions.items()
        }
        known = Known(backbone, {**before, **now})
        content = {"backbone": backbone, "partitions": dict(known.partitions)}
        save_json(self.folder / PLAN, content)
        return known

    def load(self, key: str) -> dict[str, Any] | None:
        """Return a finished cell's content; None if there is none, or a damaged one.

        Raises:
            StorageError: the system does not allow reading it.
        """
        path = self.folder / "cells" / f"{key}.json"
        if not path.exists():
            return None
        with storage_errors("read", path):
            text = path.read_bytes()
        try:
            content = json.loads(text)
        except ValueError:
            return None
        whole = isinstance(content, dict) and content.get("version") == RESULT_VERSION
        return content if whole and content.get("key") == key else None

    def save(self, key: str, cell: Cell, known: Known, numbers: Mapping[str, Any]) -> None:
        """Save a finished cell."""
        one = known.partitions[cell.split.slug]
        content = {
            **numbers,
            "version": RESULT_VERSION,
            "key": key,
            "cell": cell.name,
            "seed": cell.seed,
            "identity": cell.identity(one["digest"], known.backbone),
            "revision": revision(Path(__file__).parent),
            "train_images": one["images"],
            "notes": one["notes"],
        }
        save_json(self.folder / "cells" / f"{key}.json", content)

    def finished(self, cells: Iterable[Cell], known: Known) -> dict[str, dict[str, Any]]:
        """Return the contents of finished cells by the cells' names."""
        found = {}
        for cell in cells:
            key = known.key(cell)
            content = self.load(key) if key is not None else None
            if content is not None:
                found[cell.name] = content
        return found


def revision(folder: Path) -> str:
    """Return git's name of the revision that a folder is checked out of.

    It ends in ``-dirty`` if files differ from it, and is empty where there is no checkout, or no
    git.
    """
    here = ["git", "-C", str(folder)]
    try:
        tracked = subprocess.run(
            [*here, "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True, timeout=_GIT_S, check=False,
        )  # fmt: skip
        if tracked.returncode:
            return ""
        done = subprocess.run(
            [*here, "describe", "--always", "--abbrev=12", "--dirty"],
            capture_output=True, text=True, timeout=_GIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
