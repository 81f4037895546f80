"""A partition as a file: the images of each client, once and for ever.

JSON, one top-level field per line, so that other programs can read it without fcil. It names images
as the source names them, and the data set by a digest of its listing, so that it matches only that
data set. ``digest`` covers all other fields: it is the partition's name, and detects damage.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from fcil_adapters.images.decoding import Listing
from fcil_client.data.split import SIDES, Fractions, Side
from fcil_protocol.errors import CorruptFile, DataError, UsageError
from fcil_protocol.process.terminal import command
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

FORMAT = 1
KINDS = ("quantity", "dirichlet", "hepco", "iid")
_GIVEN = Fractions(1.0, 0.0, 0.0)  # sides that the partition does not name have no share

_Sha256 = Annotated[str, StringConstraints(pattern="[0-9a-f]{64}")]
_Names = dict[str, tuple[str, ...]]  # class name -> names of its images
_Owners = dict[str, tuple[int, ...]]  # class name -> slot of each of those images
_Choice = dict[str, tuple[int, ...]]  # class name -> positions in its train images


class _Field(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class DividedData(_Field):
    """The data set that was divided.

    Attributes:
        digest: digest of its listing (`listing_digest`).
        images: number of its images.
    """

    digest: _Sha256
    images: int


class Partition(_Field):
    """The images of each client.

    Attributes:
        format: format of the file.
        kind: one of `KINDS`.
        parameters: all inputs of the draw besides the seed.
        seed: seed of the draw.
        order: class order (`partition_draws.ORDERS`, or ``listed``).
        clients: number of clients; their slots count from 0.
        tasks: class names of each task.
        source: the data set.
        notes: one sentence per unexpected property.
        images: side -> class name -> names of images.
        owners: side -> class name -> slot of each image. HePCo's train images have no owner.
        rounds: HePCo: task -> round -> slot -> class name -> positions among its train images.
        digest: SHA-256 (hex) over all other fields as they are written.
    """

    format: int = FORMAT
    kind: str
    parameters: dict[str, int | float | str | bool]
    seed: int
    order: str
    clients: int
    tasks: tuple[tuple[str, ...], ...]
    source: DividedData
    notes: tuple[str, ...]
    images: dict[Side, _Names]
    owners: dict[Side, _Owners]
    rounds: tuple[tuple[tuple[_Choice, ...], ...], ...] = ()
    digest: str = ""

    @property
    def fractions(self) -> Fractions:
        """Fractions for `manifest.scan`, which has no image to divide: each has its side."""
        return _GIVEN

    @property
    def redraws(self) -> bool:
        """True if clients choose afresh for every round."""
        return self.kind == "hepco"

    def check_slot(self, slot: int) -> None:
        """Check that the slot exists.

        Raises:
            UsageError: it does not.
        """
        if not 0 <= slot < self.clients:
            raise UsageError(
                f"the partition has the slots 0 to {self.clients - 1}, got {slot}.",
                action="Choose one of them: --slot K",
            )

    def train(self, slot: int) -> frozenset[str]:
        """Return the names of a client's train images; with HePCo, of all rounds together."""
        return self._of("train", slot)

    def select(self, slot: int) -> frozenset[str]:
        """Return the names of a client's images for tuning."""
        return self._of("select", slot)

    def test(self, slot: int) -> frozenset[str]:
        """Return the names of a client's test images."""
        return self._of("test", slot)

    def counts(self, slot: int) -> dict[str, int]:
        """Return class name -> train images of a client, without empty classes."""
        return dict(self._counts[slot])

    def task_notes(self, names: Iterable[str], task: int) -> Iterator[str]:
        """Yield a sentence if these classes are not all in this task."""
        if task >= len(self.tasks) or not set(names) <= set(self.tasks[task]):
            yield (
                f"task {task} of this run differs from that of the partition, so the results do "
                "not belong to that partition. Give the server the partition's tasks "
                "(docs/partitions.md)."
            )

    def round_choice(self, slot: int, task: int, round_: int) -> frozenset[str] | None:
        """Return the names of the train images that a client may see in a round; None: all.

        Raises:
            DataError: the partition was not drawn for this task or round.
        """
        if not self.redraws:
            return None
        drawn = len(self.rounds[0])
        if task >= len(self.rounds) or round_ >= drawn:
            raise DataError(
                f"the partition was drawn for {len(self.rounds)} tasks of {drawn} rounds; the "
                f"server asks for task {task}, round {round_} (counted from 0).",
                action="Make it again with more: fcil-client split --rounds N",
            )
        return frozenset(self._chosen(self.rounds[task][round_][slot]))

    def _chosen(self, choice: _Choice) -> Iterator[str]:
        for name, positions in choice.items():
            images = self.images["train"][name]
            yield from (images[i] for i in positions)

    def _of(self, side: Side, slot: int) -> frozenset[str]:
        self.check_slot(slot)
        return self._held[side][slot]

    @cached_property
    def _held(self) -> dict[Side, list[frozenset[str]]]:
        held: dict[Side, list[set[str]]] = {s: [set() for _ in range(self.clients)] for s in SIDES}
        for side, classes in self.owners.items():
            for name, owners in classes.items():
                for image, slot in zip(self.images[side][name], owners, strict=True):
                    held[side][slot].add(image)
        for choices in (row for task in self.rounds for row in task):
            for slot, choice in enumerate(choices):
                held["train"][slot].update(self._chosen(choice))
        return {side: [frozenset(one) for one in slots] for side, slots in held.items()}

    @cached_property
    def _counts(self) -> list[Counter[str]]:
        found: list[Counter[str]] = [Counter() for _ in range(self.clients)]
        of = {image: name for name, images in self.images["train"].items() for image in images}
        for slot, names in enumerate(self._held["train"]):
            found[slot].update(of[image] for image in names)
        return found


def seat(partition: Partition, slot: int) -> str:
    """Return a short name of one client of one partition, for its directory.

    Raises:
        UsageError: there is no such slot.
    """
    partition.check_slot(slot)
    return f"{partition.digest[:8]}-{slot:03d}"


def listing_digest(listing: Listing) -> str:
    """Return a data set's digest (hex): over name, class, side and size of every image."""
    rows = sorted([e.name, e.class_name, e.part or "", e.size] for e in listing.entries)
    # A name may hold bytes that are not valid text.
    return hashlib.sha256(_dump(rows).encode("utf-8", "surrogatepass")).hexdigest()


# --- file ----------------------------------------------------------------------------------


def with_digest(partition: Partition) -> Partition:
    """Return the partition with its digest."""
    return partition.model_copy(update={"digest": _digest(_fields(partition))})


def save(path: Path, partition: Partition) -> None:
    """Write a partition, completely or not at all.

    Raises:
        StorageError: that is not possible.
    """
    fields = {**_fields(partition), "digest": partition.digest}
    rows = ",\n".join(f"{_dump(name)}: {_dump(value)}" for name, value in fields.items())
    write_atomic(path, f"{{\n{rows}\n}}\n".encode(), mode=0o644)


def load(path: Path) -> Partition:
    """Read a partition; an unchanged file is read only once.

    Raises:
        DataError: there is no such file.
        CorruptFile: it is damaged, or written by a newer fcil.
        StorageError: it cannot be read.
    """
    with storage_errors("read the partition", path):
        if not path.is_file():
            make = command(
                "fcil-client", "split", "--data", "DATA", "--clients", "N", "--out", path
            )
            raise DataError(f"there is no partition {path}.", action=f"Make one: {make}")
        status = path.stat()
    # Two files of the same size may be written within one tick of the clock.
    return _load(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=4)
def _load(path: Path, _which: tuple[int, int, int]) -> Partition:
    with storage_errors("read the partition", path):
        text = path.read_bytes()
    try:
        partition = Partition.model_validate_json(text)
    except ValidationError as error:
        raise _damaged(path, _invalid(text, error)) from error
    fault = next(faults(partition), None)
    if fault:
        raise _damaged(path, fault)
    return partition


def _damaged(path: Path, fault: str) -> CorruptFile:
    return CorruptFile(
        f"the partition {path} cannot be used: {fault}.",
        action="Make it again: fcil-client split writes the same file from the same data and "
        "options. Every client needs the same one.",
    )


def _invalid(text: bytes, error: ValidationError) -> str:
    """Return the fault of a file that does not have the form of a partition."""
    first = error.errors(include_url=False, include_input=False)[0]
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return f"it is not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
    if not isinstance(fields, dict):
        return f"expected a JSON object, got {type(fields).__name__}"
    number = fields.get("format")
    if isinstance(number, int) and number > FORMAT:
        return _other_format(number)
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _other_format(number: int) -> str:
    newer = ": install a newer one" if number > FORMAT else ""
    return f"it has format {number}, and this fcil reads {FORMAT}{newer}"


def faults(partition: Partition) -> Iterator[str]:
    """Yield a sentence, without its full stop, for each fault of a partition."""
    if partition.format != FORMAT:
        yield _other_format(partition.format)
    if partition.kind not in KINDS:
        yield f"its kind is {partition.kind!r}; known are {', '.join(KINDS)}"
    if partition.clients < 1:
        yield f"clients is {partition.clients}"
    yield from _class_faults(partition)
    yield from _owner_faults(partition)
    yield from _round_faults(partition)
    if partition.digest != _digest(_fields(partition)):
        yield "its content does not match its digest: it was changed or damaged"


def _class_faults(partition: Partition) -> Iterator[str]:
    classes = [name for task in partition.tasks for name in task]
    if not all(partition.tasks) or not classes:
        yield "a task has no classes"
    for name, n in Counter(classes).items():
        if n > 1:
            yield f"class {name!r} appears {n} times in the tasks"
    if partition.images.keys() != set(SIDES):
        yield f"images has the sides {sorted(partition.images)}, expected {sorted(SIDES)}"
    met: set[str] = set()
    for side, by_class in partition.images.items():
        for name, images in by_class.items():
            if name not in set(classes):
                yield f"images.{side} has class {name!r}, which is in no task"
            twice = next((i for i in images if i in met), None)
            if twice is not None or len(set(images)) < len(images):
                yield f"an image of class {name!r} appears there twice"
            met.update(images)
    missing = [name for name in classes if not partition.images.get("train", {}).get(name)]
    if missing:
        yield f"class {missing[0]!r} has no train images"


def _owner_faults(partition: Partition) -> Iterator[str]:
    owned = [side for side in SIDES if side != "train" or not partition.redraws]
    if set(partition.owners) != set(owned):
        yield f"owners has the sides {sorted(partition.owners)}, expected {sorted(owned)}"
        return
    for side, by_class in partition.owners.items():
        images = partition.images.get(side, {})
        if by_class.keys() != images.keys():
            yield f"owners.{side} and images.{side} have different classes"
            return
        for name, owners in by_class.items():
            there = len(images[name])
            if len(owners) != there:
                yield f"class {name!r} has {there} {side} images and {len(owners)} owners"
            wrong = [slot for slot in owners if not 0 <= slot < partition.clients]
            if wrong:
                yield f"class {name!r} has an owner {wrong[0]}, and clients are {partition.clients}"


def _round_faults(partition: Partition) -> Iterator[str]:
    rounds = partition.rounds
    if not partition.redraws:
        if rounds:
            yield f"rounds is for hepco, and the kind is {partition.kind}"
        return
    if len(rounds) != len(partition.tasks) or not rounds[0] or len({*map(len, rounds)}) > 1:
        yield "rounds does not have the same number of rounds for every task"
        return
    for choices in (row for task in rounds for row in task):
        if len(choices) != partition.clients:
            yield f"a round has {len(choices)} clients, expected {partition.clients}"
    for choice in (c for task in rounds for row in task for c in row):
        for name, positions in choice.items():
            there = len(partition.images["train"].get(name, ()))
            if len(set(positions)) < len(positions) or not all(0 <= i < there for i in positions):
                yield (
                    f"a round has images of class {name!r} that do not exist, or the same "
                    "image twice"
                )


def _fields(partition: Partition) -> dict[str, Any]:
    return partition.model_dump(mode="json", exclude={"digest"})


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(fields).encode()).hexdigest()


def _dump(value: Sequence[Any] | Mapping[str, Any] | str) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
