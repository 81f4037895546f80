"""The sections about rounds: one by one, how they train, and their seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fcil_protocol.process.terminal import count_of
from fcil_server.ledger.labels import CLOSED_BY
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.history import History, RoundLine
from fcil_server.reports.sections.params import Params, cut

OTHER_S = 1.0  # of a round that may belong to no phase without mention
_LISTED = 200  # rounds that a report lists; more are summed by task


@dataclass(frozen=True)
class RoundText:
    """A round in words."""

    line: RoundLine
    end: str
    look: str
    seconds: float
    phases: str


@dataclass(frozen=True)
class TaskSum:
    """The rounds of a task together."""

    task: int
    rounds: int
    counted: int
    asked: int
    seconds: float
    up: int
    down: int


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    shown = _newest(history, params)
    everything = history.frozen or params.most is None
    by_task = everything and len(shown) > _LISTED
    rows: Sequence[Any]
    if by_task:
        sums = [_sum(task, list(g)) for task, g in groupby(shown, key=lambda r: r.key.task)]
        rows = sums
    else:
        rows = [_row(line) for line in shown]
    return {
        "by_task": by_task,
        "cut": cut(rows[::-1], 1 if history.frozen else params.page, _LISTED),
    }


def seconds(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the values for the template of the section about time."""
    shown = _newest(history, params)
    return {"chart": charts.figure(charts.seconds(shown)) if shown else ""}


def training(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the values for the template of the section with the learning curves."""
    return {"charts": [charts.figure(one) for one in charts.training(_newest(history, params))]}


def _newest(history: History, params: Params) -> Sequence[RoundLine]:
    everything = history.frozen or params.most is None
    return history.rounds if everything else history.rounds[-(params.most or 0) :]


def _row(line: RoundLine) -> RoundText:
    outcome = line.outcome.value if line.outcome else ""
    told = [
        CLOSED_BY.get(line.why, ""),
        f"reopened {line.reopened} x" if line.reopened else "",
        f"{count_of(line.stale, 'stale update')}, up to {count_of(line.oldest, 'state')} old"
        if line.stale
        else "",
    ]
    how = ", ".join(filter(None, told))
    look = {"done": "good", "short": "warn", "skipped": "bad"}.get(outcome, "quiet")
    seconds = (line.closed_at or line.opened_at) - line.opened_at
    spent = {k.removesuffix("_s"): v for k, v in line.phases.items()}
    # Time before a kill of the server belongs to no phase.
    if (other := seconds - sum(spent.values())) > max(OTHER_S, seconds / 20):
        spent["before a restart, or waiting"] = other
    phases = ", ".join(f"{k} {v:.2f} s" for k, v in spent.items())
    return RoundText(line, f"{outcome} ({how})" if how else outcome, look, seconds, phases)


def _sum(task: int, lines: Sequence[RoundLine]) -> TaskSum:
    return TaskSum(
        task=task,
        rounds=len(lines),
        counted=sum(r.counted for r in lines),
        asked=sum(r.asked for r in lines),
        seconds=sum((r.closed_at or r.opened_at) - r.opened_at for r in lines),
        up=sum(r.up.true_wire for r in lines),
        down=sum(r.down.true_wire for r in lines),
    )
