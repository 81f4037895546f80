"""What charts in inline SVG are made of: axes, labels, a figure with its key, the page's style.

Colours are Okabe and Ito's, told apart by all common forms of colour blindness; series also
differ by marker, dashes or position, and every mark carries its numbers as a tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 760, 280  # user units; the page scales them
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_LABELS = 24  # more labels than this on one axis run into each other

_THINNEST = 0.1  # pieces of a bar below this cannot be seen


def y_of(value: float, top: float) -> float:
    """Return where a value lies on an axis from 0 to ``top``."""
    return TOP + PLOT_H * (1 - value / top)


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


def grid(ticks: Sequence[tuple[float, str]], top: float) -> str:
    """Draw a line with its label for each (value, label)."""
    lines = []
    for value, label in ticks:
        y = y_of(value, top)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return "".join(lines)


def x_labels(x: Sequence[float], labels: Sequence[str], title: str) -> list[str]:
    """Write labels below the axis, as many as fit, and what they are."""
    every = -(-len(labels) // MAX_LABELS)
    y = TOP + PLOT_H
    marks = [
        f'<text x="{px:.1f}" y="{y + 18}" text-anchor="middle">{escape(label)}</text>'
        for i, (px, label) in enumerate(zip(x, labels, strict=True))
        if i % every == 0
    ]
    middle = LEFT + PLOT_W / 2
    marks.append(f'<text x="{middle:.0f}" y="{y + 38}" text-anchor="middle">{title}</text>')
    return marks


def stack(x: float, width: float, ends: Sequence[float], styles: Sequence[str]) -> list[str]:
    """Draw a bar of pieces from the axis up; ``ends`` are their upper ends in y."""
    pieces, low = [], y_of(0, 1)
    for style, high in zip(styles, ends, strict=True):
        if low - high >= _THINNEST:
            pieces.append(
                f'<rect class="fill {style}" x="{x:.1f}" y="{high:.1f}" width="{width:.1f}" '
                f'height="{low - high:.1f}"/>'
            )
            low = high
    return pieces


def figure(title: str, marks: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    """Put marks and a legend of (name, style) under a title.

    The title is what a screen reader says of the drawing.
    """
    keys = "".join(f'<span class="key {style}">{escape(name)}</span>' for name, style in legend)
    return (
        f"<figure><figcaption>{escape(title)}<br>{keys}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(marks)}</svg></figure>"
    )


STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #59636e; --page: #ffffff;
  --card: #f4f6f8; --line: #d5dbe1; --a: #0072b2; --b: #d55e00; --c: #009e73;
  --d: #cc79a7; --e: #8a6d00; --f: #59636e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --faint: #9aa4ae;
  --page: #14171a; --card: #1f2429; --line: #363d44; --a: #56b4e9; --b: #f0803c; --c: #2fc79a;
  --d: #e3a0c4; --e: #e0c14a; --f: #9aa4ae; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .faint, figcaption, th { color: var(--faint); }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .8rem; border-radius: .4rem; white-space: pre-wrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; }
.card { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 24rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  font-weight: 400; white-space: nowrap; }
th.text, td.text { text-align: left; white-space: normal; }
.heat td { border: 2px solid var(--page); text-align: center; }
.heat td.strong { color: #ffffff; }
figure { margin: 0; } svg { width: 100%; height: auto; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2; }
.line.c { stroke-dasharray: 5 4; } .line.b { stroke-dasharray: 1 3; stroke-linecap: round; }
.a { stroke: var(--a); fill: var(--a); } .b { stroke: var(--b); fill: var(--b); }
.c { stroke: var(--c); fill: var(--c); } .d { stroke: var(--d); fill: var(--d); }
.e { stroke: var(--e); fill: var(--e); } .f { stroke: var(--f); fill: var(--f); }
.line.a, .line.b, .line.c, .line.d, .line.e, .line.f { fill: none; }
.line.d { stroke-dasharray: 9 3; } .line.e { stroke-dasharray: 9 3 2 3; }
.line.f { stroke-dasharray: 3 3; }
.fill { stroke: none; } .fill.rest { opacity: .45; }
.key { margin-right: 1.2rem; } .key::before { content: ""; display: inline-block; width: .8rem;
  height: .8rem; margin-right: .4rem; border-radius: .2rem; vertical-align: -.1rem; }
.key.a::before { background: var(--a); } .key.b::before { background: var(--b); }
.key.c::before { background: var(--c); } .key.d::before { background: var(--d); }
.key.e::before { background: var(--e); } .key.f::before { background: var(--f); }
.key.rest::before { background: var(--faint);
  opacity: .45; }
details { margin: .6rem 0; } summary { cursor: pointer; }
@media print { body { max-width: none; } details { display: block; } }
"""
