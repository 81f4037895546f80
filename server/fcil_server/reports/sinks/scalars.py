"""A run's metrics as names and numbers, for curves. Pure.

Rounds count from the run's first (step = ``seq``), tasks from 0. Names of clients and classes are
excluded: a sink may be far away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fcil_server.ledger.rows import Evaluation
from fcil_server.reports.results.metrics import compute, headline
from fcil_server.reports.results.round_views import RoundView

SIZES = ("tensor", "true_wire")


def of_round(view: RoundView) -> dict[str, float]:
    """Return a round's numbers of participants, and its seconds."""
    line = view.line()
    counts = {n: float(len(line[n])) for n in ("asked", "counted", "excluded", "silent", "stale")}
    seconds = {name.removesuffix("_s"): value for name, value in line["seconds"].items()}
    trained = {
        "training/loss": view.training.loss,
        "training/accuracy": _percent(view.training.accuracy),
        "server/accuracy_of_round": _percent(view.tested),
    }
    known = {name: value for name, value in trained.items() if value is not None}
    return _under("round", counts) | _under("seconds", seconds) | known


def bytes_of_round(view: RoundView, up: int, down: int) -> dict[str, float]:
    """Return a round's bytes.

    Args:
        view: the round.
        up: true bytes of all rounds up to it, from clients.
        down: the same, to clients.
    """
    line = view.line()["bytes"]
    sizes = {f"{way}_{size}": float(line[way][size]) for way in ("up", "down") for size in SIZES}
    return _under("bytes", sizes | {"up_so_far": float(up), "down_so_far": float(down)})


def of_task(
    rows: Iterable[Evaluation], tasks: Sequence[Sequence[int]], task: int, judge: str
) -> dict[str, float]:
    """Return accuracies in percent and forgetting in points, as of a task's end.

    Args:
        rows: of one kind of judge alone.
        tasks: class ids of each task.
        task: the task.
        judge: owner of the test images; the names begin with it.
    """
    found = compute([row for row in rows if row.task <= task], tasks)
    assert found is not None, "the task was evaluated"
    faa, _, lost = headline(found)
    named = {
        "accuracy": faa,
        "accuracy_of_images": found.faa_sample_weighted,
        "forgetting": lost,
        **{f"accuracy_of_task_{i}": value for i, value in enumerate(found.matrix[-1])},
    }
    return _under(judge, {name: value for name, value in named.items() if value is not None})


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _under(group: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in values.items()}
