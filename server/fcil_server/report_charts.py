"""The report's two charts as inline SVG, in the colours of the page (light and dark).

Colours are Okabe and Ito's, told apart by all common forms of colour blindness; series also
differ by marker or position, and every mark carries its numbers as a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from fcil_server.metrics import Metrics
from fcil_server.rundata import RoundView, format_bytes, sum_bytes

WIDTH, HEIGHT = 760, 280  # user units; the page scales them
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_PLOT_W, _PLOT_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_MAX_BARS = 60  # more pairs of bars than this cannot be told apart
_MAX_LABELS = 24  # more labels than this on one axis run into each other


def accuracy_chart(m: Metrics) -> str:
    """Draw A_t (task mean and sample-weighted) and the accuracy on the newest task over t."""
    series = (
        ("task mean", "a", m.task_mean),
        ("all images", "b", m.sample_weighted),
        ("newest task alone", "c", tuple(row[-1] for row in m.matrix)),
    )
    x = [_LEFT + _PLOT_W * (t + 0.5) / m.tasks for t in range(m.tasks)]
    marks = [_grid([(v, f"{v} %") for v in (0, 25, 50, 75, 100)], 100)]
    marks += _x_labels(x, [str(t) for t in range(m.tasks)], "after task")
    for name, style, values in series:
        points = [(x[t], _y(v, 100), t, v) for t, v in enumerate(values) if v is not None]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        marks.append(f'<polyline class="line {style}" points="{line}"/>')
        marks.extend(
            f'<circle class="dot {style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
            f"<title>{name} after task {t}: {v:.2f} %</title></circle>"
            for px, py, t, v in points
        )
    return _figure("Accuracy over tasks in percent", marks, [(n, s) for n, s, _ in series])


def bytes_chart(rounds: Sequence[RoundView]) -> str:
    """Draw predicted wire bytes up and down, with the tensors' share.

    One pair of bars is a round, or a task where there are too many rounds to tell apart.
    """
    by_task = len(rounds) > _MAX_BARS
    groups = [list(g) for _, g in groupby(rounds, key=lambda v: v.round.task if by_task else v)]
    sums = [(sum_bytes(v.up for v in g), sum_bytes(v.down for v in g)) for g in groups]
    top, ticks = _scale(max((b.wire for pair in sums for b in pair), default=0))
    marks = [_grid([(t, format_bytes(t)) for t in ticks], top)]
    step = _PLOT_W / max(1, len(groups))
    centres = [_LEFT + step * (i + 0.5) for i in range(len(groups))]
    firsts = [g[0].round for g in groups]
    labels = [str(r.task if by_task else r.seq) for r in firsts]
    marks += _x_labels(centres, labels, "task" if by_task else "round (in order)")
    width = min(28.0, step * 0.4)
    for i, (row, (up, down)) in enumerate(zip(firsts, sums, strict=True)):
        if i and not by_task and row.task != firsts[i - 1].task:
            x = _LEFT + step * i
            marks.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _PLOT_H}"/>'
            )
        name = f"task {row.task}" + ("" if by_task else f", {row.kind} {row.round}")
        for left, b, way in ((centres[i] - width, up, "up"), (centres[i], down, "down")):
            title = f"{name}, {way}: {format_bytes(b.wire)}, {format_bytes(b.tensor)} of tensors"
            marks.append(f"<g><title>{escape(title)}</title>")
            marks += _bar(left, width, (_y(b.tensor, top), _y(b.wire, top)), _BARS[way])
    legend = [("up to the server", "b"), ("down to the clients", "a"), ("not tensors", "rest")]
    unit = "task" if by_task else "round"
    return _figure(f"Bytes on the wire per {unit}, all clients, predicted", marks, legend)


_BARS = {"up": "b", "down": "a"}  # way -> style


def _bar(x: float, width: float, ends: tuple[float, float], style: str) -> Iterable[str]:
    """Draw tensors below and the rest above; ``ends`` are the y of tensors and of all."""
    bottom = _y(0, 1)
    for kind, low, high in ((style, bottom, ends[0]), (f"{style} rest", *ends)):
        yield (
            f'<rect class="fill {kind}" x="{x:.1f}" y="{high:.1f}" width="{width:.1f}" '
            f'height="{low - high:.1f}"/>'
        )
    yield "</g>"


def _y(value: float, top: float) -> float:
    return _TOP + _PLOT_H * (1 - value / top)


def _scale(most: float) -> tuple[float, list[float]]:
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


def _grid(ticks: Sequence[tuple[float, str]], top: float) -> str:
    lines = []
    for value, label in ticks:
        y = _y(value, top)
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return "".join(lines)


def _x_labels(x: Sequence[float], labels: Sequence[str], title: str) -> list[str]:
    every = -(-len(labels) // _MAX_LABELS)
    y = _TOP + _PLOT_H
    marks = [
        f'<text x="{px:.1f}" y="{y + 18}" text-anchor="middle">{escape(label)}</text>'
        for i, (px, label) in enumerate(zip(x, labels, strict=True))
        if i % every == 0
    ]
    middle = _LEFT + _PLOT_W / 2
    marks.append(f'<text x="{middle:.0f}" y="{y + 38}" text-anchor="middle">{title}</text>')
    return marks


def _figure(title: str, marks: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f'<span class="key {style}">{escape(name)}</span>' for name, style in legend)
    return (
        f"<figure><figcaption>{escape(title)}<br>{keys}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(marks)}</svg></figure>"
    )


STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #59636e; --page: #ffffff;
  --card: #f4f6f8; --line: #d5dbe1; --a: #0072b2; --b: #d55e00; --c: #009e73; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --faint: #9aa4ae;
  --page: #14171a; --card: #1f2429; --line: #363d44; --a: #56b4e9; --b: #f0803c; --c: #2fc79a; } }
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
.c { stroke: var(--c); fill: var(--c); } .line.a, .line.b, .line.c { fill: none; }
.fill { stroke: none; } .fill.rest { opacity: .45; }
.key { margin-right: 1.2rem; } .key::before { content: ""; display: inline-block; width: .8rem;
  height: .8rem; margin-right: .4rem; border-radius: .2rem; vertical-align: -.1rem; }
.key.a::before { background: var(--a); } .key.b::before { background: var(--b); }
.key.c::before { background: var(--c); } .key.rest::before { background: var(--faint);
  opacity: .45; }
details { margin: .6rem 0; } summary { cursor: pointer; }
@media print { body { max-width: none; } details { display: block; } }
"""
