"""Envelopes, identities and messages as they are sealed, signed and sent."""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fcil_client.state.home import Enrolment, Home
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Sealed, seal, wrap_key
from fcil_protocol.envelopes.header import Core
from fcil_protocol.ids import Digest
from fcil_protocol.messages import messages, relay_frames
from fcil_protocol.messages.frames import encode
from fcil_protocol.payloads.payload import pack
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.session_keys import KeyAgreement, SessionSide, mac_of
from fcil_protocol.trust.ticket import PROOF, Ticket, proof_text
from fcil_server.aggregation.store import PartStore
from freezing.common import (
    CLIENT,
    CLIENT_KEYS,
    NEXT,
    NOW,
    PASSPHRASE,
    RELAY,
    ROOT,
    RUN,
    SCHEMA,
    SERVER,
    Folder,
    keys_of,
    line,
    payload_of,
    secret,
)

CHUNK_BYTES = 16 << 10
PART = "current"

# --- envelopes ------------------------------------------------------------------------------

UPDATE = {
    "tensors": {
        "lora.a": line("F32", 4, 1280, first=-3, step=0.125),
        "half": line("F16", 2, 3, step=0.5),
        "n": line("I64", 1, first=240),
    },
    "meta": {"epochs": 5, "loss": 0.25, "converged": True},
}
INVENTORY = {
    "tensors": {"train": line("I64", 2, first=8), "test": line("I64", 2, first=2)},
    "meta": {"names": ["Käse", "oak"]},
}
BROADCAST = {
    "tensors": {
        "head": line("F32", 2, 16, first=1, step=-0.5),
        "age": line("I32", 2),
        "mask": line("U8", 3),
    },
    "meta": {"step": 1},
}


def core(direction: str, **more: Any) -> Core:
    up = direction == "update"
    fields = {
        "protocol": PROTOCOL_VERSION, "federation": ROOT.federation, "run": RUN,
        "direction": direction,
        "sender": CLIENT if up else "server",
        "sender_key": (CLIENT_KEYS if up else SERVER).public.fingerprint,
        "recipient": "server" if up else "client", "method": "running_mean", "schema": SCHEMA,
        "task": 0, "round": 1, "kind": "train", "base": 1,
    }  # fmt: skip
    return Core(**{**fields, **more})


CORES = {
    "update": core("update"),
    "update-compact": core("update"),
    "inventory": core("update", schema="", task=-1, round=-1, kind="inventory", base=-1),
    "part": core("broadcast", part=PART),
    "part-compact": core("broadcast", part=PART),
}


def envelope(folder: Folder, name: str, content: Mapping[str, Any], chunk_bytes: int = 0) -> None:
    if folder.has(name):
        return
    made, up = CORES[name], CORES[name].direction == "update"
    compact = name.endswith("-compact")
    plain = pack(payload_of(content["tensors"], content["meta"]), compact=compact)
    sealed, key = seal(plain, made, CLIENT_KEYS if up else SERVER, chunk_bytes=chunk_bytes)
    said = {
        "core": vars(made), "payload": content, "plain_sha256": hashlib.sha256(plain).hexdigest(),
        "digest": sealed.parsed.update_id, "chunk_bytes": sealed.parsed.chunk_bytes,
        "content_key": key.value,
    }  # fmt: skip
    files = {"envelope": sealed.stored(wrap_key(key, sealed.header, SERVER.public)).to_bytes()}
    if not up:  # the server keeps it so; this client gets it so
        files |= {"part": in_store(sealed, files["envelope"])}
        files["envelope"] = sealed.stored(
            wrap_key(key, sealed.header, CLIENT_KEYS.public)
        ).to_bytes()
    folder.add(name, said, **files)


def in_store(sealed: Sealed, stored: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        return PartStore(Path(place)).put(Digest(sealed.parsed.update_id), stored).read_bytes()


# --- who is who -----------------------------------------------------------------------------


def identities(folder: Folder) -> None:
    if folder.has("test-only-keys"):
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "keys"

        def written(save: Callable[[Path], None]) -> bytes:
            save(path)
            return path.read_bytes()

        files = {
            "server": written(SERVER.save), "client": written(CLIENT_KEYS.save),
            "next": written(NEXT.save), "relay": written(RELAY.save), "root": written(ROOT.save),
        }  # fmt: skip
    said = {
        "warning": "for tests only: everybody has these private keys",
        "made": "each private key is SHA-256 of 'fcil test vectors, never use: WHO KIND'",
        "fingerprints": {
            "server": SERVER.public.fingerprint, "client": CLIENT_KEYS.public.fingerprint,
            "next": NEXT.public.fingerprint, "relay": RELAY.public.fingerprint,
        },
        "federation": ROOT.federation,
        "passphrase": PASSPHRASE,
    }  # fmt: skip
    folder.add("test-only-keys", said, **files)


def certificates(folder: Folder) -> None:
    for name, server, after in (
        ("certificate", SERVER, 0),
        ("certificate-next", keys_of("server, next"), 1),
    ):
        if not folder.has(name):
            made = ROOT.certify(server.public, valid_days=3650, after=after)
            said = {
                "root": ROOT.public, "federation": made.federation, "serial": made.serial,
                "not_before": made.not_before, "not_after": made.not_after,
                "keys": server.public.to_fields(),
            }  # fmt: skip
            folder.add(name, said, certificate=made.to_bytes())


def the_certificate(folder: Folder) -> Certificate:
    return Certificate.from_bytes((folder.directory / "certificate.certificate").read_bytes())


def tickets(folder: Folder) -> None:
    forms = {
        "ticket": (SERVER, ("fcil.example:7780", "[2001:db8::7]:7780"), False, False),
        "ticket-via": (RELAY, ("relay.example:7780",), True, False),
        "ticket-relay": (SERVER, ("fcil.example:7780",), False, True),
    }
    for name, (door, addresses, via, relay) in forms.items():
        if not folder.has(name):
            drawn = secret(f"{name} secret")[:16]
            made = Ticket(door.public.curve, ROOT.federation, drawn, NOW, addresses, via, relay)
            guest = made.guest_keys().public
            said = {**vars(made), "guest": {"curve": guest.curve, "signing": guest.signing}}
            folder.add(name, said, txt=made.to_text().encode() + b"\n")


def enrolment(folder: Folder) -> None:
    if not folder.has("enrolment"):
        certificate = the_certificate(folder).to_bytes().hex()
        made = Enrolment(
            client_id=CLIENT, name="camera 1", federation=ROOT.federation, certificate=certificate,
            addresses=("fcil.example:7780",), data="images", ticket=SCHEMA,
            link_key=RELAY.public.curve.hex(),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            Home(Path(place)).save_enrolment(made)
            folder.add("enrolment", vars(made), client=(Path(place) / "client.json").read_bytes())


# --- messages -------------------------------------------------------------------------------


def words(folder: Folder) -> list[tuple[str, messages.Message, bytes]]:
    """Return one message of every type and some more: who says it, and a mark for its blobs."""
    m, digest, nonce = messages, "0123456789abcdef" * 4, secret("a nonce")[:16]
    where = {"run": RUN, "task": 0, "kind": "train", "round": 1}
    verdict = m.Verdict(update=digest, counted=False, reason="its norm is 40 times the median")
    certificate = the_certificate(folder).to_bytes()
    guest = Ticket.from_text((folder.directory / "ticket.txt").read_text()).guest_keys()
    new = NEXT.public
    versions = {"protocol": PROTOCOL_VERSION, "oldest": PROTOCOL_VERSION, "package": "0.1.0"}
    claim = m.BackboneClaim(digest=digest, preprocessing=SCHEMA, probe=bytes(range(64)))
    part = m.PartRef(name=PART, digest=digest, sealed_bytes=1234)
    hello = m.Hello(**versions, federation=ROOT.federation, client=CLIENT)
    said: list[tuple[str, m.Message]] = [
        ("client", hello),
        ("client", hello.model_copy(update={
            "device": "x86-64, 8 cores", "methods": ["running_mean==1"], "run": RUN,
            "schema_digest": SCHEMA, "backbone": claim,
        })),
        ("server", m.Welcome(
            protocol=PROTOCOL_VERSION, server_nonce=nonce, certificate=certificate, run=RUN,
            method="running_mean", method_version="1", method_package="fcil 0.1.0",
            hparams='{"rank": 4}', schema_digest=SCHEMA, backbone='{"name": "embedded"}',
            needs_backbone=True, ready=True, max_payload_bytes=64 << 20, credit=32 << 20,
            privacy=m.PrivacyTerms(min_count=3, noise_multiplier=1.5, clip=2.0, max_epsilon=8.0),
            half=["lora"], verdict=verdict, clock_ms=NOW * 1000,
        )),
        ("server", m.RoundOpen(
            **where, rounds=2, base=1, classes=[2, 3], past=[0, 1], seed=[7, 11], remaining_s=599.5,
            min_count=5, parts=[part], verdict=verdict,
        )),
        ("server", m.UseModel(
            **where, rounds=2, base=1, classes=[2, 3], past=[0, 1], parts=[part], promoted=True,
        )),
        ("server", m.RoundClosed(**where, outcome="done", answer="updated", verdict=verdict)),
        ("client", m.Decline(**where, reason="not_now")),
        ("client", m.Progress(**where, phase="working", done=3, total=10, paused=True)),
        ("client", m.Update(digest=digest, unasked=2)),
        ("client", m.Want(digest=digest, chunks=[0, 1, 5], span=4, header=True)),
        ("server", m.Parts(digest=digest)),
        ("client", m.Fetched(digest=digest, size=70_000)),
        ("client", m.Chunk(digest=digest, index=3)),
        ("server", m.Ack(digest=digest)),
        ("server", m.Nack(
            code="stale_update", text="made from state 1, expected 2.", action="None.",
            digest=digest,
        )),
        ("guest", m.Enrol(
            device="Linux aarch64", **new.to_fields(),
            proof=NEXT.sign(PROOF, proof_text(guest.public.curve, new)),
        )),
        ("server", m.Enrolled(
            client=CLIENT, name="camera 1", certificate=certificate,
            addresses=["fcil.example:7780"],
        )),
        ("client", m.Rotate(
            **new.to_fields(), proof=NEXT.sign(PROOF, proof_text(CLIENT_KEYS.public.curve, new)),
        )),
        ("relay", m.Uplink(
            **versions, federation=ROOT.federation, relay=CLIENT, address="relay.example:7780",
        )),
        ("server", m.Admit(
            protocol=PROTOCOL_VERSION, server_nonce=nonce, certificate=certificate, credit=32 << 20,
            members=[CLIENT_KEYS.public.curve], guests=[guest.public.curve],
        )),
        ("server", m.Bye(reason="another connection with the same key stays", code="two_links")),
        ("relay", m.Pull(digest=digest, chunks=[4, 5], span=2)),
        ("relay", m.Release(digests=[digest])),
    ]  # fmt: skip
    assert {type(message) for _, message in said} == set(m.MESSAGES.values())
    return [(who, message, secret(f"blob {i}")) for i, (who, message) in enumerate(said)]


def said_by(folder: Folder) -> None:
    """Freeze the messages whose types are in no file yet: later ones get a file of their own."""
    files = sorted(folder.directory.glob("messages*.json"))
    frozen = {m["type"] for f in files for m in json.loads(f.read_bytes())["messages"]}
    if frozen >= messages.MESSAGES.keys():
        return
    guest = Ticket.from_text((folder.directory / "ticket.txt").read_text()).guest_keys()
    signers = {"client": CLIENT_KEYS, "server": SERVER, "relay": RELAY, "guest": guest}
    blobs = {"update": 3, "parts": 3, "chunk": 1}
    listed = []
    for seq, (who, unstamped, mark) in enumerate(words(folder), start=1):
        if unstamped.type in frozen:
            continue
        stamp = {"nonce": secret(f"nonce of {who}")[:16], "seq": seq}
        message = unstamped.model_copy(update=stamp) if unstamped.signed else unstamped
        body = encode(message)
        signature = signers[who].sign("message", body) if message.signed else b""
        opaque = [mark[: 8 * (i + 1)] for i in range(blobs.get(message.type, 0))]
        frames = [base64.b64encode(frame).decode() for frame in (body, signature, *opaque)]
        fields = message.model_dump()
        listed.append({"type": message.type, "signer": who, "fields": fields, "frames": frames})
    if files:
        folder.add(f"messages-{len(files) + 1}", {"messages": listed})
        return
    number, key = 2**40 + 5, CLIENT_KEYS.public.curve
    laned = {
        "number": number, "key": key,
        "up": relay_frames.up(number, key, [b"body", b"signature"]),
        "up_end": relay_frames.up(number, key),
        "down": relay_frames.down(number, [b"body", b"signature"]),
        "down_end": relay_frames.down(number),
    }  # fmt: skip
    folder.add("messages", {"messages": listed, "lane": laned})


def macs(folder: Folder) -> None:
    if not folder.has("session-macs"):
        own = {who: KeyAgreement(secret(f"{who} session")) for who in ("client", "server")}
        nonces = {who: secret(f"nonce of {who}")[:16] for who in own}
        signing = {"client": CLIENT_KEYS.public.signing, "server": SERVER.public.signing}
        sides = [SessionSide(nonces[who], signing[who], own[who].public) for who in own]
        keys = own["client"].agree(*sides)
        body = encode(messages.Bye(reason="the device rests", seq=2))
        said = {
            "session_keys": {who: one.public for who, one in own.items()},
            "nonces": nonces, "signing": signing,
            "to_server": keys.to_server, "to_client": keys.to_client, "body": body,
            "macs": {
                "client": mac_of(keys.to_server, body), "server": mac_of(keys.to_client, body),
            },
        }  # fmt: skip
        folder.add("session-macs", said)


def freeze(folder: Folder) -> None:
    """Freeze what travels, and the keys that open it."""
    identities(folder)
    certificates(folder)
    tickets(folder)
    enrolment(folder)
    envelope(folder, "update", UPDATE, CHUNK_BYTES)
    envelope(folder, "update-compact", UPDATE, CHUNK_BYTES)
    envelope(folder, "inventory", INVENTORY)
    envelope(folder, "part", BROADCAST)
    envelope(folder, "part-compact", BROADCAST)
    said_by(folder)
    macs(folder)
