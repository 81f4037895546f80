"""The events section: events, newest first, and their remedies."""

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
    """An event, its rating, and its remedy; empty if its text contains it."""

    event: Event
    look: str
    action: str


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    found = [e for e in history.events if matches(params.find, e.text, e.code, e.level)]
    page = cut(found, params.page)
    rows = [EventRow(e, _LOOKS.get(e.level, "quiet"), action_for(e)) for e in page.items]
    return {"cut": page, "rows": rows}


def action_for(event: Event) -> str:
    """Return the error catalogue's advice, if an event is an error."""
    if event.level == "info":
        return ""
    return advice_for(event.code, event.text)


def advice_for(code: str, text: str) -> str:
    """Return the error catalogue's advice for a code, unless a text contains it."""
    advice = _advice().get(code, "")
    return "" if advice in text else advice


@functools.cache
def _advice() -> Mapping[str, str]:
    return {error.code: error.default_action() for error in all_errors()}
