"""A picture of a partition: for each task, clients x classes with the number of images.

Laid out once as rectangles and words, then written as SVG directly or as PNG with Pillow, which
every client has.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from fcil_client.data.partition_file import Partition
from fcil_protocol.errors import UsageError
from fcil_protocol.process.terminal import count_of
from fcil_protocol.storage.atomic_files import write_atomic

SUFFIXES = (".svg", ".png")
_CELL = 30.0  # side of a cell with its number, in pixels
_ROWS_PX = 900.0  # largest height of all clients of a panel, if they are many
_GAP = 26.0
_TITLE = 54.0
_SMALL, _USUAL = 10.0, 13.0
_LETTER = 0.56  # typical ratio of a letter's width to its size
_INK, _PALE, _EMPTY = (32, 36, 44), (255, 255, 255), (244, 244, 242)
# From few to many: single-hued and even in lightness, so that it reads in grey as well.
_LOW, _HIGH = (214, 230, 244), (8, 48, 107)

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour


@dataclass(frozen=True)
class Word:
    """A line of text; ``at`` names the end of it that is at (x, y), a point of its middle line.

    ``up``: the text runs upwards from there.
    """

    x: float
    y: float
    text: str
    at: Literal["start", "middle", "end"] = "start"
    size: float = _SMALL
    fill: Colour = _INK
    up: bool = False


@dataclass(frozen=True)
class Drawing:
    """Shapes of a picture, and its size."""

    width: float
    height: float
    shapes: tuple[Box | Word, ...]


def check_target(path: Path) -> None:
    """Check that a picture can be written under this name.

    Raises:
        UsageError: its suffix is neither of the known ones.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a picture is a {' or '.join(SUFFIXES)} file, got {path.name!r}.",
            action=f"For example: --picture {path.stem or 'partition'}.svg",
        )


def write(path: Path, partition: Partition) -> None:
    """Write the picture of a partition, completely or not at all.

    Raises:
        UsageError: the suffix is unknown.
        StorageError: it cannot be written.
    """
    check_target(path)
    drawn = draw(partition)
    data = png(drawn) if path.suffix.lower() == ".png" else svg(drawn).encode()
    write_atomic(path, data, mode=0o644)


# --- layout --------------------------------------------------------------------------------


def draw(partition: Partition) -> Drawing:
    """Lay out the panels of all tasks."""
    counts = [partition.counts(slot) for slot in range(partition.clients)]
    most = max((n for held in counts for n in held.values()), default=1)
    cell = _Cells(partition, most)
    columns = _columns(len(partition.tasks))
    shapes: list[Box | Word] = [*_heading(partition, most)]
    x = y = right = 0.0
    below = _TITLE
    for number, classes in enumerate(partition.tasks):
        if number % columns == 0:
            x, y = _GAP, below
        panel = [*cell.panel(number, classes, counts, x, y)]
        shapes += panel
        x += cell.panel_width(classes) + _GAP
        right, below = max(right, x), max(below, y + cell.panel_height + _GAP)
    words = (s for s in shapes if isinstance(s, Word) and not s.up and s.at == "start")
    right = max(right, *(w.x + len(w.text) * w.size * _LETTER + _GAP for w in words))
    return Drawing(right, below, tuple(shapes))


def _columns(panels: int) -> int:
    """Return the number of panels per row: wider than high, in full rows if possible."""
    even = [n for n in range(1, panels + 1) if panels % n == 0 and panels <= n * n <= 4 * panels]
    return even[0] if even else round(math.sqrt(2 * panels))


class _Cells:
    """Sizes of cells and panels, which all tasks share."""

    def __init__(self, partition: Partition, most: int) -> None:
        self._most = most
        self._clients = partition.clients
        self._tall = min(_CELL, max(1.0, _ROWS_PX / partition.clients))
        digits = len(str(most))
        self._wide = max(_CELL, (digits + 1) * _SMALL * _LETTER)
        self._numbers = self._tall >= _SMALL + 2
        names = [_short(name) for task in partition.tasks for name in task]
        longest = max(map(len, names)) * _SMALL * _LETTER
        self._upright = longest > self._wide - 4  # names that do not fit side by side are vertical
        self._head = longest + 8 if self._upright else _SMALL + 8
        self._left = len(str(partition.clients - 1)) * _SMALL * _LETTER + 8
        self._sums = (len(str(most)) + 2) * _SMALL * _LETTER + 6

    def panel_width(self, classes: Sequence[str]) -> float:
        return self._left + len(classes) * self._wide + self._sums

    @property
    def panel_height(self) -> float:
        return _USUAL + 6 + self._head + self._clients * self._tall

    def panel(
        self,
        task: int,
        classes: Sequence[str],
        counts: Sequence[dict[str, int]],
        x: float,
        y: float,
    ) -> Iterator[Box | Word]:
        yield Word(x + self._left, y + _USUAL / 2, f"task {task}", size=_USUAL)
        top, left = y + _USUAL + 6 + self._head, x + self._left
        for column, name in enumerate(classes):
            middle = left + (column + 0.5) * self._wide
            if self._upright:
                yield Word(middle, top - 4, _short(name), up=True)
            else:
                yield Word(middle, top - 4 - _SMALL / 2, _short(name), at="middle")
        every = max(1, math.ceil((_SMALL + 2) / self._tall))  # with thin rows, only some are named
        for slot, held in enumerate(counts):
            row = top + slot * self._tall
            named = slot % every == 0
            if named:
                yield Word(left - 5, row + self._tall / 2, str(slot), at="end")
            for column, name in enumerate(classes):
                yield from self._cell(left + column * self._wide, row, held.get(name, 0))
            if named and self._numbers:
                total = sum(held.get(name, 0) for name in classes)
                x_sum = left + len(classes) * self._wide + self._sums
                yield Word(x_sum, row + self._tall / 2, str(total), at="end")

    def _cell(self, x: float, y: float, images: int) -> Iterator[Box | Word]:
        edge = 1.0 if self._tall >= 6 else 0.0
        share = math.sqrt(images / self._most)  # so that small shares differ from none
        fill = _mix(share) if images else _EMPTY
        yield Box(x, y, self._wide - 1, self._tall - edge, fill)
        if images and self._numbers:
            middle = x + (self._wide - 1) / 2, y + (self._tall - edge) / 2
            yield Word(*middle, str(images), at="middle", fill=_PALE if share > 0.55 else _INK)


def _heading(partition: Partition, most: int) -> Iterator[Word]:
    clients, tasks = count_of(partition.clients, "client"), count_of(len(partition.tasks), "task")
    title = f"{describe(partition)}: {clients}, {tasks}"
    yield Word(_GAP, 18, title, size=_USUAL + 2)
    over = " over all rounds" if partition.redraws else ""
    yield Word(
        _GAP,
        36,
        f"train images of each client (row, by slot) and class{over}, at most {most}; on the "
        f"right the client's images of the task. Order {partition.order}, seed {partition.seed}, "
        f"partition {partition.digest[:8]}",
    )


def describe(partition: Partition) -> str:
    """Return a partition's kind with its own parameters, for people."""
    shown = {
        "quantity": ("alpha",),
        "dirichlet": ("beta",),
        "hepco": ("kappa", "gamma", "imbalance"),
        "iid": (),
    }[partition.kind]
    inside = ", ".join(f"{name} = {partition.parameters[name]:g}" for name in shown)
    return f"{partition.kind} ({inside})" if inside else partition.kind


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}\N{HORIZONTAL ELLIPSIS}"


def _mix(share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_LOW, _HIGH, strict=True))
    return red, green, blue


# --- files ---------------------------------------------------------------------------------


def svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG file."""
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect {size} fill="#fff"/>',
        *(_svg_box(s) if isinstance(s, Box) else _svg_word(s) for s in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(rows) + "\n"


def _svg_box(box: Box) -> str:
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
        f'fill="{_hex(box.fill)}"/>'
    )


def _svg_word(word: Word) -> str:
    turn = f' transform="rotate(-90 {word.x:g} {word.y:g})"' if word.up else ""
    return (
        f'<text x="{word.x:g}" y="{word.y:g}" font-size="{word.size:g}" text-anchor="{word.at}" '
        f'dominant-baseline="central" fill="{_hex(word.fill)}"{turn}>{escape(word.text)}</text>'
    )


def _hex(colour: Colour) -> str:
    return "#" + bytes(colour).hex()


def png(drawing: Drawing) -> bytes:
    """Return the drawing as a PNG file, at double size so that small words stay readable."""
    scale = 2 if drawing.width * drawing.height <= 8e6 else 1
    image = Image.new("RGB", (round(drawing.width * scale), round(drawing.height * scale)), _PALE)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            right, bottom = shape.x + shape.width, shape.y + shape.height
            corners = [round(v * scale) for v in (shape.x, shape.y, right, bottom)]
            # Pillow includes the last row and column; thin rows are one at least.
            corners[2:] = [max(a, b - 1) for a, b in zip(corners[:2], corners[2:], strict=True)]
            pen.rectangle(corners, fill=shape.fill)
        else:
            _png_word(image, pen, shape, scale)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def _png_word(image: Image.Image, pen: ImageDraw.ImageDraw, word: Word, scale: int) -> None:
    font = ImageFont.load_default(word.size * scale)
    x, y = word.x * scale, word.y * scale
    if not word.up:
        pen.text((x, y), word.text, fill=word.fill, font=font, anchor=_ANCHORS[word.at])
        return
    length, height = math.ceil(font.getlength(word.text)) + 2, round(word.size * scale * 1.6)
    strip = Image.new("RGB", (length, height), _PALE)
    ImageDraw.Draw(strip).text((0, height / 2), word.text, fill=word.fill, font=font, anchor="lm")
    image.paste(strip.rotate(90, expand=True), (round(x - height / 2), round(y - length)))
