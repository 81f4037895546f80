"""A chart as data, the source of the static picture, the interactive one and the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fcil_protocol.formats import NOTHING, format_bytes

Unit = Literal["%", "B", "s", ""]
Number = float | int | None

STYLES = "abcdef"


@dataclass(frozen=True)
class Series:
    """One line, or the pieces of one kind in all bars.

    Attributes:
        style: a letter of `STYLES`: a colour, and a dash or hatch.
        values: one for each place on the x axis; None: unknown.
        stack: the bar at a place that contains the pieces; None: drawn as a line.
        points: (x, y) instead of values, for a chart of kind ``xy``.
    """

    name: str
    style: str
    values: tuple[Number, ...] = ()
    stack: Literal["up", "down", "total"] | None = None
    points: tuple[tuple[float, float], ...] = ()

    @property
    def title(self) -> str:
        """Name, with the direction if there are two."""
        return f"{self.stack}: {self.name}" if self.stack in ("up", "down") else self.name


@dataclass(frozen=True)
class X:
    """The horizontal axis.

    Attributes:
        labels: short, below the axis; None for kind ``xy``.
        names: the same in words, for tooltips and tables.
    """

    title: str
    labels: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    unit: Unit = ""


@dataclass(frozen=True)
class Y:
    """The vertical axis, from 0 to ``max`` or the largest value.

    Attributes:
        zoom: it reaches from about the smallest to about the largest value instead, so that small
            differences are seen; never for bars, whose lengths are compared.
    """

    unit: Unit
    max: float | None = None
    zoom: bool = False


@dataclass(frozen=True)
class LevelLine:
    """A line across the chart at a value."""

    value: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A line from top to bottom before the place ``at``."""

    at: int
    text: str


@dataclass(frozen=True)
class Chart:
    """Content of a chart; ``name`` is unique on a page."""

    name: str
    kind: Literal["lines", "bars", "xy"]
    title: str
    x: X
    y: Y
    series: tuple[Series, ...]
    level: LevelLine | None = None
    marks: tuple[Mark, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it in the form that the browser's script reads."""
        found = asdict(self)
        del found["name"]
        for one in found["series"]:
            del one["points" if self.kind != "xy" else "values"]
        return found


def keys(chart: Chart) -> list[tuple[str, str]]:
    """Return (name, style) of each item of the key; a series stacked twice has one."""
    return list(dict.fromkeys((s.name, s.style) for s in chart.series))


def written(value: Number, unit: Unit) -> str:
    """Format a number of a chart for readers."""
    if value is None:
        return NOTHING
    match unit:
        case "%":
            return f"{value:.1f} %"
        case "B":
            return format_bytes(value)
        case "s":
            return f"{value:.2f} s"
    return f"{value:g}"
