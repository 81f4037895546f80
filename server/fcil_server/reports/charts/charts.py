"""The dashboard's charts, and their HTML.

`spec.Chart` is the one description of a chart: `drawing.draw` makes its static picture, and
`figure` combines the picture, the data for the browser's interactive chart, and a table of the same
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from fcil_protocol.formats import format_bytes
from fcil_server.ledger.enums import Direction
from fcil_server.reports.charts.drawing import draw
from fcil_server.reports.charts.history import RoundLine
from fcil_server.reports.charts.render import template
from fcil_server.reports.charts.spec import (
    STYLES,
    Chart,
    LevelLine,
    Mark,
    Series,
    X,
    Y,
    keys,
    written,
)
from fcil_server.reports.results.metrics import Metrics
from fcil_server.reports.results.round_views import CAUSES, REST

MAX_BARS = 200  # groups of bars; more are indistinguishable, and are summed
_CAUSE_STYLES = "bacdef"  # of `CAUSES` and `REST`
_PHASES = (
    ("collect_s", "collecting", "a"),
    ("aggregate_s", "aggregating", "b"),
    ("save_s", "saving", "c"),
)
_OTHER = ""  # stands for all other phases


def figure(chart: Chart) -> Markup:
    """Return a chart's HTML: key, picture, data for the script, and a table of its numbers."""
    return template(
        "chart.html",
        chart=chart,
        keys=keys(chart),
        picture=draw(chart),
        spec=htmlsafe_json_dumps(chart.to_json(), separators=(",", ":"), allow_nan=False),
        head=_head(chart),
        rows=list(_rows(chart)),
    )


def static_html(chart: Chart) -> Markup:
    """Return a chart's HTML without scripts and tables: key and picture."""
    return template("still.html", chart=chart, keys=keys(chart), picture=draw(chart))


def _head(chart: Chart) -> list[str]:
    if chart.kind == "xy":
        return ["", chart.x.title, chart.title]
    return [chart.x.title, *(s.title for s in chart.series)]


def _rows(chart: Chart) -> Iterable[list[str]]:
    """Yield the numbers of a chart as rows of a table, the newest first."""
    if chart.kind == "xy":
        for s in chart.series:
            for x, y in reversed(s.points):
                yield [s.name, written(x, chart.x.unit), written(y, chart.y.unit)]
        return
    names = chart.x.names or chart.x.labels or ()
    for i, name in reversed(list(enumerate(names))):
        yield [name, *(written(s.values[i], chart.y.unit) for s in chart.series)]


# --- the charts -------------------------------------------------------------------------------


def accuracy(m: Metrics) -> Chart:
    """A_t (task mean and sample-weighted) and the accuracy on the newest task over t."""
    lines = (
        ("task mean", "a", m.task_mean),
        ("all images", "b", m.sample_weighted),
        ("newest task alone", "c", tuple(row[-1] for row in m.matrix)),
    )
    return over_tasks("accuracy", "Accuracy over tasks in percent", lines)


def over_tasks(
    name: str, title: str, lines: Iterable[tuple[str, str, Sequence[float | None]]]
) -> Chart:
    """Percent over tasks, a line for each (name, style, values)."""
    series = tuple(
        Series(called, style, tuple(None if v is None else round(v, 3) for v in values))
        for called, style, values in lines
    )
    tasks = range(max((len(s.values) for s in series), default=0))
    names = tuple(f"after task {t}" for t in tasks)
    x = X("after task", tuple(map(str, tasks)), names)
    return Chart(name, "lines", title, x, Y("%", 100, zoom=True), series)


def cost(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], name: str = "cost") -> Chart:
    """Accuracy after each task over the bytes on the wire until then, a line per (name, points)."""
    series = tuple(
        Series(
            called, STYLES[i % len(STYLES)], points=tuple((int(x), round(y, 3)) for x, y in points)
        )
        for i, (called, points) in enumerate(lines)
    )
    title = "Accuracy over all classes seen, by bytes on the wire"
    x = X("on the wire, up and down", unit="B")
    return Chart(name, "xy", title, x, Y("%", 100, zoom=True), series)


def traffic(rounds: Sequence[RoundLine], claimed: float | None = None) -> Chart:
    """The bytes on the wire up and down, stacked by cause.

    Args:
        rounds: closed ones, in order.
        claimed: a level to draw as a line: the paper's count for a round.
    """
    groups, x, marks = _grouped(rounds)
    series = []
    for way in Direction:
        stacks = [by_cause(group, way) for group in groups]
        for name, style in zip([*CAUSES.values(), REST], _CAUSE_STYLES, strict=True):
            values = tuple(stack[name] for stack in stacks)
            if any(values):
                series.append(Series(name, style, values, way.value))
    title = f"Bytes on the wire per {x.title}, all clients: up (left bars) and down (right bars)"
    level = None
    if claimed and x.title == "round":
        level = LevelLine(claimed, f"the paper counts {format_bytes(claimed)} for such a round")
    return Chart("bytes", "bars", title, x, Y("B"), tuple(series), level, marks)


def by_cause(rounds: Iterable[RoundLine], direction: Direction) -> dict[str, int]:
    """Return the wire bytes of some rounds by purpose, with all causes."""
    found = dict.fromkeys([*CAUSES.values(), REST], 0)
    for one in rounds:
        parts = one.up_by if direction is Direction.UP else one.down_by
        for cause, size in zip(CAUSES.values(), parts, strict=True):
            found[cause] += size
        found[REST] += one.bytes_of(direction).rest
    found[REST] = max(0, found[REST])  # bytes on their way when the kernel was read
    return found


def seconds(rounds: Sequence[RoundLine]) -> Chart:
    """The seconds of each round, stacked by phase."""
    groups, x, marks = _grouped(rounds)
    series = []
    for key, name, style in (*_PHASES, (_OTHER, "the rest", "f")):
        values = tuple(round(sum(_spent(r, key) for r in group), 3) for group in groups)
        if any(values):
            series.append(Series(name, style, values, "total"))
    title = f"Seconds per {x.title} by phase"
    return Chart("seconds", "bars", title, x, Y("s"), tuple(series), None, marks)


def training(rounds: Sequence[RoundLine]) -> list[Chart]:
    """The learning curves: loss per round and accuracy per round, where either is known.

    Rounds without any of it are left out.
    """
    told = [r for r in rounds if r.training.loss is not None or r.tested is not None]
    if not told:
        return []
    groups, x, marks = _grouped(told)
    found = []
    losses = [_mean(r.training.loss for r in group) for group in groups]
    if series := _curve("loss", "a", losses):
        title = f"Training loss per {x.title}, mean over the clients' images"
        found.append(Chart("loss", "lines", title, x, Y("", zoom=True), series, None, marks))
    trained = [_mean(r.training.accuracy for r in group) for group in groups]
    tested = [_mean(r.tested for r in group) for group in groups]
    series = (
        *_curve("on the clients' training images", "b", trained, 100),
        *_curve("on the server's test images", "a", tested, 100),
    )
    if series:
        title, y = f"Accuracy per {x.title} in percent", Y("%", 100, zoom=True)
        found.append(Chart("round-accuracy", "lines", title, x, y, series, None, marks))
    return found


def _curve(
    name: str, style: str, values: Sequence[float | None], times: float = 1.0
) -> tuple[Series, ...]:
    """Return a line through values, 5 digits each; none if nothing is known."""
    known = tuple(None if v is None else float(f"{times * v:.5g}") for v in values)
    return (Series(name, style, known),) if any(v is not None for v in known) else ()


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _spent(line: RoundLine, phase: str) -> float:
    if phase != _OTHER:
        return line.phases.get(phase, 0.0)
    known = {key for key, _, _ in _PHASES}
    return sum(spent for key, spent in line.phases.items() if key not in known)


def _grouped(
    rounds: Sequence[RoundLine],
) -> tuple[list[list[RoundLine]], X, tuple[Mark, ...]]:
    """Group rounds so that no chart has more bars than a reader can distinguish.

    Returns:
        Each round alone, or those of a task, or of several tasks; the axis that names them; and the
        beginnings of tasks.
    """
    if len(rounds) <= MAX_BARS:
        names = tuple(round_name(r) for r in rounds)
        x = X("round", tuple(str(r.seq) for r in rounds), names)
        starts = [i for i, r in enumerate(rounds) if i and r.key.task != rounds[i - 1].key.task]
        marks = tuple(Mark(i, f"task {rounds[i].key.task}") for i in starts)
        return [[r] for r in rounds], x, marks
    tasks = sorted({r.key.task for r in rounds})
    each = -(-len(tasks) // MAX_BARS)  # tasks in a group
    place = {task: i // each for i, task in enumerate(tasks)}
    groups = [list(g) for _, g in groupby(rounds, key=lambda r: place[r.key.task])]
    spans = [(group[0].key.task, group[-1].key.task) for group in groups]
    labels = tuple(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    one = "task" if each == 1 else f"{each} tasks"
    names = tuple(
        f"{'task' if a == b else 'tasks'} {t}" for (a, b), t in zip(spans, labels, strict=True)
    )
    return groups, X(one, labels, names), ()


def round_name(line: RoundLine) -> str:
    """Return the name of a round."""
    return f"task {line.key.task}, {line.key.kind} {line.key.round}"
