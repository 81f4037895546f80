"""The run directory's PNGs, drawn by matplotlib without a display.

matplotlib is imported only here and only when something is drawn. Colours are Okabe and
Ito's and the cividis map, readable with every common form of colour blindness and in grey.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from fcil_server.ledger_rows import Direction
from fcil_server.metrics import Metrics
from fcil_server.rundata import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#59636e"
_DPI = 150
_WRITTEN_CELLS = 20  # tasks up to which every cell carries its number
_MAX_TICKS = 25
_MAX_BARS = 60  # rounds; more are drawn as lines


def draw(data: RunData) -> dict[str, bytes]:
    """Return file name -> PNG of every plot that the run has numbers for."""
    figures: dict[str, Figure] = {}
    m = data.metrics
    if m is not None:
        figures["accuracy_matrix.png"] = _matrix(data, m)
        figures["accuracy.png"] = _accuracy(data, m)
    if data.rounds:
        figures["bytes_per_round.png"] = _bytes_per_round(data)
    return {name: _png(figure) for name, figure in figures.items()}


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure (inches) without pyplot, whose global list would keep it alive."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    # No software or date in the file: the same numbers give the same bytes.
    figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


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


def _bytes_per_round(data: RunData) -> Figure:
    rounds = data.rounds
    figure, axes = _new(min(16.0, max(7.0, 2.0 + 0.3 * len(rounds))), 4.2)
    x = np.arange(len(rounds))
    wire = {
        Direction.UP: np.array([v.up.wire for v in rounds], np.float64),
        Direction.DOWN: np.array([v.down.wire for v in rounds], np.float64),
    }
    tensor = {
        Direction.UP: np.array([v.up.tensor for v in rounds], np.float64),
        Direction.DOWN: np.array([v.down.tensor for v in rounds], np.float64),
    }
    scale, unit = _unit(max(float(w.max()) for w in wire.values()))
    looks = ((Direction.UP, -0.2, ORANGE, "up"), (Direction.DOWN, 0.2, BLUE, "down"))
    for way, shift, colour, name in looks:
        low, all_ = tensor[way] / scale, wire[way] / scale
        if len(rounds) > _MAX_BARS:
            axes.step(x, all_, where="mid", color=colour, label=f"{name}: all")
            axes.step(x, low, where="mid", color=colour, ls=":", label=f"{name}: tensors")
            continue
        axes.bar(x + shift, low, 0.4, color=colour, label=f"{name}: tensors")
        rest: dict[str, Any] = {"alpha": 0.4, "label": f"{name}: everything else"}
        axes.bar(x + shift, all_ - low, 0.4, bottom=low, color=colour, **rest)
    axes.set_ylim(bottom=0)
    _grid(axes)
    _task_marks(axes, [v.round.task for v in rounds])
    every = -(-len(rounds) // _MAX_TICKS)
    axes.set_xticks(x[::every])
    if every == 1:
        labels = [f"{v.round.kind} {v.round.round}" for v in rounds]
        axes.set_xticklabels(labels, rotation=45, ha="right", fontsize=8)
    else:
        axes.set_xticklabels([str(v.round.seq) for v in rounds[::every]])
        axes.set_xlabel("round (in order)")
    axes.set_ylabel(f"predicted TCP payload, all clients [{unit}]")
    axes.set_title(f"{data.run.method}: bytes on the wire per round", pad=18)
    figure.legend(frameon=False, ncols=4, loc="outside lower center", fontsize=9)
    return figure


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
