"""Lines about a folder of images, as a client would see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fcil_client.doctor.checks.line import Line, failure, fault, ok, skipped, some, warning
from fcil_protocol.errors import DataError, FcilError

NAMES = (
    "images.folder", "images.layout", "images.unreadable", "images.classes", "images.small",
    "images.duplicates", "images.sides",
)  # fmt: skip
FEW = 5  # images of a class below which learning it is unreliable


@dataclass(frozen=True)
class ImageFacts:
    """Contents of a folder.

    Attributes:
        path: as given. form: ``folder`` or ``zip file``.
        error: reason why it cannot be used at all.
        left_out: sentences about files that the layout leaves out, and about refused names.
        unreadable: sentences about files that are no readable image.
        files: image files of the layout. unlooked: of these, not read for lack of time.
        counts: class -> side -> images.
        duplicates: for each image in several classes, these and the name of one file in each.
        notes: sentences about the split into sides.
        enrolled: the split is the client's own; else the next one may differ.
    """

    path: str
    form: str = "folder"
    error: FcilError | None = None
    left_out: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    files: int = 0
    unlooked: int = 0
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    duplicates: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    enrolled: bool = False

    def images(self, *sides: str) -> int:
        """Return the number of images on these sides."""
        return sum(n for counts in self.counts.values() for s, n in counts.items() if s in sides)


def lines(facts: ImageFacts) -> list[Line]:
    """Return the lines about the folder."""
    if facts.error is not None:
        rest = (skipped(n, "the folder cannot be used") for n in NAMES[1:])
        return [fault(NAMES[0], facts.error), *rest]
    return [
        ok("images.folder", f"{facts.path}, a {facts.form} with {facts.files:,} image files"),
        _layout(facts),
        _unreadable(facts),
        _classes(facts),
        _small(facts),
        _duplicates(facts),
        _sides(facts),
    ]


def no_folder(*, several: bool) -> list[Line]:
    """Return the lines for an unknown folder."""
    why = "there are several clients; name a folder" if several else "no folder was named"
    return [skipped(n, f"{why}: --data FOLDER") for n in NAMES]


def _layout(facts: ImageFacts) -> Line:
    name = "images.layout"
    if not facts.left_out:
        return ok(name, "every image lies in a class folder whose name can be used")
    action = "Move or rename them; until then they take no part."
    return warning(name, some(facts.left_out), action)


def _unreadable(facts: ImageFacts) -> Line:
    name = "images.unreadable"
    looked = facts.files - facts.unlooked
    rest = f"; {facts.unlooked:,} of {facts.files:,} were not looked at for want of time"
    rest = rest if facts.unlooked else ""
    if not facts.unreadable:
        return ok(name, f"all {looked:,} that were looked at can be read{rest}")
    text = f"{len(facts.unreadable):,} of {looked:,} cannot be read{rest}: {some(facts.unreadable)}"
    action = "Replace or remove them; a client leaves them out."
    if len(facts.unreadable) >= looked:
        return failure(name, text, action, DataError.code)
    return warning(name, text, action)


def _classes(facts: ImageFacts) -> Line:
    name = "images.classes"
    totals = {c: sum(sides.values()) for c, sides in facts.counts.items()}
    if not totals:
        return skipped(name, "no image could be read")
    listed = some((f"{c} {n:,}" for c, n in sorted(totals.items(), key=lambda p: -p[1])), most=8)
    text = f"{len(totals)} class{'es' * (len(totals) != 1)}: {listed}"
    return ok(name, text)


def _small(facts: ImageFacts) -> Line:
    name = "images.small"
    if facts.unlooked:
        return skipped(name, "not all images were looked at")
    small = [
        f"{c} has {sum(sides.values())}"
        for c, sides in sorted(facts.counts.items())
        if sum(sides.values()) < FEW
    ]
    if not small:
        return ok(name, f"every class has at least {FEW} images")
    action = f"Add images: with fewer than {FEW} a class is learned badly, and hardly measured."
    return warning(name, some(small), action)


def _duplicates(facts: ImageFacts) -> Line:
    name = "images.duplicates"
    if not facts.duplicates:
        return ok(name, "no image lies in two classes")
    examples = some(f"{' = '.join(files[:3])}" for _, files in facts.duplicates)
    count = len(facts.duplicates)
    text = f"{count:,} image{'s lie' if count != 1 else ' lies'} in several classes: {examples}"
    action = "Leave each in the class that it shows: one image with two labels teaches neither."
    return warning(name, text, action)


def _sides(facts: ImageFacts) -> Line:
    name = "images.sides"
    train, select, test = (facts.images(side) for side in ("train", "select", "test"))
    text = f"{train:,} for training, {select:,} for tuning, {test:,} for tests"
    text += "" if facts.enrolled else " (about: the split is drawn when the folder joins)"
    if not train and facts.counts:
        action = "Put images into the class folders, or into train/."
        return failure(name, text, action, DataError.code)
    if facts.notes:
        action = "Nothing, if that is as meant; else add images."
        return warning(name, f"{text}; {some(facts.notes)}", action)
    return ok(name, text)
