"""The folder of an experiment's frozen features: its settings, files and counts (torch-free)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fcil_protocol.errors import ConfigError

VARIABLE = "FCIL_FEATURE_CACHE"  # of a worker's environment; only the laboratory sets it
STEM, _END = "features-", ".sqlite"


@dataclass(frozen=True)
class FeatureFolder:
    """A cell's share in the cache of frozen features.

    Attributes:
        folder: of the cache; created when it is first used.
        most_bytes: the file in use is at most this large, its log of some MB apart.
        counts: file to which the cell's workers append their `FeatureCounts`.
    """

    folder: Path
    most_bytes: int
    counts: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> FeatureFolder | None:
        """Read `VARIABLE`; None if it is empty or not set.

        Raises:
            ConfigError: it is malformed.
        """
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            folder, most_bytes, counts = json.loads(text)
            return cls(Path(folder), int(most_bytes), Path(counts))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{VARIABLE} is {text[:200]!r}; expected what the laboratory writes there.",
                action="Remove it from the environment.",
            ) from error


def environment(place: FeatureFolder | None) -> dict[str, str]:
    """Return the variable by which workers find a folder; None: they have none."""
    if place is None:
        return {VARIABLE: ""}
    return {VARIABLE: json.dumps([str(place.folder), place.most_bytes, str(place.counts)])}


@dataclass(frozen=True)
class FeatureCounts:
    """Use of the cache.

    Attributes:
        read: features that came from the cache.
        computed: features that it lacked.
        removed: features that made room for others.
        faults: one sentence each.
    """

    read: int = 0
    computed: int = 0
    removed: int = 0
    faults: tuple[str, ...] = ()


def counted(path: Path) -> FeatureCounts:
    """Return the sum of what workers appended to a file; zeros if there is none."""
    total = {"read": 0, "computed": 0, "removed": 0}
    faults: dict[str, None] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        lines = []
    for line in lines:
        with contextlib.suppress(ValueError):  # its worker was killed in the middle
            facts = json.loads(line)
            for name in total:
                total[name] += facts.get(name, 0)
            faults.update(dict.fromkeys(facts.get("faults", ())))
    return FeatureCounts(**total, faults=tuple(faults))


def bytes_used(folder: Path) -> int:
    """Return the size of the file in use and of its log; 0 if there is none."""
    file, total = file_of(folder, newest(folder)), 0
    for path in (file, file.with_name(f"{file.name}-wal")):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def remove_replaced(folder: Path) -> None:
    """Remove files that were damaged and replaced; files in use keep their numbers."""
    in_use = newest(folder)
    for path in folder.glob(f"{STEM}*{_END}*"):
        number = _number(path)
        if number and number < in_use:
            with contextlib.suppress(OSError):
                path.unlink()


def file_of(folder: Path, number: int) -> Path:
    """Return the path of the file with a number; SQLite keeps its log next to it."""
    return folder / f"{STEM}{number}{_END}"


def _number(path: Path) -> int:
    """Return the number in the name of a file, or of its log; 0: it has none."""
    digits = path.name.removeprefix(STEM).partition(_END)[0]
    return int(digits) if digits.isdecimal() else 0


def newest(folder: Path) -> int:
    """Return the number of the file in use; 0 if there is none."""
    return max((_number(path) for path in folder.glob(f"{STEM}*{_END}")), default=0)
