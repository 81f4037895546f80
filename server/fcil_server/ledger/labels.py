"""The ledger's words as people read them, in terminals, reports and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLOSED_BY = {
    "taken": "closed with as many updates as it takes",
    "deadline": "closed at its deadline",
    "operator": "closed by the operator",
    "rest_of_task": "closed by the operator, with the rest of its task",
    "given_up": "not asked for: the first rounds of its kind brought no update",
    "unsure": "not asked for: too few test images were classified rightly",
    "unchanged": "not asked for: the model is that of the evaluation before",
    "no_holder": "too few connected clients held images for it",
    "void": "void: its updates could not be combined, and none in particular is to blame",
    "too_few": "fewer updates than round.min_updates",
}
ANSWERS = {
    "straggler": "arrived too late",
    "lost": "was away",
    "declined": "declined",
    "surplus": "was not needed",
}


GONE = ("left", "revoked", "erased")  # states of those who are members no more


def short_device(device: str) -> str:
    """Return a device as a table has room for it: ``cpu, 2 threads``; the rest is in JSON."""
    name, _, facts = device.partition(" (")
    kept = [
        "1 thread" if fact == "1 threads" else fact  # as version 0.1.0 wrote it
        for fact in facts.rstrip(")").split(", ")
        if fact.endswith((" thread", " threads"))
        or (name.startswith("cuda") and not fact.startswith("torch"))
    ]
    return ", ".join(filter(None, [name, *kept]))


def progress_of(what: str, done: int, total: int) -> str:
    """Say how far a client's work is, whose units differ from one kind of work to another."""
    return f"{what} {100 * done // total} %" if total else what


def name_with_relay(row: Mapping[str, Any]) -> str:
    """Return a member's name, if it is a relay, and the relay that it connects through."""
    name = f"{row['name']} (relay)" if row["role"] == "relay" else str(row["name"])
    return f"{name} via {row['via']}" if row["via"] else name
