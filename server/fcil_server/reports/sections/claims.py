"""A method's bytes by its paper, next to those of the run."""

from __future__ import annotations

from collections.abc import Iterable

from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.ledger.enums import Direction
from fcil_server.reports.charts.history import History, RoundLine
from fcil_server.reports.traffic.broadcast_parts import TRAIN
from fcil_server.reports.traffic.paper_claims import Account


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
