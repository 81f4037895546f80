"""Answers to a Hello: the client's identity, its admission, and the terms of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import fcil_protocol
from fcil_adapters.backbones.probes import TOLERANCE, compare_probes
from fcil_adapters.contract import BackboneInfo, Hparams, Method
from fcil_adapters.contract.backbone_info import backbone_fields, preprocessing_digest
from fcil_protocol.envelopes.window import TOTAL_BYTES, share
from fcil_protocol.errors import (
    BackboneMismatch,
    FcilError,
    MethodMismatch,
    UnknownClient,
    VersionMismatch,
    WrongFederation,
    from_code,
)
from fcil_protocol.link.zmq_link import Incoming
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import (
    NO_PRIVACY,
    BackboneClaim,
    Bye,
    Hello,
    PrivacyTerms,
    RelayKeys,
    Uplink,
    Verdict,
    Welcome,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.eligibility import refusal
from fcil_server.ledger.enums import Role
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ClientRow
from fcil_server.sessions.peers import Peer


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run: contents of every Welcome and conditions for every Hello.

    Attributes:
        probe: (4, d) features of the shipped images; None if the method needs no backbone.
        compact: payloads are compact, both ways.
        package: version of fcil. method_package: the package of the method, and its version.
        object_store: what addresses of parts in it begin with; empty: there is none.
    """

    federation: str
    certificate: bytes
    run: str
    method: Method
    hparams: Hparams
    info: BackboneInfo
    probe: NDArray[np.float32] | None
    schema_digest: str
    max_payload_bytes: int
    credit: int
    package: str
    method_package: str
    privacy: PrivacyTerms = NO_PRIVACY
    compact: bool = False
    object_store: str = ""

    @property
    def install(self) -> str:
        """Advice if the client lacks the method or has another version."""
        package = self.method_package or "the package that brings the method on the server"
        return f"Install {package} on the client and start it again."


def identify(ledger: Ledger, curve_key: bytes, hello: Hello) -> ClientRow:
    """Return the enrolled client that a connection's key belongs to.

    Raises:
        UnknownClient, Revoked, MembershipExpired: the key is not, or no longer, enrolled.
        UnknownClient: the Hello names another client.
    """
    row = ledger.clients.by_curve(curve_key)
    if row is None or not row.may_join(ledger.now):
        raise refusal(row, ledger.now)
    if row.role is Role.RELAY:
        raise UnknownClient("this key is a relay's, and a relay takes part in no round.")
    if hello.client != row.client_id:
        raise UnknownClient(
            f"the connection's key belongs to client {row.client_id[:8]}, its Hello names "
            f"{hello.client[:8]}.",
            action="Do not mix the files of two client directories.",
        )
    return row


def begin_session(
    ledger: Ledger, keys: PrivateKeys, incoming: Incoming, received: Received, hello: Hello
) -> Peer:
    """Return the session that a Hello begins; the terms are not checked yet.

    Raises:
        UnknownClient: see `identify`.
        TrustError, WireError: the client did not sign it, or it is not new.
    """
    row = identify(ledger, incoming.key, hello)
    channel = Channel(keys, row.public_keys)
    channel.peer_nonce = hello.nonce
    channel.raw_digests = hello.takes_compact
    channel.check(received)
    if hello.session_key is not None:
        channel.agree_as_server(hello.session_key)
    return Peer(
        client=row.client_id,
        name=row.name,
        keys=row.public_keys,
        route=incoming.route,
        conn=incoming.conn,
        channel=channel,
        device=hello.device,
        package=hello.package,
        takes_models=hello.takes_models,
    )


def check(terms: RunTerms, hello: Hello) -> bool:
    """Return True if a client may take part now; False: it must load its backbone first.

    Raises:
        VersionMismatch, WrongFederation, MethodMismatch, BackboneMismatch: with both values.
    """
    ours = (fcil_protocol.OLDEST_PROTOCOL_VERSION, fcil_protocol.PROTOCOL_VERSION)
    if hello.protocol < ours[0] or hello.oldest > ours[1]:
        raise VersionMismatch(
            f"the client speaks protocol {hello.oldest} to {hello.protocol}, the server "
            f"{ours[0]} to {ours[1]}.",
            action=f"{_upgrade(terms, hello)}.",
        )
    if hello.federation != terms.federation:
        raise WrongFederation(
            f"the client is enrolled with federation {hello.federation[:12]}, this is "
            f"{terms.federation[:12]}."
        )
    if terms.compact and not hello.takes_compact:
        raise VersionMismatch(
            f"the run's payloads are compact, and the client's fcil {hello.package} does not read "
            "these.",
            action=f"{_upgrade(terms, hello)}, or start a run for both on the server: "
            "fcil-server serve --new-run -c wire.compact=false",
        )
    _check_method(terms, hello.methods)
    if hello.run != terms.run:
        return False  # its backbone and schema belong to an earlier run
    if hello.backbone is None:
        return not terms.method.needs_backbone and hello.schema_digest == terms.schema_digest
    _check_backbone(terms, hello.backbone)
    if hello.schema_digest != terms.schema_digest:
        raise MethodMismatch(
            f"method {terms.method.name!r} is version {terms.method.version} on both sides, but "
            f"its schemas or options differ: {hello.schema_digest[:12]} on the client, "
            f"{terms.schema_digest[:12]} on the server.",
            action=terms.install,
        )
    return True


def _upgrade(terms: RunTerms, hello: Hello) -> str:
    """Return the advice to install the server's fcil; two builds may have one version."""
    one = hello.package == terms.package
    which = f"the server's build of fcil {terms.package}" if one else f"fcil {terms.package}"
    return f"Install {which} on the client"


def _check_method(terms: RunTerms, theirs: list[str]) -> None:
    name, version = terms.method.name, terms.method.version
    if f"{name}=={version}" in theirs:
        return
    others = [m.partition("==")[2] for m in theirs if m.startswith(f"{name}==")]
    has = f"has version {others[0]}" if others else "has no such method"
    raise MethodMismatch(
        f"the server runs method {name!r} version {version}, the client {has}.",
        action=terms.install,
    )


def _check_backbone(terms: RunTerms, claim: BackboneClaim) -> None:
    info = terms.info
    if claim.digest != info.digest:
        raise BackboneMismatch(
            f"the client's backbone has weights {claim.digest[:12]}, the server's "
            f"({info.name}) {info.digest[:12]}.",
            action=BackboneMismatch.default_action(),
        )
    if claim.preprocessing != preprocessing_digest(info.preprocessing):
        raise BackboneMismatch(
            f"the client prepares images differently from the server ({info.preprocessing}).",
            action="Use the same timm version on every device.",
        )
    error = feature_distance(terms, claim)
    if error is not None and not error <= TOLERANCE:
        raise BackboneMismatch(
            f"the client's features of the probe images differ by {error:.2g} relative, allowed "
            f"is {TOLERANCE:g}.",
            action="Check its versions of torch and timm, or of onnxruntime, and that it computes "
            "in float32.",
        )


def feature_distance(terms: RunTerms, claim: BackboneClaim) -> float | None:
    """Return the relative distance of a client's features of the probe images from the server's.

    None if the server has none to compare with.

    Raises:
        BackboneMismatch: their number differs.
    """
    if terms.probe is None:
        return None
    expected = terms.probe.size * 4
    if len(claim.probe) != expected:
        raise BackboneMismatch(
            f"the client sent {len(claim.probe)} bytes of probe features, expected {expected}.",
            action=BackboneMismatch.default_action(),
        )
    theirs = np.frombuffer(claim.probe, dtype="<f4")
    return compare_probes(theirs.reshape(terms.probe.shape), terms.probe)


def leaving(bye: Bye) -> FcilError:
    """Return the reason that a leaving client gives.

    Some give it in a sentence, which is about versions. Of others only the code leaves the device;
    the client's own log has the rest.
    """
    return from_code(bye.code, bye.reason or "the client ended; its own log says why.")


def welcome(
    terms: RunTerms,
    *,
    nonce: bytes,
    ready: bool,
    verdict: Verdict | None,
    clients: int = 1,
    clock_s: float = 0.0,
    promoted: int = -1,
    session_key: bytes | None = None,
    relay: ClientRow | None = None,
) -> Welcome:
    """Build the answer to a Hello that passed.

    Args:
        terms: of the run.
        nonce: the server's, of the session.
        ready: the client has nothing left to load.
        verdict: on its last update.
        clients: how many share the credit at this moment.
        clock_s: unix time.
        promoted: the run's promoted state; -1: none.
        session_key: the server's, if the client sent one.
        relay: the one that carries the client and adds up updates.
    """
    return Welcome(
        protocol=fcil_protocol.PROTOCOL_VERSION,
        server_nonce=nonce,
        certificate=terms.certificate,
        run=terms.run,
        method=terms.method.name,
        method_version=terms.method.version,
        method_package=terms.method_package[:128],
        hparams=terms.hparams.model_dump_json(),
        schema_digest=terms.schema_digest,
        backbone=json.dumps(backbone_fields(terms.info)),
        needs_backbone=terms.method.needs_backbone,
        ready=ready,
        max_payload_bytes=terms.max_payload_bytes,
        credit=share(terms.credit, clients, TOTAL_BYTES),
        privacy=terms.privacy,
        half=terms.method.forms.names,
        compact=terms.compact,
        verdict=verdict,
        clock_ms=max(0, int(clock_s * 1000)),
        training_metrics=True,
        promoted=promoted,
        session_key=session_key,
        object_store=terms.object_store,
        summing_relay=_keys_of(relay) if relay is not None and terms.privacy.relay_sums else None,
    )


def _keys_of(relay: ClientRow) -> RelayKeys:
    return RelayKeys(name=relay.name[:128], **relay.public_keys.to_fields())


def check_uplink(row: ClientRow, message: Uplink, federation: str, now: float) -> None:
    """Check that a relay may carry messages.

    Raises:
        TrustError: it is no longer a member.
        VersionMismatch, WrongFederation: with both values.
    """
    if not row.may_join(now):
        raise refusal(row, now)
    ours = (fcil_protocol.OLDEST_PROTOCOL_VERSION, fcil_protocol.PROTOCOL_VERSION)
    if message.protocol < ours[0] or message.oldest > ours[1]:
        raise VersionMismatch(
            f"the relay speaks protocol {message.oldest} to {message.protocol}, the server "
            f"{ours[0]} to {ours[1]}.",
            action="Install the same fcil version on both sides.",
        )
    if message.federation != federation or message.relay != row.client_id:
        raise WrongFederation(
            f"the relay is enrolled with federation {message.federation[:12]} as "
            f"{message.relay[:8]}, this is {federation[:12]} and its key belongs to "
            f"{row.client_id[:8]}."
        )
