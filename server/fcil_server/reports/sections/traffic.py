"""The bytes section: true ones per round by cause, next to the claims of the method's paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fcil_protocol.formats import NOTHING, format_bytes
from fcil_server.ledger.enums import Cause, Direction
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.history import History
from fcil_server.reports.results.round_views import Bytes
from fcil_server.reports.sections.claims import accounts, claimed_round_bytes
from fcil_server.reports.sections.params import Params

LEVELS = (
    "tensors", "sealed", "application", "wire (predicted)", "on the wire (measured)",
    "retransmitted", "Ethernet frames",
)  # fmt: skip
_REST = "heartbeats and the rest: kernel minus predicted"
_CAUSES = {
    Cause.UPDATE: "updates",
    Cause.BROADCAST: "broadcasts",
    Cause.CATCH_UP: "catch-up of clients that were away",
    Cause.HANDSHAKE: "handshakes",
    Cause.CONTROL: "control",
    Cause.CONNECTION: "whole connections",
    Cause.OBJECT_STORE: "parts from the object store, as clients say",
}


def view(history: History, _: Mapping[str, Any] | None, params: Params) -> dict[str, Any]:
    """Return the template's values."""
    rounds = history.rounds
    shown = rounds if history.frozen or params.most is None else rounds[-params.most :]
    claim = history.paper.claim
    return {
        "levels": LEVELS,
        "ways": list(zip(LEVELS, *(_levels(history.bytes_of(d)) for d in Direction), strict=True)),
        "chart": charts.figure(charts.traffic(shown, claimed_round_bytes(history)))
        if shown
        else "",
        "accounts": [(a.how, _told(a.up), _told(a.down)) for a in accounts(history)],
        "claim": claim,
        "causes": _by_cause(history),
    }


def _by_cause(history: History) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        (d.value, _CAUSES[c], *_levels(history.bytes_of(d, c)))
        for d in Direction
        for c in Cause
        if history.bytes_of(d, c) != Bytes()
    ]
    for d, size in history.outside.items():
        if size != Bytes():
            rows.append((d.value, "outside any run", *_levels(size)))
    for d in Direction:
        total = history.bytes_of(d)
        if total.wire_kernel:
            nothing = [NOTHING] * 4
            rest = format_bytes(total.rest)
            rows.append((d.value, _REST, *nothing, rest, NOTHING, NOTHING))
    return rows


def _levels(b: Bytes) -> tuple[str, ...]:
    if b.object_store and not b.wire:  # the sealed bytes, whatever carried them
        return (NOTHING, format_bytes(b.object_store), *[NOTHING] * 5)
    exact = (format_bytes(n) for n in (b.tensor, b.sealed, b.application, b.wire))
    if not b.wire_kernel:
        return (*exact, *[NOTHING] * 3)
    return (*exact, *(format_bytes(n) for n in (b.wire_kernel, b.retransmitted, b.link)))


def _told(size: float | None) -> str:
    return "not stated" if size is None else format_bytes(size)
