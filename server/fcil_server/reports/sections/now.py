"""The section about the present: the round under way, its clients, and their missing answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fcil_server.ledger.labels import progress_of
from fcil_server.reports.charts.history import History
from fcil_server.reports.sections.params import Params

_PHASES = {
    "starting": "starting",
    "opening": "opening a task",
    "publishing": "preparing the broadcast",
    "gathering": "waiting for clients",
    "collecting": "collecting updates",
    "aggregating": "aggregating updates",
    "evaluating": "evaluating the model",
    "paused": "paused",
    "drained": "drained",
    "done": "done",
}
_MODES = {
    "paused": "Paused by the operator: no further round opens.",
    "draining": "Draining: no further round opens, then the server stops.",
}
# Answers of a round's clients, in words, with their ratings.
_ANSWERS = {
    "updated": ("has answered", "good"),
    "declined": ("declined", "warn"),
    "lost": ("is away", "bad"),
    "late": ("arrived too late", "bad"),
    "surplus": ("is not needed", "quiet"),
}


def short_status(history: History, live: Mapping[str, Any] | None) -> str:
    """Return the run's status in a few words: for the head of the page and the window's title."""
    run = history.run
    if run is None:
        return "no run yet"
    older = history.newer or (live is not None and live["run"] != run.run_id)
    if history.frozen or older:
        return run.status.value
    if live is None:
        return "server stopped" if run.status.value == "running" else run.status.value
    at = live.get("round")
    where = f"task {at['task']}, {_round(at)}: " if at else ""
    return f"{where}{_phase(live)}"


def view(history: History, live: Mapping[str, Any] | None, _: Params) -> dict[str, Any]:
    """Return the template's values."""
    known: dict[str, Any] = {
        "clients": [],
        "at": None,
        "last": next(reversed(history.rounds), None),
    }
    if history.newer:
        return {**known, "state": "older", "current": history.newer}
    if live is None:
        return {**known, "state": "stopped"}
    if history.run is not None and live["run"] != history.run.run_id:  # it has just begun
        return {**known, "state": "older", "current": live["run"]}
    at = live.get("round")
    return {
        **known,
        "state": "live",
        "phase": _phase(live),
        "mode": _MODES.get(live["mode"], ""),
        "order": live["mode"],
        "waits": live.get("waiting_for") or "",
        "at": at and {"until": None, **at},
        "title": f"Task {at['task']}, {_round(at)}" if at else "",
        "percent": _percent(at) if at else 0,
        "clients": [_client(one) for one in at["clients"]] if at else [],
        "connected": live["connected"],
        "ready": live["ready"],
    }


def _phase(live: Mapping[str, Any]) -> str:
    word = str(live["mode"] if live["mode"] == "paused" else live["phase"])
    return _PHASES.get(word, word)


def _round(at: Mapping[str, Any]) -> str:
    of = f" (the last is {at['rounds'] - 1})" if (at.get("rounds") or 0) > 1 else ""
    return f"{at['kind']} round {at['round']}{of}"


def _percent(at: Mapping[str, Any]) -> int:
    """Return how much of a round's work is done, in percent of that of all that may answer.

    Clients that are not listed count once they have answered.
    """
    working = (one for one in at["clients"] if one["answer"] == "none")
    done = at["answered"] + sum(map(_share, working))
    return int(min(100.0, 100.0 * done / max(1, at["asked"] - at["declined"])))


def _share(one: Mapping[str, Any]) -> float:
    """Return the part of its work that a client has done by its own report."""
    if one["expected"] is not None:
        return 1.0  # all that is left is to send it
    what, done, total = one.get("progress") or ("", 0, 0)
    # Fetching comes before the work.
    return min(1.0, done / total) if total and what != "fetching" else 0.0


def _client(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client of the round: its state in words, and its bytes under way, if any."""
    words, look = _ANSWERS.get(one["answer"], ("", ""))
    if not words:
        words, look = _at_work(one)
    if one.get("reason"):
        words = f"{words}: {one['reason']}"
    expected = one.get("expected")
    return {
        "id": one["id"],
        "name": one["name"],
        "words": words,
        "look": look,
        "received": one["received"],
        "expected": expected,
        "lost": one["answer"] == "lost" or (one["answer"] == "none" and not one["here"]),
    }


def _at_work(one: Mapping[str, Any]) -> tuple[str, str]:
    if not one["here"]:
        return "is away", "bad"
    if one["expected"] is not None:
        return "sends its update", "good"
    if one["paused"]:
        return "stalled", "warn"
    progress = one.get("progress")
    return progress_of(*progress) if progress else "was asked", "quiet"
