"""The static picture of a chart, as SVG: for readers without scripts, on paper and in a mail.

Colours and dashes come from the page's style by class; every mark of a short chart carries its
numbers as a tooltip. It contains no style attribute: the page's policy forbids those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from markupsafe import Markup

from fcil_protocol.formats import format_bytes
from fcil_server.reports.charts.spec import Chart, Series, Unit, written
from fcil_server.reports.charts.svg import (
    HEIGHT,
    LEFT,
    MAX_LABELS,
    PLOT_H,
    PLOT_W,
    TOP,
    WIDTH,
    Span,
    grid,
    scale,
    x_labels,
    zoomed,
)

_TOOLTIPS = 120  # places on the axis up to which each has a tooltip
_WIDEST = 28.0  # user units of a bar
_THINNEST = 0.1  # pieces of a bar below this are invisible
# Hatches over the colour of a bar's pieces, in a square of 6 by 6: one per style.
_HATCHES = {
    "a": "",
    "b": "M-1 7L7 -1M-1 1L1 -1M5 7L7 5",
    "c": "M-1 -1L7 7M5 -1L7 1M-1 5L1 7",
    "d": "M0 3H6",
    "e": "M-1 7L7 -1M-1 -1L7 7",
    "f": "M3 0V6",
}


def draw(chart: Chart) -> Markup:
    """Draw a chart as an SVG element; its title is the text for screen readers."""
    values = _y_ticks(chart)
    axis = Span(values[0], values[-1])
    marks = [grid([(v, _tick(v, chart.y.unit)) for v in values], axis)]
    if chart.kind == "xy":
        marks += _points(chart, axis)
    else:
        marks += _places(chart, axis)
    if chart.level is not None and axis.low < chart.level.value <= axis.high:
        marks.append(_level(chart.level.value, chart.level.text, axis))
    text = escape(chart.title)
    return Markup(  # noqa: S704 - all text in it is escaped where it is put in
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text}">{"".join(marks)}</svg>'
    )


def _y_ticks(chart: Chart) -> list[float]:
    if chart.y.zoom:
        return zoomed(_heights(chart))
    if chart.y.max is not None:
        return [chart.y.max * part / 4 for part in range(5)]
    return scale(max(_heights(chart), default=0.0))[1]


def _tick(value: float, unit: Unit) -> str:
    return format_bytes(value) if unit == "B" else f"{value:g} {unit}".rstrip()


def _heights(chart: Chart) -> Iterator[float]:
    for series in chart.series:
        if series.stack is None:
            yield from (v for v in series.values if v is not None)
            yield from (y for _, y in series.points)
    for _, pieces in _stacks(chart):
        yield from (sum(column) for column in _columns(pieces))


def _stacks(chart: Chart) -> list[tuple[str, list[Series]]]:
    """Return the bars at each place, with the series stacked in each."""
    names = dict.fromkeys(s.stack for s in chart.series if s.stack is not None)
    order = sorted(names, key=("up", "down", "total").index)
    return [(name, [s for s in chart.series if s.stack == name]) for name in order]


def _columns(pieces: Sequence[Series]) -> Iterator[tuple[float, ...]]:
    yield from zip(*(tuple(v or 0.0 for v in s.values) for s in pieces), strict=True)


# --- places side by side: lines and bars -----------------------------------------------------


def _places(chart: Chart, axis: Span) -> list[str]:
    labels = chart.x.labels or ()
    step = PLOT_W / max(1, len(labels))
    centres = [LEFT + step * (i + 0.5) for i in range(len(labels))]
    marks = x_labels(centres, labels, chart.x.title)
    marks += _task_marks(chart, step)
    stacks = _stacks(chart)
    width = min(_WIDEST, step * 0.8 / max(1, len(stacks)))
    for number, (_, pieces) in enumerate(stacks):
        lefts = [x + width * (number - len(stacks) / 2) for x in centres]
        marks += _bars(chart, pieces, lefts, width, axis)
    names = chart.x.names or labels
    for series in chart.series:
        if series.stack is None:
            marks += _line(
                chart, series, list(zip(centres, names, series.values, strict=True)), axis
            )
    if stacks and len(names) <= _TOOLTIPS:
        marks += [
            f'<rect class="hit" x="{x - step / 2:.1f}" y="{TOP}" width="{step:.1f}" '
            f'height="{PLOT_H}"><title>{escape(_tooltip(chart, i))}</title></rect>'
            for i, x in enumerate(centres)
        ]
    return marks


def _tooltip(chart: Chart, i: int) -> str:
    names = chart.x.names or chart.x.labels or ()
    told = [f"{s.title} {written(s.values[i], chart.y.unit)}" for s in chart.series if s.values[i]]
    return f"{names[i]}: {', '.join(told) or 'nothing'}"


def _task_marks(chart: Chart, step: float) -> list[str]:
    """Draw the beginnings of tasks, and name as many as fit."""
    every = -(-len(chart.marks) // (MAX_LABELS // 2))
    marks = []
    for number, mark in enumerate(chart.marks):
        x = LEFT + step * mark.at
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + PLOT_H}"/>'
        )
        if number % every == 0:
            marks.append(f'<text x="{x + 3:.1f}" y="{TOP - 4}">{escape(mark.text)}</text>')
    return marks


def _bars(
    chart: Chart, pieces: Sequence[Series], lefts: Sequence[float], width: float, axis: Span
) -> list[str]:
    """Draw one bar at each place; all pieces of one series are one path."""
    paths = [""] * len(pieces)
    for left, column in zip(lefts, _columns(pieces), strict=True):
        total, low = 0.0, axis.y(0)
        for k, value in enumerate(column):
            total += value
            high = axis.y(total)
            if low - high >= _THINNEST:
                paths[k] += f"M{left:.1f} {high:.1f}h{width:.1f}v{low - high:.1f}h-{width:.1f}z"
                low = high
    marks = []
    for series, path in zip(pieces, paths, strict=True):
        style = series.style
        marks.append(f'<path class="fill {style}" d="{path}"/>')
        if _HATCHES[style]:
            name = f"hatch-{chart.name}-{series.stack}-{style}"
            marks.append(
                f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
                f'<path class="hatch" d="{_HATCHES[style]}"/></pattern>'
                f'<path fill="url(#{name})" d="{path}"/>'
            )
    return marks


def _line(
    chart: Chart, series: Series, places: Sequence[tuple[float, str, float | None]], axis: Span
) -> list[str]:
    marks = []
    for is_known, group in groupby(places, key=lambda place: place[2] is not None):
        if is_known:  # unknown values are gaps
            joined = " ".join(f"{x:.1f},{axis.y(v or 0.0):.1f}" for x, _, v in group)
            marks.append(f'<polyline class="line {series.style}" points="{joined}"/>')
    if len(places) > _TOOLTIPS:
        return marks
    for x, name, value in places:
        if value is not None:
            text = f"{series.name} {name}: {written(value, chart.y.unit)}"
            marks.append(_dot(series.style, x, axis.y(value), text))
    return marks


# --- points at their own x -------------------------------------------------------------------


def _points(chart: Chart, axis: Span) -> list[str]:
    ticks = zoomed(x for s in chart.series for x, _ in s.points)
    across = Span(ticks[0], ticks[-1])
    at = [across.x(tick) for tick in ticks]
    marks = x_labels(at, [_tick(t, chart.x.unit) for t in ticks], chart.x.title)
    for series in chart.series:
        places = [(across.x(x), axis.y(y)) for x, y in series.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks.append(f'<polyline class="line {series.style}" points="{joined}"/>')
        if len(places) > _TOOLTIPS:
            continue
        for (px, py), (x, y) in zip(places, series.points, strict=True):
            told = f"{written(y, chart.y.unit)} for {written(x, chart.x.unit)}"
            marks.append(_dot(series.style, px, py, f"{series.name}: {told}"))
    return marks


def _dot(style: str, x: float, y: float, text: str) -> str:
    return (
        f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{escape(text)}</title></circle>"
    )


def _level(value: float, text: str, axis: Span) -> str:
    y = axis.y(value)
    return (
        f'<line class="line f" x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT + 6}" y="{y - 5:.1f}">{escape(text)}</text>'
    )
