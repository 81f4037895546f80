"""The run directory's pictures, as PNG and SVG, drawn by matplotlib without a display.

matplotlib is imported only here and only when needed. Colours are Okabe and Ito's and the cividis
map, readable with every common form of colour blindness and in grey.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fcil_server.ledger.enums import Direction
from fcil_server.reports.charts.charts import by_cause
from fcil_server.reports.charts.history import frozen
from fcil_server.reports.results.metrics import Metrics
from fcil_server.reports.results.round_views import CAUSES, REST
from fcil_server.reports.results.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#59636e"
_COLOURS = (ORANGE, BLUE, GREEN, "#cc79a7", "#8a6d00", GREY)
_DPI = 150
_WRITTEN_CELLS = 20  # tasks up to which every cell carries its number
_MAX_TICKS = 25
_MAX_BARS = 60  # rounds; more become lines


@contextmanager
def _plain_style() -> Iterator[None]:
    """Draw in matplotlib's own style, the same everywhere.

    It reads a ``matplotlibrc`` in the current directory before the user's own; with ``text.usetex``
    such a file would start LaTeX.
    """
    from matplotlib import style

    with style.context("default"):
        yield


@_plain_style()
def draw(data: RunData) -> dict[str, bytes]:
    """Return file name -> picture of every plot that the run has numbers for, PNG and SVG."""
    figures: dict[str, Figure] = {}
    m = data.metrics
    if m is not None:
        figures["accuracy_matrix"] = _matrix(data, m)
        figures["accuracy"] = _accuracy(data, m)
    if data.rounds:
        figures["bytes_per_round"] = _bytes_per_round(data)
        figures["seconds_per_round"] = _seconds(data)
    return {k: v for name, figure in figures.items() for k, v in _files(name, figure).items()}


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure (inches) without pyplot, whose global list would keep it alive."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _files(name: str, figure: Figure) -> dict[str, bytes]:
    """Return a figure as files; the same numbers give the same bytes.

    So they contain no software name or date, and names inside an SVG come from its content.
    """
    import matplotlib as mpl

    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": "fcil"}):
        figure.savefig(svg, format="svg", metadata={"Creator": None, "Date": None})
    return {f"{name}.png": png.getvalue(), f"{name}.svg": svg.getvalue()}


def _matrix(data: RunData, m: Metrics) -> Figure:
    T = m.tasks
    S = np.full((T, T), np.nan)  # (T, T), percent
    for t, row in enumerate(m.matrix):
        S[t, : len(row)] = [np.nan if v is None else v for v in row]
    side = min(12.0, max(4.2, 2.0 + 0.55 * T))
    figure, axes = _new(side + 1.0, side)
    image = axes.imshow(np.ma.masked_invalid(S), vmin=0, vmax=100, cmap="cividis")
    if T <= _WRITTEN_CELLS:
        for t in range(T):
            for i in range(t + 1):
                text = "-" if np.isnan(S[t, i]) else f"{S[t, i]:.1f}"
                dark = np.isnan(S[t, i]) or S[t, i] > 48
                colour = "black" if dark else "white"
                axes.text(i, t, text, ha="center", va="center", color=colour, fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_integers())
    axes.set_xlabel("tested on the classes of task")
    axes.set_ylabel("after task")
    axes.set_title(f"{data.run.method}: accuracy matrix")
    axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=axes, label="accuracy [%]", shrink=0.85)
    return figure


def _accuracy(data: RunData, m: Metrics) -> Figure:
    figure, axes = _new(7.0, 4.2)
    t = np.arange(m.tasks)
    newest = [row[-1] for row in m.matrix]
    for values, name, style in (
        (m.task_mean, "mean over seen tasks", {"color": BLUE, "marker": "o"}),
        (
            m.sample_weighted,
            "all test images",
            {"color": ORANGE, "marker": "s", "ls": ":", "mfc": "none", "ms": 9},
        ),
        (newest, "newest task alone", {"color": GREEN, "marker": "^", "ls": "--"}),
    ):
        known = [np.nan if v is None else v for v in values]
        axes.plot(t, known, label=name, **style)
    _grid(axes)
    axes.set_ylim(0, 102)
    axes.xaxis.set_major_locator(_integers())
    axes.set_xlabel("after task")
    axes.set_ylabel("accuracy [%]")
    names = zip(("FAA", "AIA", "forgetting"), data.headline, ("%", "%", "pp"), strict=True)
    numbers = ", ".join(f"{name} {v:.1f} {unit}" for name, v, unit in names if v is not None)
    axes.set_title(f"{data.run.method}: {numbers}")
    axes.legend(frameon=False, loc="lower left")
    return figure


@_plain_style()
def cost(runs: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> dict[str, bytes]:
    """Return file name -> picture of accuracy against bytes, a line for each (name, points)."""
    figure, axes = _new(7.0, 4.2)
    scale, unit = _unit(max((float(b) for _, line in runs for b, _ in line), default=0))
    for number, (name, line) in enumerate(runs):
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)]}
        style |= {"marker": "os^Dvx"[number % 6], "ls": ("-", "--", ":")[number % 3]}
        axes.plot([b / scale for b, _ in line], [a for _, a in line], label=name, **style)
    _grid(axes)
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"on the wire until then, up and down, all clients [{unit}]")
    axes.set_ylabel("accuracy over all classes seen [%]")
    axes.set_title("Accuracy after each task, by its cost")
    axes.legend(frameon=False)
    return _files("accuracy_over_bytes", figure)


def _bytes_per_round(data: RunData) -> Figure:
    lines = frozen(data).rounds
    figure, axes = _new(min(16.0, max(7.0, 2.0 + 0.3 * len(lines))), 4.2)
    x = np.arange(len(lines))
    stacks = {d: [by_cause([one], d) for one in lines] for d in Direction}
    most = max(sum(one.values()) for stack in stacks.values() for one in stack)
    scale, unit = _unit(float(most))
    if len(lines) > _MAX_BARS:
        for way, stack in stacks.items():
            total = np.array([sum(one.values()) for one in stack]) / scale
            colour = ORANGE if way is Direction.UP else BLUE
            axes.step(x, total, where="mid", color=colour, label=way.value)
    else:
        _stacked(axes, x, stacks, scale)
    axes.set_ylim(bottom=0)
    _grid(axes)
    _round_marks(axes, data)
    axes.set_ylabel(f"TCP payload, all clients [{unit}]")
    axes.set_title(f"{data.run.method}: bytes on the wire per round", pad=18)
    figure.legend(frameon=False, ncols=4, loc="outside lower center", fontsize=9)
    return figure


def _stacked(
    axes: Axes,
    x: NDArray[np.int64],
    stacks: Mapping[Direction, list[dict[str, int]]],
    scale: float,
) -> None:
    """Draw up (hatched) next to down, each cause in its colour."""
    for way, shift in ((Direction.UP, -0.2), (Direction.DOWN, 0.2)):
        low = np.zeros(len(x))
        for cause, colour in zip([*CAUSES.values(), REST], _COLOURS, strict=True):
            high = np.array([one[cause] for one in stacks[way]]) / scale
            label = f"{way.value}: {cause}" if high.any() else None
            hatch = "//" if way is Direction.UP else None
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0}
            axes.bar(x + shift, high, 0.4, bottom=low, label=label, **look)
            low += high


def _seconds(data: RunData) -> Figure:
    views = data.rounds
    figure, axes = _new(min(16.0, max(7.0, 2.0 + 0.3 * len(views))), 4.2)
    x, low = np.arange(len(views)), np.zeros(len(views))
    phases = dict.fromkeys(p for v in views for p in v.round.phases)
    for phase, colour in zip(phases, itertools.cycle(_COLOURS), strict=False):
        high = low + [v.round.phases.get(phase, 0.0) for v in views]
        look: dict[str, Any] = {"color": colour, "label": phase.removesuffix("_s")}
        if len(views) > _MAX_BARS:
            axes.fill_between(x, low, high, step="mid", lw=0, **look)
        else:
            axes.bar(x, high - low, 0.6, bottom=low, **look)
        low = high
    _grid(axes)
    _round_marks(axes, data)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.set_title(f"{data.run.method}: seconds per round by phase", pad=18)
    figure.legend(frameon=False, ncols=4, loc="outside lower center", fontsize=9)
    return figure


def _round_marks(axes: Axes, data: RunData) -> None:
    """Name the rounds below the axis, and the tasks above the plot."""
    views = data.rounds
    _task_marks(axes, [v.round.task for v in views])
    every = -(-len(views) // _MAX_TICKS)
    axes.set_xticks(np.arange(len(views))[::every])
    if every == 1:
        labels = [f"{v.round.kind} {v.round.round}" for v in views]
        axes.set_xticklabels(labels, rotation=45, ha="right", fontsize=8)
    else:
        axes.set_xticklabels([str(v.round.seq) for v in views[::every]])
        axes.set_xlabel("round (in order)")


def _task_marks(axes: Axes, tasks: list[int]) -> None:
    """Separate the rounds of different tasks and name the tasks above the plot."""
    axes.set_xlim(-0.6, len(tasks) - 0.4)
    every = -(-len(set(tasks)) // _MAX_TICKS)
    for task in sorted(set(tasks))[::every]:
        first, count = tasks.index(task), tasks.count(task)
        if first:
            axes.axvline(first - 0.5, color=GREY, lw=0.8)
        where: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center"}
        middle = (first + (count - 1) / 2, 1.02)
        axes.annotate(f"task {task}", middle, color=GREY, fontsize=9, **where)


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", color="#d5dbe1", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _integers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=_MAX_TICKS, integer=True)


def _unit(most: float) -> tuple[float, str]:
    """Return the decimal unit in which the largest number has one to three digits."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return scale, unit
    return 1.0, "B"
