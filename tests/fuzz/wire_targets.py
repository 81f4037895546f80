"""Everything that comes over a link."""

import json
import time
from dataclasses import replace
from importlib.metadata import entry_points
from unittest import mock

import numpy as np

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import TaskInfo, registry
from fcil_adapters.contract.backbone_info import (
    NO_BACKBONE,
    backbone_fields,
    backbone_from_fields,
    preprocessing_digest,
)
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.link.handshake import read_terms
from fcil_client.rounds.round_work import read_registry
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import (
    Core,
    open_body,
    parse_header,
    seal,
    unwrap_key,
    verify_header,
    wrap_key,
)
from fcil_protocol.errors import WrongFederation
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import encode, parse
from fcil_protocol.messages.messages import BackboneClaim, Welcome
from fcil_protocol.payloads.builtin import (
    EVALUATE_SCHEMA,
    INVENTORY_SCHEMA,
    REGISTRY_SCHEMA,
    inventory_faults,
    result_faults,
)
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.trust.canonical import pack_map
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.sessions.handshake import RunTerms, check
from fuzz.harness import CUT, must, pieces, target

CLIENT, SERVER = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2)
)
ROOT = RootKey(b"\x03" * 32)
LIMIT = 1 << 30
PLAIN = bytes(range(256)) * 80  # 20 KiB: two chunks
CORE = Core(
    protocol=PROTOCOL_VERSION, federation=ROOT.federation, run="r20260102-030405-0a0b",
    direction="update", sender="a" * 26, sender_key=CLIENT.public.fingerprint,
    recipient="server", method="pilora", schema="5e" * 32, task=3, round=17, kind="train",
    base=40,
)  # fmt: skip
PART = replace(
    CORE, direction="broadcast", sender="server", sender_key=SERVER.public.fingerprint,
    recipient="client", part="task/3",
)  # fmt: skip


# --- messages -------------------------------------------------------------------------------


def message_seeds():
    from protocol.messages.test_messages import FULL, frames_of  # noqa: PLC0415  needs the test packages

    return [CUT.join(frames_of(message)) for message in FULL.values()]


@target("messages", message_seeds, form="msgpack")
def messages(data):
    frames = data.split(CUT)
    received = parse(frames if len(frames) > 1 else [data, bytes(64)])
    message = received.message
    again = parse([encode(message), received.signature, *received.blobs])
    must(again.message == message, "a message is read as it was written")
    must(len(repr(message)) < 100 * len(data) + 5_000, "its repr is not much longer")
    return True


@target(
    "lanes",
    lambda: [CUT.join(relay_frames.up(7, bytes(32), [b"x"])), CUT.join(relay_frames.down(7))],
)
def lane(data):
    frames = data.split(CUT)
    if not relay_frames.is_laned(frames):
        return False
    head = frames[0]
    read = relay_frames.read_up if len(head) > 12 else relay_frames.read_down
    found = read(frames)
    rewritten = (
        relay_frames.up(found.number, found.key) if found.key else relay_frames.down(found.number)
    )
    must(rewritten == [head], "a lane is read as it was written")
    return True


INSTALLED = entry_points(group=registry.GROUP)


def quick_registry():
    """Look for installed methods once and not for every input."""
    return mock.patch.object(registry, "entry_points", return_value=INSTALLED)


@target("welcome", lambda: [
    CUT.join((b"{}", b"running_mean", json.dumps(backbone_fields(NO_BACKBONE)).encode())),
    *(
        CUT.join((registry.load_method(name).hparams().model_dump_json().encode(), name.encode(),
                  json.dumps(backbone_fields(backbone_by_name("vit_base_patch16_224"))).encode()))
        for name in registry.method_names()
    ),
], form="json")  # fmt: skip
def welcome(data):
    """What a client makes of the texts in a Welcome, whose signature fits."""
    hparams, name, backbone = (p.decode("utf-8", "replace") for p in pieces(data, 3))
    with quick_registry():
        if name not in registry.method_names():
            name = "running_mean"
        method = registry.load_method(name)
        read_terms(
            Welcome(
                protocol=1, server_nonce=bytes(16), certificate=b"", run="r20260102-030405-0a0b",
                method=name, method_version=method.version, hparams=hparams[:65536],
                schema_digest=digest_of(method, hparams, backbone), backbone=backbone[:8192],
                needs_backbone=False, ready=False, max_payload_bytes=1, credit=8,
            )
        )  # fmt: skip
    return True


def digest_of(method, hparams, backbone):
    """Return what a server would announce, if it can announce these at all."""
    try:
        given = method.hparams.model_validate(json.loads(hparams))
        return registry.schema_digest(method, given, backbone_from_fields(json.loads(backbone)))
    except Exception:
        return "0" * 64


VIT = backbone_by_name("vit_base_patch16_224")
PROBE = np.linspace(-1, 1, 4 * VIT.dim, dtype=np.float32).reshape(4, VIT.dim)
TERMS = RunTerms(
    federation=ROOT.federation, certificate=b"", run="r", method=registry.load_method("pilora"),
    hparams=registry.load_method("pilora").hparams(), info=VIT, probe=PROBE,
    schema_digest="0" * 64, max_payload_bytes=1, credit=8, package="0", method_package="",
)  # fmt: skip


@target("backbone_claim", lambda: [PROBE.tobytes(), (PROBE * 1.1).tobytes()], max_bytes=16384)
def backbone_claim(data):
    """The features that a client says its backbone computes."""
    from fcil_protocol.messages.messages import Hello  # noqa: PLC0415

    claim = BackboneClaim(
        digest=VIT.digest, preprocessing=preprocessing_digest(VIT.preprocessing), probe=data
    )
    hello = Hello(
        protocol=1, oldest=1, package="", federation=ROOT.federation, client="a" * 26, run="r",
        methods=[f"pilora=={TERMS.method.version}"], schema_digest="0" * 64, backbone=claim,
    )  # fmt: skip
    return check(TERMS, hello)


# --- envelopes ------------------------------------------------------------------------------


def sealed_seeds():
    for core, keys, reader in ((CORE, CLIENT, SERVER), (PART, SERVER, SERVER)):
        sealed, key = seal(PLAIN, core, keys, chunk_bytes=16384)
        yield sealed, wrap_key(key, sealed.header, reader.public)


@target("header", lambda: [s.header for s, _ in sealed_seeds()], form="msgpack")
def header(data):
    found = parse_header(data, max_plain_bytes=LIMIT)
    sizes = [found.chunk_size(i) for i in range(len(found.hashes))]
    must(sum(sizes) == found.sealed_bytes, "chunks make up the body")
    must(min(sizes) > 0, "no chunk is empty")
    must(Core.from_bytes(found.core.to_bytes()) == found.core, "a core can be written again")
    repr(found)
    return True


@target("core", lambda: [CORE.to_bytes(), PART.to_bytes()], form="msgpack")
def core(data):
    found = Core.from_bytes(data)
    must(Core.from_bytes(found.to_bytes()) == found, "a core can be written again")
    return True


def envelope_seeds():
    return [CUT.join((s.header, wrap, s.body)) for s, wrap in sealed_seeds()]


@target("envelope", envelope_seeds, max_bytes=32768, form="msgpack")
def envelope(data):
    """The sender is enrolled and signs whatever it likes."""
    head, wrap, body = pieces(data, 3)
    signer = SERVER if b"broadcast" in head else CLIENT
    verify_header(head, signer.sign("envelope", head), signer.public)
    found = parse_header(head, max_plain_bytes=LIMIT)
    key = unwrap_key(wrap, head, SERVER)
    plain = open_body(found, key, found.split(body))
    must(plain == PLAIN, "what opens is what was sealed")
    return True


@target("certificate", lambda: [
    ROOT.certify(SERVER.public).body,
    pack_map({"root": ROOT.public, "keys": SERVER.public.to_fields(), "from": 0, "to": 2**40,
              "serial": 0}),
], form="msgpack")  # fmt: skip
def certificate(data):
    """Signed by the root itself, whatever it says."""
    given = Certificate(data, ROOT._signer.sign(b"fcil/1/certificate\0" + data))
    read = Certificate.from_bytes(given.to_bytes())
    must(read == given, "a certificate is read as it was written")
    repr(read)
    sealing = read.verify(ROOT.federation, time.time()).sealing_key
    must(sealing is not None, "a certificate's keys can be sealed for")
    return True


@target("certificate_bytes", lambda: [ROOT.certify(SERVER.public).to_bytes()], form="msgpack")
def certificate_bytes(data):
    try:
        Certificate.from_bytes(data).verify(ROOT.federation, time.time())
    except WrongFederation:
        return True  # a root of its own: believed by nobody
    return True


@target("public_keys", lambda: [b"".join(SERVER.public.to_fields().values())])
def public_keys(data):
    """As they come in an enrolment."""
    keys = PublicKeys.from_fields(
        {"curve": data[:32], "signing": data[32:64], "sealing": data[64:]}
    )
    must(len(wrap_key(seal(b"", CORE, CLIENT, chunk_bytes=16384)[1], b"h", keys)) == 1168, "used")
    return True


@target("ticket", lambda: [
    Ticket.new(SERVER.public.curve, ROOT.federation, addresses, 60, via=via).to_text().encode()
    for via in (False, True)
    for addresses in (("localhost:1",), ("[::1]:7710", "fleet.example.org:7710"))
])  # fmt: skip
def ticket(data):
    found = Ticket.from_text(data.decode("utf-8", "replace"))
    must(Ticket.from_text(found.to_text()) == found, "a ticket is read as it was written")
    return True


# --- payloads -------------------------------------------------------------------------------

TASK = TaskInfo(1, (2, 3), (0, 1))
SCHEMAS = [
    (INVENTORY_SCHEMA, {"max_classes": 10}),
    (REGISTRY_SCHEMA, {}),
    (EVALUATE_SCHEMA, {"seen": 4}),
    *(
        (exchange.upload, METHOD.dims(METHOD.hparams(), NO_BACKBONE, TASK))
        for exchange in METHOD.exchanges(METHOD.hparams(), NO_BACKBONE)
    ),
]


def counts(*values):
    return np.array(values, np.int64)


def payload_seeds():
    names = {"names": ["cat", "Käse"]}
    yield Payload({"train": counts(3, 0), "test": counts(1, 1)}, names)
    yield Payload({"class": counts(0, 1), "task": counts(0, 0)}, names)
    yield Payload({"classes": counts(1, 3), "correct": counts(2, 0), "total": counts(3, 1),
                   "n": counts(4)})  # fmt: skip
    yield Payload(
        {"mean": np.full((2, 64), 0.5, np.float32), "count": counts(1, 1), "n": counts(2)}
    )
    dtypes = (np.float32, np.float16, np.int64, np.int32, np.uint8)
    tensors = {f"t{i}": np.ones((2, 3), dtype) for i, dtype in enumerate(dtypes)}
    yield Payload(tensors, {"a": 1, "b": 1.5, "c": True, "d": "x", "e": [1, 2], "f": ["x"]})
    yield Payload()


def packed_seeds():
    return [pack(p, compact=compact) for p in payload_seeds() for compact in (False, True)]


@target("payload", packed_seeds, max_words=8_000, form="safetensors")
def payload(data):
    """Read it as everything that it could be."""
    found = unpack(data)
    for schema, dims in SCHEMAS:
        faults = schema.check(found, dims)
        must(all(len(f) < 2_000 for f in faults), "a fault is a sentence")
        if not faults and schema is EVALUATE_SCHEMA:
            result_faults(found, TASK.seen)
    inventory_faults(found, 10)
    for exchange in METHOD.exchanges(METHOD.hparams(), NO_BACKBONE):
        if not exchange.upload.check(found, METHOD.dims(METHOD.hparams(), NO_BACKBONE, TASK)):
            exchange.check(found, TASK)
    if not REGISTRY_SCHEMA.check(found, {}):
        read_registry(found)
    return True


@target("payload_again", lambda: [pack(p) for p in payload_seeds()], form="safetensors")
def payload_again(data):
    """What a schema lets pass can be written again, bit by bit the same."""
    found = unpack(data)
    if all(schema.check(found, dims) for schema, dims in SCHEMAS):
        return True
    again = unpack(pack(found))
    must(again.meta == found.meta, "the same metadata")
    must(again.tensors.keys() == found.tensors.keys(), "the same tensors")
    for name, array in found.tensors.items():
        must(again.tensors[name].tobytes() == array.tobytes(), "the same numbers")
        must(again.tensors[name].shape == array.shape, "the same shape")
    return True
