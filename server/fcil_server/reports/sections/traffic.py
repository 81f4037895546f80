"""The bytes section: true ones per round by cause, next to the claims of the method's paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fcil_protocol.formats import NOTHING, format_bytes
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.ledger.enums import Cause, Direction
from fcil_server.reports.charts import charts
from fcil_server.reports.charts.history import History, RoundLine
from fcil_server.reports.results.round_views import Bytes
from fcil_server.reports.sections.params import Params
from fcil_server.reports.traffic.broadcast_parts import TRAIN
from fcil_server.reports.traffic.paper_claims import Account

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


# --- next to the paper ------------------------------------------------------------------------


def accounts(history: History) -> list[Account]:
    """Return all ways to count a client's bytes in a round, the paper's first.

    This run's numbers are means over its ``train`` rounds, like those of papers: up over the
    received updates, down over the asked clients. The last line spreads all of the run's wire bytes
    over these, including those of other rounds.
    """
    learning = [r for r in history.rounds if r.key.kind != EVALUATE]
    rounds = [r for r in learning if r.key.kind == TRAIN] or learning
    everything = [history.bytes_of(d).true_wire for d in (Direction.UP, Direction.DOWN)]
    found = list(history.paper.accounts)
    for how, ways in (
        ("this run, tensors alone", _sums((r.up.tensor, r.down.tensor) for r in rounds)),
        ("this run, on the wire", _sums((r.up.true_wire, r.down.true_wire) for r in rounds)),
        ("this run, all rounds and joining", (everything[0], everything[1])),
    ):
        found.append(Account(how, *_means(rounds, *ways)))
    return found


def claimed_round_bytes(history: History) -> float | None:
    """Return the paper's bytes for a round of this run, all clients, one way.

    Only for a run in the paper's own setting: other numbers would not be comparable.
    """
    claim, run = history.paper.claim, history.run
    if claim is None or claim.up_bytes is None or run is None:
        return None
    sizes = {len(t.class_ids) for t in history.tasks}
    name = str(run.backbone.get("name", "")).partition(".")[0]
    if name != claim.backbone or sizes != {claim.classes}:
        return None
    return float(claim.up_bytes * max((r.asked for r in history.rounds), default=0))


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    up = down = 0
    for a, b in pairs:
        up, down = up + a, down + b
    return up, down


def _means(rounds: list[RoundLine], up: int, down: int) -> tuple[float | None, float | None]:
    """Return bytes up per update of these rounds, and down per asked client."""
    updates = sum(r.updates for r in rounds)
    asked = sum(r.asked for r in rounds)
    return (up / updates if updates else None, down / asked if asked else None)
