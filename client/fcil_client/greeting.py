"""What the two sides tell each other before the first round, seen from the client."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

import fcil_protocol
from fcil_adapters import registry
from fcil_adapters.contract import BackboneInfo, Hparams, Method, TaskInfo
from fcil_adapters.describe import backbone_from_fields, preprocessing_digest
from fcil_client.home import Enrolment
from fcil_protocol.errors import (
    BackboneMismatch,
    ConfigError,
    MethodMismatch,
    VersionMismatch,
    WireError,
)
from fcil_protocol.ids import is_run_id
from fcil_protocol.keys import Certificate, PublicKeys
from fcil_protocol.messages import BackboneClaim, Hello, Welcome
from fcil_protocol.wellknown import EVALUATE, EVALUATE_SCHEMA


@dataclass(frozen=True)
class Terms:
    """What a verified Welcome says, in usable form: the run's method, options and backbone."""

    run: str
    method: Method
    hparams: Hparams
    backbone: BackboneInfo
    schema_digest: str
    max_payload_bytes: int
    credit: int

    def dims(self, task: TaskInfo, kind: str) -> dict[str, int]:
        """Return the known symbols of an upload's schema."""
        if kind == EVALUATE:
            return {"seen": len(task.seen)}
        return self.method.dims(self.hparams, self.backbone, task)

    def check_upload(self, kind: str, payload: fcil_protocol.Payload, task: TaskInfo) -> list[str]:
        """Return every way in which a payload must not leave the device."""
        if kind == EVALUATE:
            return EVALUATE_SCHEMA.check(payload, self.dims(task, kind))
        exchange = registry.find_exchange(self.method, self.hparams, self.backbone, kind)
        faults = exchange.upload.check(payload, self.dims(task, kind))
        return faults or exchange.check(payload, task)


def hello(
    enrolment: Enrolment,
    *,
    nonce: bytes,
    package: str,
    device: str,
    terms: Terms | None,
    claim: BackboneClaim | None,
    ready: bool,
) -> Hello:
    """Build a Hello.

    Args:
        enrolment: who we are.
        nonce: ours, drawn for this session.
        package: version of the fcil package.
        device: where we compute, for people.
        terms: of the last Welcome; the Hello names its run.
        claim: about the backbone of that run, if its method uses one.
        ready: the backbone of that run is loaded: the Hello carries the claim and the digest
            of its schemas. The server does not look at them if it has another run by now.
    """
    return Hello(
        nonce=nonce,
        protocol=fcil_protocol.PROTOCOL_VERSION,
        oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
        package=package,
        federation=enrolment.federation,
        client=enrolment.client_id,
        device=device[:128],
        methods=installed_methods(),
        run=terms.run if terms else "",
        schema_digest=terms.schema_digest if terms and ready else "",
        backbone=claim if ready else None,
    )


def installed_methods() -> list[str]:
    """Return ``name==version`` of every method that loads on this machine."""
    found: list[str] = []
    for name in registry.method_names():
        try:
            found.append(f"{name}=={registry.load_method(name).version}")
        except ConfigError:
            continue  # a broken third-party package must not keep the others from joining
    return found


def read_welcome(welcome: Welcome, enrolment: Enrolment) -> tuple[Terms, PublicKeys]:
    """Check a Welcome against what was pinned at enrolment and what is installed here.

    Raises:
        TrustError, VersionMismatch, MethodMismatch, WireError: with both values.
    """
    certificate = Certificate.from_bytes(welcome.certificate)
    keys = certificate.verify(enrolment.federation, time.time())
    if not welcome.protocol >= fcil_protocol.OLDEST_PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the server speaks protocol {welcome.protocol}, this client "
            f"{fcil_protocol.OLDEST_PROTOCOL_VERSION} to {fcil_protocol.PROTOCOL_VERSION}.",
            action="Install the same fcil version on both sides.",
        )
    if not is_run_id(welcome.run):
        raise WireError(f"the server names a run {welcome.run[:40]!r}, which is no run id.")
    method = _method(welcome)
    hparams = _hparams(method, welcome)
    backbone = backbone_from_fields(_json(welcome.backbone))
    digest = registry.schema_digest(method, hparams, backbone)
    if digest != welcome.schema_digest:
        raise MethodMismatch(
            f"method {method.name} {method.version} has schema {digest[:12]} here and "
            f"{welcome.schema_digest[:12]} on the server.",
            action="Install the same version of its package on both sides.",
        )
    terms = Terms(
        run=welcome.run,
        method=method,
        hparams=hparams,
        backbone=backbone,
        schema_digest=digest,
        max_payload_bytes=welcome.max_payload_bytes,
        credit=max(1, min(welcome.credit, 64)),
    )
    return terms, keys


def _method(welcome: Welcome) -> Method:
    try:
        method = registry.load_method(welcome.method)
    except ConfigError as error:
        raise MethodMismatch(
            f"the server runs the method {welcome.method!r} {welcome.method_version}, which is "
            "not installed here.",
            action="Install its package on this client.",
        ) from error
    if method.version != welcome.method_version:
        raise MethodMismatch(
            f"method {method.name} is version {method.version} here and "
            f"{welcome.method_version} on the server.",
            action="Install the same version of its package on both sides.",
        )
    return method


def _hparams(method: Method, welcome: Welcome) -> Hparams:
    try:
        return method.hparams.model_validate(_json(welcome.hparams))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(x) for x in fault["loc"])
        raise MethodMismatch(
            f"method {method.name} {method.version} of this client does not take the server's "
            f"options: {where[:80]}: {fault['msg'][:200]}.",
            action="Install the same version of its package on both sides.",
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
