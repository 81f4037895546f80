"""The section about events: what happened, newest first, and what to do about it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fcil_protocol.errors import all_errors
from fcil_server.ledger.rows import Event
from fcil_server.reports.charts.history import History
from fcil_server.reports.sections.params import Params, cut, matches

_LOOKS = {"info": "quiet", "warning": "warn", "error": "bad"}


@dataclass(frozen=True)
class EventRow:
    """An event, how bad it is, and what may be done; empty where its text says so itself."""

    event: Event
    look: str
    action: str


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return what the section shows."""
    found = [e for e in history.events if matches(params.find, e.text, e.code, e.level)]
    page = cut(found, params.page)
    rows = [EventRow(e, _LOOKS.get(e.level, "quiet"), action_for(e)) for e in page.items]
    return {"cut": page, "rows": rows}


def action_for(event: Event) -> str:
    """Return what the catalogue of errors advises, where an event is one of them."""
    if event.level == "info":
        return ""
    return advice_for(event.code, event.text)


def advice_for(code: str, text: str) -> str:
    """Return what the catalogue advises for a code, unless a text says so itself."""
    advice = _advice().get(code, "")
    return "" if advice in text else advice


@functools.cache
def _advice() -> Mapping[str, str]:
    return {error.code: error.default_action() for error in all_errors()}
