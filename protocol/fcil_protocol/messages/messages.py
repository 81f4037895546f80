"""The messages of the protocol: their fields and limits.

Unknown fields are tolerated. PROTOCOL.md section 4 lists every field; `frames` defines their wire
form.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
)

from fcil_protocol.errors import CommitUnknown, FcilError, StorageError
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.trust.session_keys import SESSION_KEY_BYTES

LEFT = "left"  # code of a client's Bye that ends its membership
RUN_DONE = "run_done"  # code of a server's Bye: the run needs nothing more
NEXT_RUN = "next_run"  # the same: the server is back in a moment, with another run
MAX_WANTED = 1024  # most chunks that one Want can request
SIGNATURE_BYTES = 64
NONCE_BYTES = 16

Nonce = Annotated[bytes, Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Name = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=2000)]
MAX_ADDRESS = 4096
Address = Annotated[str, Field(max_length=MAX_ADDRESS)]  # a URL
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

RAW_DIGESTS = {"raw_digests": True}  # the context of `model_dump` in which digests are bytes


def _to_hex(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _for_wire(digest: str, info: SerializationInfo) -> str | bytes:
    return bytes.fromhex(digest) if info.context == RAW_DIGESTS else digest


# Hex in this program; on the wire its 32 bytes, or their hex.
EnvelopeDigest = Annotated[Hex, BeforeValidator(_to_hex), PlainSerializer(_for_wire)]
SessionKey = Annotated[bytes, Field(min_length=SESSION_KEY_BYTES, max_length=SESSION_KEY_BYTES)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Index = Annotated[int, Field(ge=-1, lt=2**31)]


class Strict(BaseModel):
    """Base of all models that are parsed from the wire."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Message(Strict):
    """Base of all messages.

    Attributes:
        nonce: in Hello the sender's fresh nonce; afterwards the receiver's, so that no
            message of another session can be replayed.
        seq: increases by at least one per message of a session, in each direction.
    """

    type: ClassVar[str] = ""
    signed: ClassVar[bool] = True
    nonce: Nonce = bytes(NONCE_BYTES)
    seq: Count = 0


class RoundMessage(Message):
    """Base of the messages that concern one round."""

    run: Name
    task: Index
    kind: Name
    round: Index

    @property
    def key(self) -> RoundKey:
        """The round of the message."""
        return RoundKey(RunId(self.run), self.task, self.kind, self.round)


class BackboneClaim(Strict):
    """A client's claim about its frozen backbone, so that all compute the same features."""

    digest: Hex
    preprocessing: Hex
    probe: Annotated[bytes, Field(max_length=4 * 4 * 8192)]  # (4, d) float32, little-endian


class Hello(Message):
    """Client -> server, first of a session and again when its backbone is ready."""

    type = "hello"
    protocol: Count
    oldest: Count
    package: Name
    federation: Name
    client: Name
    device: Name = ""
    methods: list[Name] = Field(default_factory=list, max_length=200)  # name==version
    run: Name = ""
    schema_digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    backbone: BackboneClaim | None = None
    takes_models: bool = False  # it knows the message `UseModel`
    takes_compact: bool = False  # it reads compact payloads, and digests as bytes
    session_key: SessionKey | None = None  # its public key for the session's MACs


class Verdict(Strict):
    """Outcome of the client's last update."""

    update: EnvelopeDigest
    counted: bool
    reason: Text = ""


class PrivacyTerms(Strict):
    """Privacy measures that clients take before any data derived from images leaves them."""

    min_count: Annotated[int, Field(ge=1, lt=2**53)] = 1  # images of a class that takes part
    noise_multiplier: Annotated[float, Field(ge=0)] = 0.0  # 0: no noise
    clip: Annotated[float, Field(ge=0)] = 0.0  # largest length of one image's feature
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: Annotated[float, Field(ge=0)] = 0.0  # 0: no limit
    partial: bool = False  # trained tensors are sent without noise
    secure: Name = "off"  # masks: the server sees sums alone
    secure_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.6  # of the clients, in a sum
    secure_min_clients: Annotated[int, Field(ge=3, lt=2**53)] = 3  # in a sum
    relay_sums: bool = False  # a relay may open the updates of its clients, and send their sum

    @property
    def masks(self) -> bool:
        """True if rounds are masked."""
        return self.secure != "off"

    def fewest(self, clients: int) -> int:
        """Return the fewest of some clients whose sum may be opened."""
        return max(self.secure_min_clients, math.ceil(self.secure_threshold * clients))

    def describe(self) -> str:
        """Return the terms in one line, for people."""
        parts = []
        if self.min_count > 1:
            parts.append(f"classes with at least {self.min_count} images")
        if self.noise_multiplier > 0:
            parts.append(f"noise {self.noise_multiplier:g} x clip {self.clip:g}")
            limit = f"{self.max_epsilon:g}" if self.max_epsilon else "no limit"
            parts.append(f"epsilon at delta {self.delta:g}: {limit}")
            if self.partial:
                parts.append("on statistics only: trained tensors are not protected")
        if self.masks:
            fewest = self.secure_min_clients
            parts.append(f"masks: the server sees sums of {fewest} clients or more")
        if self.relay_sums:
            parts.append("a relay may open its clients' updates and send the server their sum")
        return "; ".join(parts) or "no noise, no minimum class size"


NO_PRIVACY = PrivacyTerms()


class RelayKeys(Strict):
    """The relay that adds up a client's updates, for which they are sealed too."""

    name: Name
    curve: Annotated[bytes, Field(min_length=32, max_length=32)]
    signing: Annotated[bytes, Field(min_length=32, max_length=32)]
    sealing: Annotated[bytes, Field(min_length=1216, max_length=1216)]


class Welcome(Message):
    """Server -> client: the server's identity, its run, and if the client may take part."""

    type = "welcome"
    protocol: Count
    server_nonce: Nonce
    certificate: Annotated[bytes, Field(max_length=8192)]
    run: Name
    method: Name
    method_version: Name
    method_package: Name = ""  # the package to install for this method
    hparams: Annotated[str, Field(max_length=65536)]  # JSON
    schema_digest: Hex
    backbone: Annotated[str, Field(max_length=8192)]  # JSON of BackboneInfo
    needs_backbone: bool
    ready: bool
    max_payload_bytes: Count
    credit: Count  # bytes of parts that may be requested and not yet received
    privacy: PrivacyTerms = NO_PRIVACY
    half: list[Name] = Field(default_factory=list, max_length=16)  # kinds in half precision
    compact: bool = False  # payloads are compact, both ways, and it reads digests as bytes
    verdict: Verdict | None = None
    training_metrics: bool = False  # it takes the loss and accuracy of a client's training
    clock_ms: Count = 0  # unix time of the server; 0: not reported
    promoted: Index = -1  # the run's promoted state; -1: none
    session_key: SessionKey | None = None  # the server's, if the Hello has one
    object_store: Address = ""  # what addresses of parts begin with; empty: there are none
    summing_relay: RelayKeys | None = None  # it carries this client's messages


class PartRef(Strict):
    """One part of a broadcast, by name and digest (of its sealed header)."""

    name: Name
    digest: EnvelopeDigest
    sealed_bytes: Count


class RoundOpen(RoundMessage):
    """Server -> asked client: take part in this round, starting from these parts."""

    type = "round_open"
    rounds: Count
    base: Count  # state number that the parts describe
    classes: list[Count] = Field(max_length=10_000, fail_fast=True)
    past: list[Count] = Field(max_length=100_000, fail_fast=True)
    seed: list[Count] = Field(max_length=8)
    remaining_s: float
    min_count: Count = 1  # evaluate: results of fewer test images per class are withheld
    oldest_base: Index = -1  # oldest state from which work on an earlier round continues
    ask_first: bool = False  # the server asks for an update's first chunks too
    parts: list[PartRef] = Field(max_length=10_000, fail_fast=True)
    verdict: Verdict | None = None


class UseModel(RoundMessage):
    """Server -> client: use the model of this state, outside of any round.

    The fields are those of the round that would start from the state. ``promoted``: keep it until
    the operator says otherwise; else newer ones replace it.
    """

    type = "use_model"
    rounds: Count
    base: Count  # state number that the parts describe
    classes: list[Count] = Field(max_length=10_000, fail_fast=True)
    past: list[Count] = Field(max_length=100_000, fail_fast=True)
    parts: list[PartRef] = Field(max_length=10_000, fail_fast=True)
    promoted: bool


class RoundClosed(RoundMessage):
    """Server -> asked client: the round is over; drop all unsent data."""

    type = "round_closed"
    outcome: Name
    answer: Name = ""
    verdict: Verdict | None = None


class Decline(RoundMessage):
    """Client -> server: this client cannot take part in the round."""

    type = "decline"
    reason: Text


class Progress(RoundMessage):
    """Client -> server, at most about once a second: progress of this round's work."""

    type = "progress"
    phase: Literal["fetching", "working", "sending"]
    done: Count
    total: Count
    paused: bool = False


class Update(Message):
    """Client -> server: signed header of an envelope; ``unasked`` first chunks follow at once.

    Blobs: header, header signature, wrapped content key; for a relay that adds up updates the
    content key wrapped for it too, which the relay leaves empty if it takes the update.
    """

    type = "update"
    digest: EnvelopeDigest
    unasked: Count = 0


class Want(Message):
    """Receiver -> sender, either way: send these chunks of an envelope.

    ``span`` is the most chunks that a message should carry, as fits the link. ``header`` requests
    the envelope's header as well (parts only).
    """

    type = "want"
    digest: EnvelopeDigest
    chunks: list[Count] = Field(max_length=MAX_WANTED, fail_fast=True)
    span: Annotated[int, Field(ge=1, lt=2**53)] = 1
    header: bool = False


class Pull(Message):
    """A relay that adds up updates -> its client: send it these chunks of an update.

    As `Want`, from a sender that has no keys of the session.
    """

    type = "pull"
    signed = False
    digest: EnvelopeDigest
    chunks: list[Count] = Field(max_length=MAX_WANTED, fail_fast=True)
    span: Annotated[int, Field(ge=1, lt=2**53)] = 1


class Release(Message):
    """A relay -> server: it does not add up these updates; the server requests their chunks."""

    type = "release"
    digests: list[EnvelopeDigest] = Field(max_length=MAX_WANTED, fail_fast=True)


class Parts(Message):
    """Server -> client: the signed header of a part, its key wrapped for this client.

    Blobs: header, header signature, wrapped content key.
    """

    type = "parts"
    digest: EnvelopeDigest
    url: Address = ""  # of the sealed body in the object store, for a while


class Fetched(Message):
    """Client -> server: this many bytes of a part came from the object store."""

    type = "fetched"
    digest: EnvelopeDigest
    size: Count


class Chunk(Message):
    """Either way: one chunk of an envelope, or several consecutive ones. Blob: the sealed bytes."""

    type = "chunk"
    signed = False
    digest: EnvelopeDigest
    index: Count


class Ack(Message):
    """Server -> client: the update is on disk; the sender may forget it."""

    type = "ack"
    digest: EnvelopeDigest


class Nack(Message):
    """Server -> client: refused; a stable code, a sentence, a remedy.

    With a digest it concerns that envelope; without, the session.
    """

    type = "nack"
    code: Name
    text: Text
    action: Text = ""
    digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")


def nack_of(error: FcilError, digest: str = "") -> Nack:
    """Return the Nack that reports an error to a peer."""
    # To a peer it is the server's disk like any other failure there: it waits, and tries again.
    code = StorageError.code if isinstance(error, CommitUnknown) else error.code
    return Nack(
        code=code,
        text=error.message[:2000],
        action=(error.action or type(error).default_action())[:2000],
        digest=digest,
    )


class Enrol(Message):
    """A ticket's holder -> server: enrol these keys. Signed with the guest's keys.

    ``proof`` is the new signing key's own signature over the ticket's CURVE key, so that no client
    can enrol the keys of another. It opens a session like a Hello.
    """

    type = "enrol"
    device: Name = ""
    curve: Annotated[bytes, Field(min_length=32, max_length=32)]
    signing: Annotated[bytes, Field(min_length=32, max_length=32)]
    sealing: Annotated[bytes, Field(min_length=1216, max_length=1216)]
    proof: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Rotate(Message):
    """Client -> server: replace the client's keys by these. Signed with the old ones.

    ``proof`` is the new signing key's own signature over the old CURVE key and the new keys.
    The answer is an Ack with the digest of the new keys.
    """

    type = "rotate"
    curve: Annotated[bytes, Field(min_length=32, max_length=32)]
    signing: Annotated[bytes, Field(min_length=32, max_length=32)]
    sealing: Annotated[bytes, Field(min_length=1216, max_length=1216)]
    proof: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Enrolled(Message):
    """Server -> a ticket's holder: you are on the allow-list; the session ends here."""

    type = "enrolled"
    client: Name
    name: Name
    certificate: Annotated[bytes, Field(max_length=8192)]
    addresses: list[Name] = Field(min_length=1, max_length=16)


LinkKey = Annotated[bytes, Field(min_length=32, max_length=32)]


class Uplink(Message):
    """A relay -> server, first of its session: the relay's versions and listening address."""

    type = "uplink"
    protocol: Count
    oldest: Count
    package: Name
    federation: Name
    relay: Name
    address: Name
    sums: bool = False  # it adds up its clients' updates where the run allows it


class Admit(Message):
    """Server -> a relay: answers `Uplink`, and is sent again on every change of the lists.

    Admits the holders of these CURVE keys only, members freely, guests a few at a time; former
    members are disconnected.
    """

    type = "admit"
    protocol: Count
    server_nonce: Nonce
    certificate: Annotated[bytes, Field(max_length=8192)]
    credit: Count
    members: list[LinkKey] = Field(max_length=4_000, fail_fast=True)
    guests: list[LinkKey] = Field(max_length=1_000, fail_fast=True)
    invited: Count = 1_000  # the last this many guests hold open tickets
    # Of the members, those that are relays: more of their bytes may be unread.
    relays: list[LinkKey] = Field(default=[], max_length=500, fail_fast=True)
    outer: Count = 0  # relays between this one and the server


class Bye(Message):
    """Either way: this side ends the session on purpose; the code names the reason, if it matters.

    A client that ends with an error sends its code; the sentence only if it is about versions.
    """

    type = "bye"
    reason: Text = ""
    code: Name = ""


MESSAGES: dict[str, type[Message]] = {
    cls.type: cls
    for cls in (
        Hello, Welcome, RoundOpen, UseModel, RoundClosed, Decline, Progress,
        Update, Want, Pull, Release, Parts, Fetched, Chunk, Ack, Nack, Enrol, Enrolled, Rotate,
        Uplink, Admit, Bye,
    )
}  # fmt: skip
# Those that clients and relays send.
TO_SERVER: frozenset[type[Message]] = frozenset(
    (Hello, Decline, Progress, Update, Want, Release, Fetched, Chunk, Enrol, Rotate, Uplink, Bye)
)
