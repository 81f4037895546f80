"""Look through a folder of images as a client would, and leave no trace.

Neither the folder nor the client's directory is written to: the manifest of an enrolled folder
is only read, so that images that it knows are not decoded again.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fcil_adapters.images import named_sets
from fcil_adapters.images.decoding import ImageEntry, ImageSource, Listing, open_source
from fcil_client.data import manifest as manifests
from fcil_client.data.manifest import ImageManifest
from fcil_client.doctor.checks.facts import ImageFacts, Skip
from fcil_client.state.home import SALT_BYTES, Home
from fcil_protocol.errors import DataError, FcilError

LOOK_S = 20.0  # for reading images; those that are left then are counted, not read
_UNLOOKED = "not checked"


class _Hurried(ImageSource):
    """A source that reads nothing more when its time is over.

    Attributes:
        only: names of the images that are listed; None: all.
    """

    def __init__(self, source: ImageSource, limit_s: float) -> None:
        super().__init__(source.path)
        self._source = source
        self.only: set[str] | None = None
        self._ends = time.monotonic() + limit_s
        self.listed = Listing((), ())
        self.late = False

    def listing(self) -> Listing:
        found = self._source.listing()
        if self.only is not None:
            entries = tuple(e for e in found.entries if e.name in self.only)
            if not entries:
                raise DataError(
                    "none of the images that this client had of its partition is there any more.",
                    action="Restore them, or join with the new data.",
                )
            found = replace(found, entries=entries)
        self.listed = found
        return found

    def read(self, entry: ImageEntry) -> bytes:
        if time.monotonic() > self._ends:
            self.late = True
            raise DataError(_UNLOOKED)
        return self._source.read(entry)

    def unchanged(self, entry: ImageEntry) -> bool:
        return self._source.unchanged(entry)


def look(
    data: Path,
    home: Home | None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    limit_s: float = LOOK_S,
) -> ImageFacts | Skip:
    """Gather the contents of a source of images; of a client of a partition, its own part.

    Args:
        data: path of the images.
        home: of the folder's client; None: it is not enrolled.
        on_progress: called with files done and files in all.
        limit_s: for reading images.
    """
    try:
        source = open_source(named_sets.find(data))
    except FcilError as error:
        return ImageFacts(str(data), "source", error)
    form = source.form
    hurried = _Hurried(source, limit_s)
    try:
        salt, cache = _own_split(home)
        if home is not None and home.seat:
            own = manifests.load(cache, salt) if salt and cache else None
            if own is None:
                return Skip(
                    "a partition divides these images, and this client has not read its own"
                )
            hurried.only = {image.entry.name for image in own.images}
        manifest = manifests.scan(
            hurried, cache, salt or os.urandom(SALT_BYTES), on_progress=on_progress, keep=False
        )
    except FcilError as error:
        if hurried.late and isinstance(error, DataError):  # for want of time alone
            files = len(hurried.listed.entries)
            left_out = hurried.listed.faults
            return ImageFacts(str(data), form, left_out=left_out, files=files, unlooked=files)
        return ImageFacts(str(data), form, error)
    finally:
        source.close()
    faults = manifest.faults[len(hurried.listed.faults) :]
    unlooked = sum(fault == _UNLOOKED for fault in faults)
    return ImageFacts(
        path=str(data),
        form=form,
        left_out=hurried.listed.faults,
        unreadable=tuple(fault for fault in faults if fault != _UNLOOKED),
        files=len(hurried.listed.entries),
        unlooked=unlooked,
        counts=_counts(manifest),
        duplicates=_duplicates(manifest),
        notes=manifest.notes,
        enrolled=salt is not None,
    )


def _own_split(home: Home | None) -> tuple[bytes | None, Path | None]:
    """Return an enrolled folder's salt and manifest, as far as they were ever made."""
    if home is None or not (home.directory / "salt").exists():
        return None, None
    return home.salt(), home.directory / manifests.NAME


def _counts(manifest: ImageManifest) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for image in manifest.images:
        found[image.entry.class_name][image.side] += 1
    return found


def _duplicates(manifest: ImageManifest) -> tuple[tuple[str, ...], ...]:
    by_digest: dict[str, list[ImageEntry]] = defaultdict(list)
    for image in manifest.images:
        by_digest[image.digest].append(image.entry)
    # Of each class the first one, by class.
    firsts = ({e.class_name: e.name for e in reversed(same)} for same in by_digest.values())
    return tuple(
        tuple(name for _, name in sorted(first.items())) for first in firsts if len(first) > 1
    )
