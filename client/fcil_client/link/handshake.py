"""The handshake before the first round, seen from the client."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

import fcil_protocol
from fcil_adapters.contract import (
    BackboneInfo,
    Exchange,
    Hparams,
    Method,
    TaskInfo,
    registry,
)
from fcil_adapters.contract.backbone_info import backbone_from_fields, preprocessing_digest
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.contract.manifest_checks import check_privacy, check_uploads
from fcil_adapters.contract.source_code import blaming
from fcil_adapters.masks.exchanges import in_terms
from fcil_client.state.home import Enrolment
from fcil_client.state.privacy_budget import check_installed
from fcil_protocol.envelopes.window import MAX_WINDOW_BYTES
from fcil_protocol.errors import (
    BackboneMismatch,
    ConfigError,
    EgressRefused,
    FcilError,
    MethodMismatch,
    TrustError,
    VersionMismatch,
    WireError,
)
from fcil_protocol.ids import is_run_id
from fcil_protocol.messages.messages import (
    NO_PRIVACY,
    BackboneClaim,
    Bye,
    Hello,
    PrivacyTerms,
    Welcome,
)
from fcil_protocol.payloads.builtin import (
    EVALUATE,
    EVALUATE_SCHEMA,
    INVENTORY,
    INVENTORY_SCHEMA,
    metric_faults,
    result_faults,
    training_metrics,
    with_training_metrics,
    without_training_metrics,
)
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema
from fcil_protocol.payloads.upload_rules import schema_faults
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PublicKeys

# Refusals of the session that no retry can fix.
FATAL = frozenset({
    "version_mismatch", "method_mismatch", "backbone_mismatch", "not_trusted", "unknown_client",
    "wrong_federation", "key_file", "revoked", "membership_expired",
})  # fmt: skip

_OWN_SCHEMAS = {EVALUATE: EVALUATE_SCHEMA, INVENTORY: INVENTORY_SCHEMA}


@dataclass(frozen=True)
class Terms:
    """The content of a verified Welcome, in usable form: the run's method, options and backbone.

    Attributes:
        compact: payloads are compact, both ways.
        training_metrics: trained updates hold the loss and accuracy of their training.
        object_store: what addresses of large parts begin with; empty: the server sends all parts.
        relay_name, relay: the relay that adds up this client's updates; None: the server alone
            opens them.
    """

    run: str
    method: Method
    hparams: Hparams
    backbone: BackboneInfo
    schema_digest: str
    max_payload_bytes: int
    credit: int
    privacy: PrivacyTerms = NO_PRIVACY
    compact: bool = False
    training_metrics: bool = False
    object_store: str = ""
    relay_name: str = ""
    relay: PublicKeys | None = None

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the run's method."""
        return self.method.exchanges(self.hparams, self.backbone)

    def exchange(self, kind: str) -> Exchange | None:
        """Return the method's exchange of one kind; None: the kind is the protocol's own."""
        return next((e for e in self.exchanges if e.kind == kind), None)

    def summing_relay(self, kind: str) -> PublicKeys | None:
        """Return the keys of the relay that adds up updates of one kind of round, if one does."""
        exchange = self.exchange(kind)
        return self.relay if exchange is not None and exchange.summable else None

    def dims(self, task: TaskInfo, kind: str) -> dict[str, int]:
        """Return the known symbols of an upload's schema."""
        if kind == EVALUATE:
            return {"seen": len(task.seen)}
        return self.method.dims(self.hparams, self.backbone, task)

    def upload_schema(self, kind: str) -> PayloadSchema:
        """Return the schema of uploads in rounds of one kind, or of the inventory.

        Raises:
            MethodMismatch: the method has no such exchange.
        """
        if kind in _OWN_SCHEMAS:
            return _OWN_SCHEMAS[kind]
        exchange = registry.find_exchange(self.method, self.hparams, self.backbone, kind)
        shared = self.training_metrics and self.method.reports_training(exchange)
        return with_training_metrics(exchange.upload) if shared else exchange.upload

    def check_upload(self, kind: str, payload: Payload, task: TaskInfo) -> list[str]:
        """Return every way in which a payload must not leave the device."""
        dims = self.dims(task, kind)
        schema = self.upload_schema(kind)
        if kind == EVALUATE:
            return schema.check(payload, dims) or result_faults(payload, task.seen)
        exchange = registry.find_exchange(self.method, self.hparams, self.backbone, kind)
        faults = schema_faults(exchange.upload, dims) or schema.check(payload, dims)
        faults = faults or metric_faults(training_metrics(payload))
        return faults or exchange.check(without_training_metrics(payload), task)


def hello(
    enrolment: Enrolment,
    *,
    nonce: bytes,
    session_key: bytes | None,
    package: str,
    methods: list[str],
    device: str,
    terms: Terms | None,
    claim: BackboneClaim | None,
    ready: bool,
) -> Hello:
    """Build a Hello.

    Args:
        enrolment: the client's enrolment.
        nonce: the client's, drawn for this session.
        session_key: the client's public key for the session; None for a guest's.
        package: version of the fcil package.
        methods: result of `installed_methods`.
        device: the client's device, for people.
        terms: terms of the last Welcome; the Hello names its run.
        claim: about the backbone of that run, if its method uses one.
        ready: the backbone of that run is loaded: the Hello carries the claim and the digest of its
            schemas. A server with another run by now ignores them.
    """
    return Hello(
        nonce=nonce,
        protocol=fcil_protocol.PROTOCOL_VERSION,
        oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
        package=package,
        federation=enrolment.federation,
        client=enrolment.client_id,
        device=device[:128],
        methods=methods,
        run=terms.run if terms else "",
        schema_digest=terms.schema_digest if terms and ready else "",
        backbone=claim if ready else None,
        takes_models=True,
        takes_compact=True,
        session_key=session_key,
    )


def installed_methods() -> tuple[list[str], list[str]]:
    """Return ``name==version`` of every method that loads here, and the errors of the others."""
    found: list[str] = []
    faults: list[str] = []
    doors = registry.installed()
    for name in sorted(doors.names):
        try:
            found.append(f"{name}=={registry.load_method(name, doors).version}")
        except ConfigError as error:  # a broken package must not keep the others from joining
            faults.append(str(error))
    return found, faults


def read_server(welcome: Welcome, enrolment: Enrolment) -> PublicKeys:
    """Return the keys of the server that sent a Welcome, as the pinned root certifies them.

    Raises:
        TrustError, WireError: the certificate cannot be verified.
        VersionMismatch: the server's protocol is not supported here.
    """
    certificate = Certificate.from_bytes(welcome.certificate)
    keys = certificate.verify(enrolment.federation, time.time())
    certificate.refuse_older(Certificate.from_bytes(bytes.fromhex(enrolment.certificate)))
    if not welcome.protocol >= fcil_protocol.OLDEST_PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the server speaks protocol {welcome.protocol}, this client "
            f"{fcil_protocol.OLDEST_PROTOCOL_VERSION} to {fcil_protocol.PROTOCOL_VERSION}.",
            action="Install the same fcil version on both sides.",
        )
    return keys


def read_terms(welcome: Welcome) -> Terms:
    """Check a signed Welcome against the packages installed here.

    Raises:
        MethodMismatch, WireError: with both values.
        ConfigError: the method's manifest fails; names its line.
        EgressRefused: the method would send data that may not leave a client.
    """
    if not is_run_id(welcome.run):
        raise WireError(f"the server names a run {welcome.run[:40]!r}, which is not a run id.")
    method = _method(welcome)
    with blaming(method):
        return _terms_of(registry.with_forms(method, _forms(welcome)), welcome)


def _terms_of(method: Method, welcome: Welcome) -> Terms:
    if welcome.privacy.secure not in ("off", "masks"):
        raise MethodMismatch(
            f"the server's privacy.secure is {welcome.privacy.secure[:40]!r}, which this client "
            "does not know.",
            action="Install the same fcil version on both sides.",
        )
    method = in_terms(method, welcome.privacy)
    hparams = _hparams(method, welcome)
    backbone = backbone_from_fields(_json(welcome.backbone))
    digest = registry.schema_digest(method, hparams, backbone, welcome.privacy)
    if digest != welcome.schema_digest:
        raise MethodMismatch(
            f"method {method.name!r} is version {method.version} on both sides, but its schemas "
            f"differ: {digest[:12]} on the client, {welcome.schema_digest[:12]} on the server.",
            action=_install(welcome),
        )
    check_uploads(method, hparams, backbone)
    check_privacy(method.plain or method, hparams, backbone, welcome.privacy)
    check_installed(welcome.privacy)
    return Terms(
        run=welcome.run,
        method=method,
        hparams=hparams,
        backbone=backbone,
        schema_digest=digest,
        max_payload_bytes=welcome.max_payload_bytes,
        credit=min(welcome.credit, MAX_WINDOW_BYTES),
        privacy=welcome.privacy,
        compact=welcome.compact,
        # Nothing that noise does not cover may leave beside it.
        training_metrics=welcome.training_metrics
        and not welcome.privacy.noise_multiplier
        and not welcome.privacy.masks,
        object_store=welcome.object_store,
        **_relay(welcome),
    )


def _relay(welcome: Welcome) -> dict[str, Any]:
    """Return the relay that adds up updates, which only terms that say so allow."""
    relay = welcome.summing_relay
    if relay is None or not welcome.privacy.relay_sums:
        return {}
    keys = PublicKeys.from_fields(relay.model_dump())
    return {"relay_name": relay.name, "relay": keys}


def check_relay(terms: Terms, link_key: str) -> None:
    """Check that the relay that may open updates is the one that this client was enrolled through.

    Args:
        terms: of a Welcome.
        link_key: hex of the CURVE key that the client connects to; empty: the server's own.

    Raises:
        TrustError: it is another one.
    """
    if terms.relay is not None and terms.relay.curve.hex() != link_key:
        raise TrustError(
            f"the server wants relay {terms.relay_name!r} to open this client's updates, and the "
            "client was not enrolled through that relay.",
            action="Nothing was sent. Ask the operator for a ticket through it "
            "(enrol NAME --via RELAY), or to set privacy.relay_sums to false.",
        )


def goodbye(failure: FcilError | None) -> Bye:
    """Build the Bye of a client that ends, after an error or as requested.

    The server receives the sentence only if it is about installed packages: others may name files.
    """
    if failure is None:
        return Bye(reason="the client stops")
    told = isinstance(failure, VersionMismatch | MethodMismatch | BackboneMismatch | EgressRefused)
    return Bye(code=failure.code, reason=failure.message[:2000] if told else "")


def looks_copied() -> TrustError:
    """Return the error of a client whose key another connection uses."""
    return TrustError(
        "another connection with this client's key is in use, and the server keeps the newer one.",
        action="Run one client per directory; if its files were copied to another device, enrol "
        "that one again.",
    )


def _install(welcome: Welcome) -> str:
    package = welcome.method_package or "the package that brings the method on the server"
    return f"Install the server's {package} on the client and start it again."


def _method(welcome: Welcome) -> Method:
    try:
        method = registry.load_method(welcome.method)
    except ConfigError as error:
        raise MethodMismatch(
            f"the server runs method {welcome.method!r} version {welcome.method_version}, the "
            "client has no such method.",
            action=_install(welcome),
        ) from error
    if method.version != welcome.method_version:
        raise MethodMismatch(
            f"the server runs method {welcome.method!r} version {welcome.method_version}, the "
            f"client has version {method.version}.",
            action=_install(welcome),
        )
    return method


def _forms(welcome: Welcome) -> Forms:
    try:
        return Forms(frozenset(Kind(name) for name in welcome.half))
    except ValueError as error:
        raise MethodMismatch(
            f"the server sends tensors of the kinds {', '.join(welcome.half)[:200]} in half "
            "precision, and this client does not know all of these.",
            action=_install(welcome),
        ) from error


def _hparams(method: Method, welcome: Welcome) -> Hparams:
    try:
        return method.hparams.model_validate(_json(welcome.hparams))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(x) for x in fault["loc"])
        raise MethodMismatch(
            f"method {method.name!r} is version {method.version} on both sides, but the client's "
            f"does not take the server's options: {where[:80]}: {fault['msg'][:200]}.",
            action=_install(welcome),
        ) from error


def _json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("a Welcome carries text that is not JSON.") from error
    if not isinstance(fields, dict):
        raise WireError("a Welcome carries JSON that is not an object.")
    return fields


def check_backbone(ours: BackboneInfo, theirs: BackboneInfo) -> None:
    """Compare the loaded backbone with the one that the server uses.

    Raises:
        BackboneMismatch: with both digests.
    """
    if ours.digest != theirs.digest:
        raise BackboneMismatch(
            f"backbone {ours.name} has weights {ours.digest[:12]} here and "
            f"{theirs.digest[:12]} on the server.",
            action="Use the same weights file on every device (--weights FILE).",
        )
    if preprocessing_digest(ours.preprocessing) != preprocessing_digest(theirs.preprocessing):
        raise BackboneMismatch(
            f"backbone {ours.name} prepares images with {ours.preprocessing} here and "
            f"{theirs.preprocessing} on the server.",
            action="Use the same timm version on every device.",
        )
