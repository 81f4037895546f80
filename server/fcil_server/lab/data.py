"""The images of an experiment: their location, the partitions made of them, the test images.

The digits are scikit-learn's, written once as class folders; everything else is the user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fcil_adapters.backbones.known import EMBEDDED_DIGEST, EMBEDDED_NAMES
from fcil_adapters.images.image_source import ImageEntry, ImageSource, suffix_of
from fcil_adapters.images.named_sets import find as find_images
from fcil_adapters.images.sources import open_source
from fcil_protocol.errors import ConfigError, CorruptFile, DataError
from fcil_protocol.process.children import module_command
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.lab.experiment import Data, Experiment, SettingSection
from fcil_server.lab.plan import Cell, PartitionRequest

DIGITS = "digits"
VARIABLE = "FCIL_DATA"  # of the environment, if --data is not given
DIGITS_TEST = 5  # one of this many images of a digit is for testing
LAYOUT = "Lay it out as train/<class>/<image> and test/<class>/<image>, or a zip of that."


@dataclass(frozen=True)
class Images:
    """Training and test images of an experiment.

    Attributes:
        source: folder or zip with train/ and test/.
        test: folder or zip of the test images.
    """

    source: Path
    test: Path


@dataclass(frozen=True)
class PartitionImages:
    """A partition file, as far as the server's side needs it."""

    path: Path
    digest: str
    source: str  # digest of the data set
    tasks: tuple[tuple[str, ...], ...]
    images: int  # training images of all clients
    notes: tuple[str, ...]


def find(experiment: Experiment, given: Path | None, room: Path) -> Images:
    """Find the images, and write generated ones into ``room``.

    Raises:
        ConfigError: no location was given. DataError: they have another layout.
    """
    data = experiment.data
    if data.name == DIGITS:
        source = write_digits(room / DIGITS)
    else:
        said = given or (Path(text) if (text := os.environ.get(VARIABLE)) else None)
        if said is None:
            raise ConfigError(
                f"the experiment needs the data set {data.name!r}.",
                action=f"Give its folder or zip, or its name, with --data (from Python: data=), "
                f"or in {VARIABLE}. {LAYOUT}",
            )
        source = find_images(said).resolve()
    return Images(source, _test_images(source, data, room))


def _test_images(source: Path, data: Data, room: Path) -> Path:
    """Return the test images: the source's own test/, or a folder with a part of it."""
    with closing(open_source(source)) as images:
        entries = [e for e in images.entries() if e.part == "test"]
        classes = {e.class_name for e in entries}
        if len(classes) != data.classes:
            raise DataError(
                f"{source} has test images of {len(classes)} classes, the experiment is about "
                f"{data.classes} ({data.name}).",
                action=LAYOUT,
            )
        if not data.test_per_class:
            return source
        chosen = list(_some(entries, data.test_per_class))
        text = json.dumps([str(source), [(e.name, e.size, e.stamp) for e in chosen]])
        folder = room / f"test-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        _write(images, chosen, folder)
    return folder


def _some(entries: Iterable[ImageEntry], per_class: int) -> Iterable[ImageEntry]:
    """Draw images of each class, the same in every experiment."""
    by_class: dict[str, list[ImageEntry]] = {}
    for entry in entries:
        by_class.setdefault(entry.class_name, []).append(entry)
    for name, found in sorted(by_class.items()):
        if len(found) < per_class:
            raise DataError(f"class {name!r} has {len(found)} test images, not {per_class}.")
        word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        order = np.random.default_rng([0, word]).permutation(len(found))[:per_class]
        found.sort(key=lambda e: e.name)
        yield from (found[i] for i in sorted(order.tolist()))


def _write(images: ImageSource, chosen: list[ImageEntry], folder: Path) -> None:
    if folder.exists():
        return
    half = folder.with_name(f"{folder.name}.half")
    with storage_errors("write", folder):
        shutil.rmtree(half, ignore_errors=True)
        for number, entry in enumerate(chosen):
            target = half / entry.class_name / f"{number:06d}{suffix_of(entry.name)}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(images.read(entry))
        half.rename(folder)


def write_digits(folder: Path) -> Path:
    """Write scikit-learn's digits as 32 x 32 PNGs, a fifth of each for testing; once.

    Raises:
        DataError: scikit-learn is not installed.
    """
    if folder.exists():
        return folder
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed.",
            action="Install it: pip install 'fcil[demo]'",
        ) from error
    digits = load_digits()
    half = folder.with_name(f"{folder.name}.half")
    with storage_errors("write", folder):
        shutil.rmtree(half, ignore_errors=True)
        seen: Counter[int] = Counter()
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            side = "train" if seen[label] % DIGITS_TEST else "test"
            seen[label] += 1
            target = half / side / str(label)
            target.mkdir(parents=True, exist_ok=True)
            grey = (pixels * (255 / 16)).round().astype(np.uint8)  # 0..16 -> 0..255
            large = Image.fromarray(grey).resize((32, 32), Image.Resampling.BICUBIC)
            large.save(target / f"{number:04d}.png")
        half.rename(folder)
    return folder


# --- partitions -----------------------------------------------------------------------------


def partition(images: Images, split: PartitionRequest, room: Path) -> PartitionImages:
    """Draw a partition with ``fcil-client split``.

    An older file is not used: the data, or what draws it, may have changed since.

    Raises:
        DataError: it cannot be drawn; message and remedy are the command's own.
    """
    path = room / f"partition-{split.slug}.json"
    made = path.with_suffix(".half")
    made.unlink(missing_ok=True)
    where = ["--data", str(images.source), "--out", str(made)]
    command = module_command("fcil_client", "split", *where, *split.arguments(), "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not made.exists():
        said = f"fcil-client split {' '.join(split.arguments())}"
        try:
            error = json.loads(done.stdout)["data"]
            raise DataError(
                f"{said}: {error['message']}",
                action=f"{error['action']} The experiment's TOML has these values.",
            )
        except (ValueError, KeyError, TypeError):
            words = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
            raise DataError(f"{said}: {words}") from None
    made.replace(path)
    return read_partition(path)


def read_partition(path: Path) -> PartitionImages:
    """Read the part of a partition file that the server's side needs.

    Raises:
        CorruptFile: it has another format, or is incomplete.
    """
    try:
        with storage_errors("read", path):
            content: dict[str, Any] = json.loads(path.read_bytes())
        return PartitionImages(
            path=path,
            digest=str(content["digest"]),
            source=str(content["source"]["digest"]),
            tasks=tuple(tuple(names) for names in content["tasks"]),
            images=sum(len(names) for names in content["images"]["train"].values()),
            notes=tuple(content.get("notes", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"the partition {path} is damaged ({error}).") from error


def partitions(images: Images, cells: Iterable[Cell], room: Path) -> dict[str, PartitionImages]:
    """Return the partitions of some cells by the slug of their split.

    Raises:
        DataError: names every split that cannot be drawn.
    """
    splits = {c.split.slug: c.split for c in cells}
    found: dict[str, PartitionImages] = {}
    faults: list[str] = []
    for slug, split in splits.items():
        try:
            found[slug] = partition(images, split, room)
        except DataError as error:
            faults.append(error.message)
    if faults:
        raise DataError(" ".join(faults))
    return found


# --- the backbone ---------------------------------------------------------------------------


def weights_of(setting: SettingSection) -> str:
    """Return the path of the backbone's weights, empty if there is no file.

    Raises:
        ConfigError: the environment does not name it, or there is no such file.
    """
    if not setting.weights:
        return ""
    text = os.path.expandvars(setting.weights)
    path = Path(text).expanduser()
    if text.startswith("$") or not path.is_file():
        raise ConfigError(
            f"there are no weights {text} for {setting.backbone}.",
            action=f"Put the safetensors file there, or set {setting.weights.strip('${}')} to it.",
        )
    return str(path.resolve())


def backbone_digest(setting: SettingSection, weights: str) -> str:
    """Return the identity of a backbone."""
    if weights:
        with storage_errors("read", Path(weights)), Path(weights).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return EMBEDDED_DIGEST if setting.backbone in EMBEDDED_NAMES else setting.backbone


def save_json(path: Path, content: Any) -> None:
    """Write JSON, completely or not at all."""
    write_atomic(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
