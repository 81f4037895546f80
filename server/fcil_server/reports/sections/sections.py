"""The sections of the dashboard, each made from a run's `History` and the server's live answer.

Pure: the same history, answer and parameters give the same HTML, so that dashboards receive only
changes. The report consists of the same sections, frozen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from fcil_server.ledger.enums import Direction, RunStatus
from fcil_server.reports.charts.history import History
from fcil_server.reports.charts.render import template
from fcil_server.reports.results.run_data import shown_environment
from fcil_server.reports.sections import accuracy, clients, events, now, rounds, tasks, traffic
from fcil_server.reports.sections.params import Params

__all__ = ["SECTIONS", "Live", "Params", "section"]

Live = Mapping[str, Any]


def section(
    name: str,
    history: History,
    live: Live | None,
    params: Params | None = None,
    *,
    acts: bool = False,
) -> Markup:
    """Return a section as HTML.

    Args:
        name: one of `SECTIONS`.
        history: the run.
        live: the server's answer to ``live``; None while it does not answer.
        params: the visitor's parameters of this section.
        acts: True if the visitor may act: buttons are shown.
    """
    asked = params or Params()
    context = _VIEWS[name](history, live, asked)
    path = f"sections/{name}.html"
    return template(path, h=history, run=history.run, params=asked, acts=acts, **context)


def _head(history: History, live: Live | None, _: Params) -> dict[str, Any]:
    faa, aia, lost = history.headline
    run = history.run
    return {
        "over": run is not None and run.status is not RunStatus.RUNNING,
        "top": now.short_status(history, live),
        "badge": _badge(history, live),
        "faa": faa,
        "aia": aia,
        "lost": lost,
        "up": history.bytes_of(Direction.UP).true_wire,
        "down": history.bytes_of(Direction.DOWN).true_wire,
    }


def _badge(history: History, live: Live | None) -> tuple[str, str]:
    """Return the run's state in a word, and its rating."""
    status = history.run.status.value if history.run else "no run yet"
    if status == "running" and not history.frozen:
        if live is None:
            return status, "quiet"  # another part of the page reports the silent server
        if live["mode"] != "running":
            return str(live["mode"]), "warn"
    looks = {"running": "good", "done": "good", "failed": "bad", "stopped": "warn"}
    return status, looks.get(status, "quiet")


def _configuration(history: History, _: Live | None, __: Params) -> dict[str, Any]:
    run = history.run
    if run is None:
        return {"parts": []}
    parts = (
        ("run", "Configuration of the run", run.config),
        ("method", "Options of the method", json.dumps(run.hparams, indent=2)),
        ("backbone", "Backbone", json.dumps(run.backbone, indent=2)),
        ("environment", "Environment", json.dumps(shown_environment(run), indent=2)),
    )
    return {"parts": parts}


_VIEWS: Mapping[str, Callable[[History, Live | None, Params], dict[str, Any]]] = {
    "head": _head,
    "now": now.view,
    "accuracy": accuracy.view,
    "training": rounds.training,
    "clients": clients.view,
    "rounds": rounds.view,
    "bytes": traffic.view,
    "seconds": rounds.seconds,
    "tasks": tasks.view,
    "events": events.view,
    "configuration": _configuration,
}
SECTIONS: tuple[str, ...] = tuple(_VIEWS)
