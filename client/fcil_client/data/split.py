"""Side of each image: train, select or test; decided once and for ever.

The side follows from a hash of the image's content and the client's salt, so every copy of an image
is on the same side, and a rescan finds the same side. Sides that do not follow from the hash are
recorded in the manifest's file: those given by the folder layout, and those of images that a small
class needed for training or for tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fcil_adapters.images.decoding import ImageEntry
from fcil_protocol.errors import ConfigError

Side = Literal["train", "select", "test"]
SIDES: tuple[Side, ...] = ("train", "select", "test")
MOST_NAMED = 8  # classes in one sentence


class Fractions(NamedTuple):
    """Expected shares of the sides; with a ``test`` folder only train : select counts.

    ``select`` serves tuning (such as a ridge parameter) and nothing else.
    """

    train: float = 0.7
    select: float = 0.1
    test: float = 0.2

    def checked(self) -> Fractions:
        """Return these fractions.

        Raises:
            ConfigError: one is negative, train is zero, or they do not sum to 1.
        """
        if min(self) < 0 or self.train <= 0 or abs(sum(self) - 1) > 1e-9:
            raise ConfigError(
                f"the fractions {tuple(self)} of train, select and test must be >= 0, "
                "sum to 1, and leave something to train."
            )
        return self


@dataclass
class Split:
    """The result: a side per digest, the entries to leave out, and notes.

    Attributes:
        sides: digest (hex) -> side, of all images ever seen.
        left_out: names of entries that are on no side.
        notes: one sentence per class or layout with missing or left-out images.
    """

    sides: dict[str, Side]
    left_out: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def position(digest: str, salt: bytes) -> float:
    """Return the position of an image in [0, 1), from its digest (hex) and the salt."""
    word = hashlib.sha256(b"fcil/1/split\0" + salt + bytes.fromhex(digest)).digest()[:8]
    return int.from_bytes(word, "big") / 2**64


def split(
    images: Iterable[tuple[ImageEntry, str]],
    recorded: Mapping[str, Side],
    salt: bytes,
    fractions: Fractions,
) -> Split:
    """Give every image its side.

    The first rule that applies: a recorded side stays. An image in ``test/`` is on the test side,
    and a copy of it in ``train/`` is left out; one that a partition keeps for tuning is on the
    select side. Else the hash decides; but a class without any image on the train side gets its
    lowest by hash there, so that a class of a single image can be learned; and one that is large
    enough to expect a test image, but has none, gets its highest by hash there, so that its
    accuracy can be measured.

    Args:
        images: readable entries with their digests (hex).
        recorded: sides of earlier scans.
        salt: this client's, drawn once.
        fractions: expected shares.
    """
    images = list(images)
    fractions.checked()
    given = {digest for entry, digest in images if entry.part == "test"}
    kept = {digest for entry, digest in images if entry.part == "select"}
    result = Split(dict(recorded))
    for _, digest in images:
        if digest not in result.sides:
            at = position(digest, salt)
            side = "select" if digest in kept else _by_hash(at, fractions, tested=bool(given))
            result.sides[digest] = "test" if digest in given else side
    if fractions.train < 1:  # else every image has its side, and an empty side stays empty
        tested = 0.0 if given else fractions.test
        _help_small_classes(images, recorded, given, salt, tested, result)
    _leave_out(images, given, result)
    return result


def untrained_notes(names: Sequence[str]) -> list[str]:
    """Return one sentence about classes without an image to train on; none without a class."""
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    named = ", ".join(map(repr, names[:MOST_NAMED])) + more
    which = f"class {named} has" if len(names) == 1 else f"classes {named} have"
    why = "those here serve for tests or tuning, and a task needs a client with training images"
    return [f"{which} no image to train on: {why}"]


def _by_hash(at: float, fractions: Fractions, *, tested: bool) -> Side:
    train, select, _ = fractions
    if tested:
        return "train" if at < train / (train + select) else "select"
    if at < train:
        return "train"
    return "select" if at < train + select else "test"


def _help_small_classes(
    images: list[tuple[ImageEntry, str]],
    recorded: Mapping[str, Side],
    given: set[str],
    salt: bytes,
    tested: float,
    result: Split,
) -> None:
    by_class: dict[str, set[str]] = {}
    for entry, digest in images:
        by_class.setdefault(entry.class_name, set()).add(digest)

    def place(digest: str) -> tuple[float, str]:
        return position(digest, salt), digest

    moved: set[str] = set()  # the same image may be in two classes
    untrained = []
    for name, digests in sorted(by_class.items()):
        here = {result.sides[d] for d in digests}
        free = digests - given - recorded.keys() - moved
        if "train" not in here:
            if not free:
                untrained.append(name)
                continue
            moved.add(lowest := min(free, key=place))
            result.sides[lowest] = "train"
            result.notes.append(
                f"class {name!r} has too few images to split ({len(digests)}): one of them was "
                "moved to the train side, where it stays"
            )
        elif "test" not in here and free and len(digests) * tested >= 1:
            moved.add(highest := max(free, key=place))
            result.sides[highest] = "test"
    result.notes += untrained_notes(untrained)


def _leave_out(images: list[tuple[ImageEntry, str]], given: set[str], result: Split) -> None:
    copies = trained = 0
    for entry, digest in images:
        side = result.sides[digest]
        if entry.part == "train" and digest in given and side == "test":
            copies += 1
            result.left_out.add(entry.name)
        elif entry.part == "test" and side != "test":
            trained += 1
            result.left_out.add(entry.name)
    if copies:
        result.notes.append(
            f"left out of train/, since they are copies of images in test/: {copies}"
        )
    if trained:
        result.notes.append(
            "left out of test/, since an earlier scan put them on the train or select side: "
            f"{trained}"
        )
