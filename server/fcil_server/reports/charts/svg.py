"""Parts of charts in inline SVG: axes and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 280  # user units; the page scales them
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_POINT = 1e-100  # values closer together than this are one
MAX_LABELS = 24  # more labels than this on one axis overlap


@dataclass(frozen=True)
class Span:
    """An axis from ``low`` to ``high``."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high one; the middle of a point."""
        wide = self.high - self.low
        return (value - self.low) / wide if wide else 0.5

    def x(self, value: float) -> float:
        """Return the position of a value on the horizontal axis."""
        return LEFT + PLOT_W * self.part(value)

    def y(self, value: float) -> float:
        """Return the position of a value on the vertical axis."""
        return TOP + PLOT_H * (1 - self.part(value))


def scale(most: float) -> tuple[float, list[float]]:
    """Return an axis end of at least ``most`` and three to six round ticks up to it."""
    most = max(most, 1.0)
    magnitude = 1.0
    while magnitude * 10 <= most:
        magnitude *= 10
    step = next(s * magnitude for s in (0.2, 0.5, 1, 2) if s * magnitude * 5 >= most)
    count = 1
    while step * count < most:
        count += 1
    return step * count, [step * i for i in range(count + 1)]


def zoomed(values: Iterable[float]) -> list[float]:
    """Return two to seven round ticks around some values, of which no end is far from them."""
    known = sorted(values) or [0.0, 1.0]
    low, high = known[0], known[-1]
    wide = max(high - low, abs(high) / 10)
    if wide < _POINT:
        wide = 1.0
    digits = -math.floor(math.log10(wide / 5))
    magnitude = 10.0**-digits
    step = next(s * magnitude for s in (1, 2, 5, 10) if s * magnitude * 5 >= wide)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:  # one round value: not above it, which may be beyond what there can be
        first, last = (first - 1, last) if first > 0 else (first, last + 1)
    return [round(step * i, digits + 2) for i in range(first, last + 1)]


def grid(ticks: Sequence[tuple[float, str]], axis: Span) -> str:
    """Draw a line with its label for each (value, label)."""
    lines = []
    for value, label in ticks:
        y = axis.y(value)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return "".join(lines)


def x_labels(x: Sequence[float], labels: Sequence[str], title: str) -> list[str]:
    """Write labels below the axis, as many as fit, and the axis' title."""
    every = -(-len(labels) // MAX_LABELS)
    y = TOP + PLOT_H
    marks = [
        f'<text x="{px:.1f}" y="{y + 18}" text-anchor="{_anchor(px)}">{escape(label)}</text>'
        for i, (px, label) in enumerate(zip(x, labels, strict=True))
        if i % every == 0
    ]
    middle = LEFT + PLOT_W / 2
    marks.append(f'<text x="{middle:.0f}" y="{y + 38}" text-anchor="middle">{escape(title)}</text>')
    return marks


def _anchor(x: float) -> str:
    """Return the anchor of a label: centred, it would be cut at the right edge."""
    return "end" if x > LEFT + PLOT_W - 1 else "middle"
