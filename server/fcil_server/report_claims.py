"""A method's bytes as its paper counts them, beside what they are and what this run took."""

from __future__ import annotations

from dataclasses import dataclass

from fcil_adapters import registry
from fcil_adapters.claims import Claim
from fcil_adapters.contract import Method
from fcil_adapters.forms import forms_of
from fcil_adapters.vit_sizes import backbone_by_name
from fcil_protocol.errors import FcilError
from fcil_protocol.wellknown import EVALUATE
from fcil_server import config as configuration
from fcil_server.ledger_rows import Direction, Source
from fcil_server.rundata import RoundView, RunData, sum_bytes
from fcil_server.traffic import predict
from fcil_server.traffic_parts import TRAIN, Setting


@dataclass(frozen=True)
class Account:
    """One way to count a client's bytes in a round; None where it says nothing."""

    how: str
    up: float | None
    down: float | None


def accounts(data: RunData) -> tuple[Claim | None, list[Account]]:
    """Return what the paper says, and all ways to count, the paper's first.

    What a method would send in the paper's setting is told from its schemas; without the
    method's package it is left out. This run's figures are means over its ``train`` rounds, of
    which papers speak: up over the updates that came, down over the clients that were asked.
    The last line spreads over these all that the run's wire carried, of other rounds too.
    """
    try:
        method: Method | None = _in_forms(registry.load_method(data.run.method), data)
    except FcilError:
        method = None
    claim = method.claim if method is not None else None
    found: list[Account] = []
    if method is not None and claim is not None:
        found = _paper(data, method, claim)
    learning = [v for v in data.rounds if v.round.kind != EVALUATE]
    rounds = [v for v in learning if v.round.kind == TRAIN] or learning
    up, down = (sum_bytes(ways) for ways in ((v.up for v in rounds), (v.down for v in rounds)))
    everything = [data.bytes_of(d) for d in (Direction.UP, Direction.DOWN)]
    for how, ways in (
        ("this run, tensors alone", (up.tensor, down.tensor)),
        ("this run, on the wire", (up.true_wire, down.true_wire)),
        ("this run, all rounds and joining", tuple(b.true_wire for b in everything)),
    ):
        found.append(Account(how, *_means(rounds, *ways)))
    return claim, found


def _in_forms(method: Method, data: RunData) -> Method:
    half = configuration.parse(data.run.config).wire.half
    return registry.in_forms(method, forms_of(half, method.name, method.half))


def claimed_round_bytes(data: RunData) -> float | None:
    """Return what the method's paper would count for a round of this run, all clients, one way.

    Only of a run in the paper's own setting: other figures would compare different things.
    """
    try:
        claim = registry.load_method(data.run.method).claim
    except FcilError:
        return None
    sizes = {len(t.class_ids) for t in data.tasks}
    name = str(data.run.backbone.get("name", "")).partition(".")[0]
    if claim is None or claim.up_bytes is None or name != claim.backbone:
        return None
    asked = max((len(v.round.asked) for v in data.rounds), default=0)
    return float(claim.up_bytes * asked) if sizes == {claim.classes} else None


def _paper(data: RunData, method: Method, claim: Claim) -> list[Account]:
    where = f"{claim.backbone}, {claim.classes} classes a task"
    found = [Account(f"the paper ({where})", claim.up_bytes, claim.down_bytes)]
    try:
        hparams = registry.make_hparams(method, dict(data.run.hparams))
        traffic = predict(
            method,
            hparams,
            Setting(backbone_by_name(claim.backbone), claim.classes, clients=claim.clients),
        )
    except FcilError:  # the run's options do not fit that backbone, or are another version's
        return found
    up, down = traffic.round
    return [*found, Account(f"its tensors with this run's options ({where})", up.bytes, down.bytes)]


def _means(rounds: list[RoundView], up: int, down: int) -> tuple[float | None, float | None]:
    """Return bytes up over the updates of these rounds, and down over the clients asked."""
    updates = sum(len(v.counted) + len(v.excluded) for v in rounds)
    asked = sum(len(v.round.asked) for v in rounds)
    return (up / updates if updates else None, down / asked if asked else None)


def wire_source(data: RunData) -> Source:
    """Return who counted what is called the wire's bytes."""
    kernel = any(data.bytes_of(d).wire_kernel for d in Direction)
    return Source.KERNEL if kernel else Source.PREDICTED
