"""The terms of a run for a relay that adds up updates, read from a client's Welcome."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, TaskInfo, registry
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.numerics.relay_sums import RunningSum, SummedUpdate
from fcil_protocol.envelopes.header import Header
from fcil_protocol.errors import FcilError, MethodMismatch, SchemaMismatch
from fcil_protocol.ids import FederationId, RoundKey, RunId
from fcil_protocol.messages.messages import RoundOpen, Welcome
from fcil_protocol.payloads.builtin import (
    metric_faults,
    training_metrics,
    with_training_metrics,
    without_training_metrics,
)
from fcil_protocol.payloads.payload import MAX_HEADER_BYTES, Payload
from fcil_protocol.payloads.schema import Kind


@dataclass(frozen=True)
class SumTerms:
    """A run whose updates a relay may open."""

    federation: FederationId
    run: str
    method: Method
    hparams: Hparams
    info: BackboneInfo
    schema_digest: str
    compact: bool

    @classmethod
    def of(cls, welcome: Welcome, federation: FederationId) -> SumTerms:
        """Read the terms.

        Raises:
            MethodMismatch: the method is not installed here as it is on the server.
        """
        try:
            method = registry.load_method(welcome.method)
            forms = Forms(frozenset(Kind(name) for name in welcome.half))
            method = registry.with_forms(method, forms)
            hparams = method.hparams.model_validate(json.loads(welcome.hparams))
            info = backbone_from_fields(json.loads(welcome.backbone))
            digest = registry.schema_digest(method, hparams, info, welcome.privacy)
        except (FcilError, ValueError) as error:
            raise _mismatch(welcome) from error
        if digest != welcome.schema_digest:
            raise _mismatch(welcome)
        return cls(federation, welcome.run, method, hparams, info, digest, welcome.compact)

    def round(self, order: RoundOpen) -> RoundTerms | None:
        """Return the terms of a round; None: its updates are no sums, or it is of another run."""
        exchanges = self.method.exchanges(self.hparams, self.info)
        exchange = next((e for e in exchanges if e.kind == order.kind and e.summable), None)
        if exchange is None or order.run != self.run:
            return None
        task = TaskInfo(order.task, tuple(order.classes), tuple(order.past))
        dims = self.method.dims(self.hparams, self.info, task)
        return RoundTerms(self, order.key, order.base, task, exchange, dims)


@dataclass(frozen=True)
class RoundTerms:
    """A round whose updates a relay adds up.

    Attributes:
        base: number of the state that it starts from.
        dims: the known symbols of its uploads.
    """

    terms: SumTerms
    key: RoundKey
    base: int
    task: TaskInfo
    exchange: Exchange
    dims: Mapping[str, int]

    def is_of(self, other: RoundTerms) -> bool:
        """Return True if these are the terms of the same round."""
        return (self.key, self.base) == (other.key, other.base)

    def fits(self, header: Header) -> bool:
        """Return True if an update is for this round and no larger than it can be."""
        core, terms = header.core, self.terms
        got = (core.federation, core.direction, core.schema, core.base)
        own = (terms.federation, "update", terms.schema_digest, self.base)
        key = RoundKey(RunId(core.run), core.task, core.kind, core.round)
        most = self.exchange.upload.max_bytes(self.dims) + MAX_HEADER_BYTES
        return key == self.key and got == own and header.plain_bytes <= most

    def new_sum(self) -> RunningSum:
        """Return an empty sum."""
        assert self.exchange.additive is not None, "`SumTerms.round` makes no others"
        return RunningSum(self.exchange.additive, self.dims)

    def add(self, total: RunningSum, digest: str, payload: Payload) -> None:
        """Check the payload of an update as the server does, and add it to a sum.

        Raises:
            SchemaMismatch: it is not what the server takes, or of no samples.
            DataError: a number is too large to be added in fixed point.
        """
        method, schema = self.terms.method, self.exchange.upload
        if method.reports_training(self.exchange):
            schema = with_training_metrics(schema)
        metrics, own = training_metrics(payload), without_training_metrics(payload)
        faults = schema.check_upload(payload, self.dims) or metric_faults(metrics)
        faults = faults or self.exchange.check(own, self.task)
        samples = 0 if faults else int(payload.i64("n").sum())
        if not samples:
            raise SchemaMismatch(f"{'; '.join(faults) or 'it was made from no samples'}.")
        update = SummedUpdate(digest, samples, payload.tensor_bytes, metrics)
        total.add(method.forms.widen(own), update)


def _mismatch(welcome: Welcome) -> MethodMismatch:
    package = welcome.method_package or "the package that brings the method on the server"
    return MethodMismatch(
        f"the relay cannot add up updates of method {welcome.method!r} "
        f"{welcome.method_version}: it has no such method here, or another version.",
        action=f"Install the server's {package} for the relay and start it again. Until then the "
        "relay passes updates on.",
    )
