"""The terms of a run for a relay that adds up updates, read from a client's Welcome."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, TaskInfo, registry
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.numerics.relay_sums import RunningSum, SumMember
from fcil_protocol.errors import FcilError, MethodMismatch, SchemaMismatch
from fcil_protocol.ids import FederationId
from fcil_protocol.messages.messages import Welcome
from fcil_protocol.payloads.builtin import (
    metric_faults,
    training_metrics,
    with_training_metrics,
    without_training_metrics,
)
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind

SLACK_BYTES = 1 << 20  # safetensors header and metadata


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

    def exchange(self, kind: str) -> Exchange | None:
        """Return the method's exchange of a kind, if its updates can be added up."""
        exchanges = self.method.exchanges(self.hparams, self.info)
        return next((e for e in exchanges if e.kind == kind and e.summable), None)

    def most_bytes(self, exchange: Exchange, task: TaskInfo) -> int:
        """Return the size of the largest payload of an exchange."""
        dims = self.method.dims(self.hparams, self.info, task)
        return exchange.upload.max_bytes(dims) + SLACK_BYTES

    def new_sum(self, exchange: Exchange, task: TaskInfo) -> RunningSum:
        """Return an empty sum for a round."""
        assert exchange.additive is not None, "`exchange` returns no other"
        dims = self.method.dims(self.hparams, self.info, task)
        return RunningSum(exchange.additive, dims)

    def add(
        self, total: RunningSum, exchange: Exchange, task: TaskInfo, digest: str, payload: Payload
    ) -> None:
        """Check an opened update as the server does, and add it to a sum.

        Raises:
            SchemaMismatch: it is not what the server takes, or of no samples.
            DataError: a number is too large to be added in fixed point.
        """
        dims = self.method.dims(self.hparams, self.info, task)
        schema = exchange.upload
        if self.method.reports_training(exchange):
            schema = with_training_metrics(schema)
        metrics, own = training_metrics(payload), without_training_metrics(payload)
        faults = schema.check_upload(payload, dims) or metric_faults(metrics)
        faults = faults or exchange.check(own, task)
        samples = 0 if faults else int(payload.i64("n").sum())
        if not samples:
            raise SchemaMismatch(f"{'; '.join(faults) or 'it was made from no samples'}.")
        member = SumMember(digest, samples, payload.tensor_bytes, metrics)
        total.add(self.method.forms.widen(own), member)


def _mismatch(welcome: Welcome) -> MethodMismatch:
    package = welcome.method_package or "the package that brings the method on the server"
    return MethodMismatch(
        f"the relay cannot add up updates of method {welcome.method!r} "
        f"{welcome.method_version}: it has no such method here, or another version.",
        action=f"Install the server's {package} for the relay and start it again. It passes the "
        "updates on.",
    )
