"""The tasks section, with the class names as they were discovered."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fcil_server.ledger.rows import ClassRow, TaskRow
from fcil_server.reports.charts.history import History
from fcil_server.reports.sections.params import Params, cut, matches

_NAMED = 12  # classes of a task that are named in its line


@dataclass(frozen=True)
class TaskText:
    """A task with the names of its first classes."""

    task: TaskRow
    names: tuple[str, ...]
    more: int
    rounds: int


@dataclass(frozen=True)
class ClassLine:
    """A class name: its first client (empty: an erased one), and its task."""

    row: ClassRow
    by: str
    state: str

    @property
    def waits(self) -> bool:
        """True if no task has it yet."""
        return self.row.task is None

    @property
    def id(self) -> str:
        """Return the id of its row in the HTML, safe for any name."""
        return f"class-{hashlib.sha256(self.row.key.encode()).hexdigest()[:12]}"


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    counts = Counter(r.key.task for r in history.rounds)
    tasks = [_task(history, t, counts[t.task]) for t in history.tasks]
    names: dict[str, str] = {m.client: m.name for m in history.members}
    lines = [_line(c, names) for c in history.classes]
    waiting = [one for one in lines if one.waits]
    found = [
        one
        for one in lines
        if one.row.task is not None and matches(params.find, one.row.name, one.by, one.state)
    ]
    kept = params.most or 200
    return {
        "tasks": tasks[::-1][:kept],
        "hidden": max(0, len(tasks) - kept),
        "waiting": waiting,
        "asked": any(not one.row.admitted for one in waiting),
        "classes": len(lines),
        "cut": cut(found[::-1], params.page, 200 if history.frozen else 50),
    }


def _task(history: History, task: TaskRow, rounds: int) -> TaskText:
    ids = task.class_ids
    names = tuple(history.name_of_class(i) for i in ids[:_NAMED])
    return TaskText(task, names, len(ids) - len(names), rounds)


def _line(row: ClassRow, names: Mapping[str, str]) -> ClassLine:
    if row.first_seen_by:
        by = names.get(row.first_seen_by, row.first_seen_by[:8])
    else:
        by = "" if row.planned_task is None else "the configuration"
    if row.task is not None:
        state = f"task {row.task}"
    elif row.planned_task is not None:
        state = f"planned for task {row.planned_task}"
    else:
        state = "waits for a task" if row.admitted else "waits for your approval"
    return ClassLine(row, by, f"{state}, hidden" if row.hidden else state)
