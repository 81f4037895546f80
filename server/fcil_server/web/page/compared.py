"""Data of compared runs, their differences, and reasons why they may not be comparable."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fcil_protocol.errors import CorruptFile
from fcil_protocol.ids import RunId
from fcil_server.ledger.enums import Direction, RunStatus
from fcil_server.ledger.rows import RunRow
from fcil_server.reports.charts.history import History
from fcil_server.reports.results.run_data import comparison_row
from fcil_server.reports.sections.accuracy import cost_by_task

_TOLD = 80  # characters of a setting
_APART = ("federation",)  # sections of a configuration that describe a machine, not a run


@dataclass(frozen=True)
class Compared:
    """Compared data of a run; small, so that many can be kept.

    Attributes:
        cells: its line of the table of headlines, without its name.
        points: (bytes, percent) after each task.
        settings: its settings at the start.
        tasks: the class names of each task, sorted; ``images``: tested after the last one.
    """

    run: RunId
    method: str
    status: RunStatus
    cells: tuple[str, ...]
    points: tuple[tuple[float, float], ...]
    settings: Mapping[str, str]
    tasks: tuple[tuple[str, ...], ...]
    images: int
    pooled: bool


def compared(history: History) -> Compared:
    """Return the compared data of a run."""
    run, m = history.run, history.metrics
    assert run is not None, "a run that was asked for is there"
    ways = [history.bytes_of(d) for d in Direction]
    tasks = tuple(
        tuple(sorted(history.name_of_class(i) for i in task.class_ids)) for task in history.tasks
    )
    return Compared(
        run=run.run_id,
        method=run.method,
        status=run.status,
        cells=comparison_row("", run.method, history.headline, ways)[1:],
        points=tuple(cost_by_task(history)),
        settings=settings(run, len(tasks)),
        tasks=tasks,
        images=m.test_images[-1] if m else 0,
        pooled=history.pooled is not None,
    )


def settings(run: RunRow, tasks: int) -> dict[str, str]:
    """Return a run's settings at its start, flat, as texts.

    Raises:
        CorruptFile: they are no configuration.
    """
    try:
        config = tomllib.loads(run.config)
    except tomllib.TOMLDecodeError as error:
        raise CorruptFile(f"the configuration of run {run.run_id} is damaged: {error}.") from error
    found: dict[str, Any] = {
        "method": run.method,
        "method version": run.method_version,
        "seed": run.seed,
        "tasks": tasks,
        **_flat("backbone", run.backbone),
        **_flat("option", run.hparams),
    }
    own = {name: part for name, part in config.items() if name not in (*_APART, "method")}
    for name, part in own.items():
        found |= _flat(f"[{name}]", part) if isinstance(part, dict) else {name: part}
    return {name: _told(value) for name, value in found.items()}


def _flat(before: str, part: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            found |= _flat(f"{before} {name}", value)
        else:
            found[f"{before} {name}"] = value
    return found


def _told(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}…"


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, with each run's; empty: it has no such setting."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    lines = [(name, [run.settings.get(name, "") for run in runs]) for name in names]
    return [line for line in lines if len(set(line[1])) > 1]


def warnings(runs: Sequence[Compared]) -> list[str]:
    """Return why runs may not be comparable."""
    evaluated = [run for run in runs if run.points]
    found = []
    if any(_unlike(one, other) for one, other in combinations(runs, 2)):
        found.append(
            "The runs do not learn the same classes in the same tasks: their accuracies are of "
            "different problems."
        )
    elif len({len(run.tasks) for run in runs}) > 1:
        found.append("The runs have reached different numbers of tasks.")
    elif len({run.images for run in evaluated}) > 1:
        found.append(
            "The runs were tested on different numbers of images: their data, or who held it, "
            "differ."
        )
    if len({run.pooled for run in evaluated}) > 1:
        found.append("Some runs were tested on the clients' images, others on the server's folder.")
    if any(run.status is RunStatus.RUNNING for run in runs):
        found.append("A run is still in progress: its numbers are as of now.")
    return found


def _unlike(one: Compared, other: Compared) -> bool:
    """Return True if two runs learned other classes in a task that both have reached."""
    return any(a != b for a, b in zip(one.tasks, other.tasks, strict=False))
