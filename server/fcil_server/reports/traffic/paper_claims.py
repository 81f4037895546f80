"""A method's bytes by its paper, next to the prediction and to this run's."""

from __future__ import annotations

from dataclasses import dataclass

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Method, registry
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.contract.traffic import Claim
from fcil_protocol.errors import FcilError
from fcil_server.federation import config as configuration
from fcil_server.ledger.rows import RunRow
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.prediction import predict


@dataclass(frozen=True)
class Account:
    """One way to count a client's bytes in a round; None if it gives no number."""

    how: str
    up: float | None
    down: float | None


@dataclass(frozen=True)
class PaperTraffic:
    """A paper's claim about a method's bytes, and the method's bytes in the paper's setting."""

    claim: Claim | None = None
    accounts: tuple[Account, ...] = ()


def paper_of(run: RunRow) -> PaperTraffic:
    """Return the claims of the paper of a run's method; none without the method's package.

    The method's bytes in the paper's setting are predicted from its schemas.
    """
    try:
        method: Method = _in_forms(registry.load_method(run.method), run)
    except FcilError:
        return PaperTraffic()
    claim = method.claim
    return (
        PaperTraffic()
        if claim is None
        else PaperTraffic(claim, tuple(_accounts(run, method, claim)))
    )


def _in_forms(method: Method, run: RunRow) -> Method:
    half = configuration.parse(run.config).wire.half
    return registry.with_forms(method, forms_of(half, method.name, method.half))


def _accounts(run: RunRow, method: Method, claim: Claim) -> list[Account]:
    where = f"{claim.backbone}, {claim.classes} classes a task"
    found = [Account(f"the paper ({where})", claim.up_bytes, claim.down_bytes)]
    try:
        hparams = registry.make_hparams(method, dict(run.hparams))
        traffic = predict(
            method,
            hparams,
            TrafficSetting(backbone_by_name(claim.backbone), claim.classes, clients=claim.clients),
        )
    except FcilError:  # the run's options do not fit that backbone, or are another version's
        return found
    up, down = traffic.round
    return [*found, Account(f"its tensors with this run's options ({where})", up.bytes, down.bytes)]
