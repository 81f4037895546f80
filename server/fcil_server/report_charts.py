"""A run's charts as inline SVG, in the colours of the page (light and dark)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from fcil_server.ledger_rows import Direction
from fcil_server.metrics import Metrics
from fcil_server.rundata import (
    CAUSES,
    REST,
    RoundView,
    RunData,
    by_cause,
    cost_by_task,
    format_bytes,
)
from fcil_server.svg import (
    LEFT,
    PLOT_H,
    PLOT_W,
    TOP,
    figure,
    grid,
    scale,
    stack,
    x_labels,
    y_of,
)

_MAX_BARS = 60  # more pairs of bars than this cannot be told apart


def accuracy_chart(m: Metrics) -> str:
    """Draw A_t (task mean and sample-weighted) and the accuracy on the newest task over t."""
    series = (
        ("task mean", "a", m.task_mean),
        ("all images", "b", m.sample_weighted),
        ("newest task alone", "c", tuple(row[-1] for row in m.matrix)),
    )
    x = [LEFT + PLOT_W * (t + 0.5) / m.tasks for t in range(m.tasks)]
    marks = [grid([(v, f"{v} %") for v in (0, 25, 50, 75, 100)], 100)]
    marks += x_labels(x, [str(t) for t in range(m.tasks)], "after task")
    for name, style, values in series:
        points = [(x[t], y_of(v, 100), t, v) for t, v in enumerate(values) if v is not None]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        marks.append(f'<polyline class="line {style}" points="{line}"/>')
        marks.extend(
            f'<circle class="dot {style}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
            f"<title>{name} after task {t}: {v:.2f} %</title></circle>"
            for px, py, t, v in points
        )
    return figure("Accuracy over tasks in percent", marks, [(n, s) for n, s, _ in series])


_CAUSE_STYLES = "bacdef"  # of `by_cause`, in its order
_PHASES = (
    ("collect_s", "collecting", "a"),
    ("aggregate_s", "aggregating", "b"),
    ("save_s", "saving", "c"),
)


def bytes_chart(rounds: Sequence[RoundView], claimed: float | None = None) -> str:
    """Draw the bytes on the wire up (left bar) and down (right bar), stacked by cause.

    One pair of bars is a round, or a task where there are too many rounds to tell apart.

    Args:
        rounds: closed ones, in order.
        claimed: a level to draw as a line: what the method's paper counts for a round.
    """
    names = [*CAUSES.values(), REST]

    def pieces(group: Sequence[RoundView]) -> list[list[float]]:
        return [[float(n) for n in by_cause(group, d).values()] for d in Direction]

    def title(number: int, values: Sequence[float]) -> str:
        listed = [f"{n} {format_bytes(v)}" for n, v in zip(names, values, strict=True) if v]
        way = ("up", "down")[number]
        return f"{way}: {format_bytes(sum(values))} ({', '.join(listed)})"

    styles = list(_CAUSE_STYLES)
    legend = list(zip(names, styles, strict=True))
    marks, unit, top = _bars(rounds, pieces, title, styles, format_bytes)
    if claimed is not None and 0 < claimed <= top and unit == "round":
        y = y_of(claimed, top)
        text = f"the paper counts {format_bytes(claimed)} for such a round"
        marks.append(
            f'<line class="line f" x1="{LEFT}" x2="{LEFT + PLOT_W}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{escape(text)}</title></line>"
            f'<text x="{LEFT + 6}" y="{y - 5:.1f}">{escape(text)}</text>'
        )
    caption = f"Bytes on the wire per {unit}, all clients: up (left bars) and down (right bars)"
    return figure(caption, marks, legend)


def seconds_chart(rounds: Sequence[RoundView]) -> str:
    """Draw the seconds of each round, stacked by phase."""

    def pieces(group: Sequence[RoundView]) -> list[list[float]]:
        return [[sum(v.round.phases.get(p, 0.0) for v in group) for p, _, _ in _PHASES]]

    def title(_: int, values: Sequence[float]) -> str:
        named = zip(_PHASES, values, strict=True)
        return ", ".join(f"{name} {seconds:.2f} s" for (_, name, _), seconds in named)

    styles = [style for _, _, style in _PHASES]
    marks, unit, _ = _bars(rounds, pieces, title, styles, lambda s: f"{s:g} s")
    legend = [(name, style) for _, name, style in _PHASES]
    return figure(f"Seconds per {unit} by phase", marks, legend)


def cost_chart(runs: Sequence[tuple[str, RunData]]) -> str:
    """Draw accuracy after each task over the bytes on the wire until then, a line per run."""
    lines = [(name, cost_by_task(data)) for name, data in runs]
    most = max((size for _, points in lines for size, _ in points), default=0)
    top, ticks = scale(most)
    marks = [grid([(v, f"{v} %") for v in (0, 25, 50, 75, 100)], 100)]
    at = [LEFT + PLOT_W * t / top for t in ticks]
    marks += x_labels(at, [format_bytes(t) for t in ticks], "on the wire, up and down")
    styles = "abcdef"
    for number, (name, points) in enumerate(lines):
        style = styles[number % len(styles)]
        xy = [(LEFT + PLOT_W * size / top, y_of(accuracy, 100)) for size, accuracy in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy)
        marks.append(f'<polyline class="line {style}" points="{joined}"/>')
        for task, ((x, y), (size, accuracy)) in enumerate(zip(xy, points, strict=True)):
            text = f"{name} after task {task}: {accuracy:.1f} % for {format_bytes(size)}"
            marks.append(
                f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                f"<title>{escape(text)}</title></circle>"
            )
    legend = [(name, styles[i % len(styles)]) for i, (name, _) in enumerate(lines)]
    return figure("Accuracy over all classes seen, by bytes on the wire", marks, legend)


def _bars(
    rounds: Sequence[RoundView],
    pieces: Callable[[Sequence[RoundView]], list[list[float]]],
    title: Callable[[int, Sequence[float]], str],
    styles: Sequence[str],
    unit_of: Callable[[float], str],
) -> tuple[list[str], str, float]:
    """Draw stacked bars side by side for each round, or each task if there are too many rounds.

    Returns:
        The marks, what one group of bars is, and the end of the axis.
    """
    by_task = len(rounds) > _MAX_BARS
    groups = [list(g) for _, g in groupby(rounds, key=lambda v: v.round.task if by_task else v)]
    values = [pieces(group) for group in groups]
    top, ticks = scale(max((sum(bar) for bars in values for bar in bars), default=0))
    step = PLOT_W / max(1, len(groups))
    firsts = [group[0].round for group in groups]
    labels = [str(r.task if by_task else r.seq) for r in firsts]
    marks = [grid([(t, unit_of(t)) for t in ticks], top)]
    centres = [LEFT + step * (i + 0.5) for i in range(len(groups))]
    marks += x_labels(centres, labels, "task" if by_task else "round (in order)")
    for i, (row, bars) in enumerate(zip(firsts, values, strict=True)):
        if i and not by_task and row.task != firsts[i - 1].task:
            x = LEFT + step * i
            marks.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + PLOT_H}"/>'
            )
        width = min(28.0, step * 0.8 / len(bars))
        name = f"task {row.task}" + ("" if by_task else f", {row.kind} {row.round}")
        for number, bar in enumerate(bars):
            ends = [y_of(sum(bar[: k + 1]), top) for k in range(len(bar))]
            left = centres[i] + width * (number - len(bars) / 2)
            marks.append(f"<g><title>{escape(f'{name}, {title(number, bar)}')}</title>")
            marks += [*stack(left, width, ends, styles), "</g>"]
    return marks, "task" if by_task else "round", top
