"""What an earlier version sealed, signed and sent is read for ever, and refused when altered."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fcil_client.state.home import Home
from fcil_client.state.outbox import Outbox
from fcil_protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import open_body, unwrap_key, verify_header, wrap_key
from fcil_protocol.envelopes.header import Core, header_with, parse_header
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope, read_envelope
from fcil_protocol.errors import CorruptFile, FcilError, KeyFileError, TrustError
from fcil_protocol.ids import Digest
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import encode, parse
from fcil_protocol.messages.messages import MESSAGES, Enrol, Rotate
from fcil_protocol.payloads.payload import pack, unpack
from fcil_protocol.storage.segment import Segment
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, signed_form, verify_signature
from fcil_protocol.trust.session_keys import KeyAgreement, SessionSide, mac_of
from fcil_protocol.trust.ticket import PROOF, Ticket, proof_text
from fcil_server.aggregation.store import PartStore
from frozen import (
    FOLDERS,
    Vectors,
    flipped,
    frames_of,
    payload_of,
    refused_when_flipped,
    same,
    shown,
)

ENVELOPES = ("update", "update-compact", "inventory", "part", "part-compact")


@pytest.fixture(params=FOLDERS, ids=lambda folder: f"version {folder.name}")
def vectors(request: pytest.FixtureRequest, tmp_path: Path) -> Vectors:
    return Vectors(request.param, tmp_path)


def test_every_version_that_is_spoken_has_vectors():
    spoken = range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1)
    missing = {str(n) for n in spoken} - {folder.name for folder in FOLDERS}
    assert not missing, "run scripts/vectors before the version is published"


# --- envelopes ------------------------------------------------------------------------------


def open_envelope(data: bytes, signer: PublicKeys, recipient: PrivateKeys) -> bytes:
    """Open a stored envelope as a receiver does: signature, hashes, wrap, body."""
    stored = StoredEnvelope.from_bytes(data)
    verify_header(stored.header, stored.signature, signer)
    header = parse_header(stored.header, max_plain_bytes=1 << 20)
    count = len(header.hashes)
    chunks = [stored.read(range(i, i + 1)) for i in range(count)]
    if not all(header.fits(i, chunk) for i, chunk in enumerate(chunks)):
        raise CorruptFile("a chunk does not fit its hash.")
    return open_body(header, unwrap_key(stored.wrap, stored.header, recipient), chunks)


def people(vectors: Vectors, name: str) -> tuple[PrivateKeys, PrivateKeys]:
    """Return who sealed an envelope, and for whom the file of it was wrapped."""
    up = vectors.content(name)["core"]["direction"] == "update"
    client, server = vectors.keys("client"), vectors.keys("server")
    return (client, server) if up else (server, client)


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_opens_to_what_was_sealed(vectors: Vectors, name: str):
    said, (sender, recipient) = vectors.content(name), people(vectors, name)
    data = vectors.data(f"{name}.envelope")
    plain = open_envelope(data, sender.public, recipient)
    assert hashlib.sha256(plain).hexdigest() == said["plain_sha256"]
    assert same(unpack(plain), payload_of(said["payload"]))
    header = StoredEnvelope.from_bytes(data).parsed
    assert dataclasses.asdict(header.core) == said["core"]
    assert (header.update_id, header.chunk_bytes) == (said["digest"], said["chunk_bytes"])


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_is_encoded_to_the_same_bytes_again(vectors: Vectors, name: str):
    """All but the random: payload, core, header, signature, and the file around them.

    Other versions of zlib deflate to other bytes: a compact payload need not have the same.
    """
    said, (sender, _) = vectors.content(name), people(vectors, name)
    data = vectors.data(f"{name}.envelope")
    stored = StoredEnvelope.from_bytes(data)
    header = stored.parsed
    if not name.endswith("-compact"):
        plain = pack(payload_of(said["payload"]))
        assert hashlib.sha256(plain).hexdigest() == said["plain_sha256"]
    assert Core(**said["core"]).to_bytes() == header.core_bytes
    sizes = (header.sealed_bytes, header.plain_bytes, header.chunk_bytes)
    assert header_with(header.core_bytes, b"".join(header.hashes), *sizes) == stored.header
    assert sender.sign("envelope", stored.header) == stored.signature
    assert stored.to_bytes() == data


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_flipped_bit_of_an_envelope_is_refused(vectors: Vectors, name: str):
    sender, recipient = people(vectors, name)
    data = vectors.data(f"{name}.envelope")
    refused_when_flipped(data, lambda d: open_envelope(d, sender.public, recipient), 150)


def test_the_server_opens_the_part_that_it_keeps_and_wraps_its_key_anew(vectors: Vectors):
    said, server = vectors.content("part"), vectors.keys("server")
    digest = Digest(said["digest"])
    path = vectors.placed("part.part", f"parts/{digest}.part")
    kept = PartStore(path.parent).get(digest)
    plain = open_envelope(kept, server.public, server)
    assert same(unpack(plain), payload_of(said["payload"]))
    stored, sent = (StoredEnvelope.from_bytes(d) for d in (kept, vectors.data("part.envelope")))
    assert (stored.header, stored.body) == (sent.header, sent.body), "sealed once for everybody"
    key = unwrap_key(stored.wrap, stored.header, server)
    assert key.value.hex() == said["content_key"]["hex"]
    relay = vectors.keys("relay")
    again = wrap_key(key, stored.header, relay.public)
    assert unwrap_key(again, stored.header, relay) == key
    for spoilt in flipped(path.read_bytes()):
        path.write_bytes(spoilt)
        with pytest.raises(CorruptFile):
            PartStore(path.parent).get(digest)


def test_an_update_in_the_outbox_is_offered_again(vectors: Vectors, tmp_path: Path):
    said = vectors.content("update")
    home = Home(tmp_path / "home")
    home.make()
    path = vectors.placed("update.envelope", f"home/outbox/{said['digest']}.update")
    assert read_envelope(path).to_bytes() == path.read_bytes()
    order, digest = Outbox(home).waiting()
    assert digest == said["digest"]
    assert (order.run, order.task, order.kind, order.round, order.base) == tuple(
        said["core"][name] for name in ("run", "task", "kind", "round", "base")
    )
    path.write_bytes(next(flipped(path.read_bytes())))
    assert Outbox(home).waiting() == (None, "")


# --- who is who -----------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["server", "client", "next", "relay"])
def test_a_key_file_gives_the_keys_that_it_was_written_with(vectors: Vectors, who: str, tmp_path):
    said, keys = vectors.content("test-only-keys"), vectors.keys(who)
    assert keys.public.fingerprint == said["fingerprints"][who]
    keys.save(tmp_path / "again")
    data = (tmp_path / "again").read_bytes()
    assert data == vectors.data(f"test-only-keys.{who}")
    for spoilt in flipped(data):
        (tmp_path / "again").write_bytes(spoilt)
        with pytest.raises(KeyFileError):
            PrivateKeys.load(tmp_path / "again")


def test_the_root_key_file_names_the_federation(vectors: Vectors, tmp_path: Path):
    path = vectors.placed("test-only-keys.root", "root.json")
    root = RootKey.load(path)
    assert root.federation == vectors.content("test-only-keys")["federation"]
    root.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["certificate", "certificate-next"])
def test_a_certificate_is_believed_as_long_as_it_says(vectors: Vectors, name: str):
    said, data = vectors.content(name), vectors.data(f"{name}.certificate")
    certificate = Certificate.from_bytes(data)
    for now in (said["not_before"], said["not_after"]):
        keys = certificate.verify(said["federation"], now)
        assert shown(keys.to_fields()) == said["keys"]
        with pytest.raises(TrustError):
            certificate.verify(said["federation"], now + (1 if now > said["not_before"] else -1))
    assert (certificate.serial, shown(certificate.root)) == (said["serial"], said["root"])
    assert certificate.to_bytes() == data
    root = RootKey.load(vectors.placed("test-only-keys.root", "root.json"))
    public = Ed25519PublicKey.from_public_bytes(root.public)
    public.verify(certificate.signature, signed_form("certificate", certificate.body))
    middle = said["not_after"] - 1
    refused_when_flipped(
        data, lambda d: Certificate.from_bytes(d).verify(said["federation"], middle), 100
    )


def test_a_later_certificate_follows_an_earlier_one_and_not_the_other_way(vectors: Vectors):
    one, two = (
        Certificate.from_bytes(vectors.data(f"{name}.certificate"))
        for name in ("certificate", "certificate-next")
    )
    two.refuse_older(one)
    with pytest.raises(TrustError):
        one.refuse_older(two)


@pytest.mark.parametrize("name", ["ticket", "ticket-via", "ticket-relay"])
def test_a_ticket_says_what_it_said(vectors: Vectors, name: str):
    said, text = vectors.content(name), vectors.data(f"{name}.txt").decode().strip()
    guest = said.pop("guest")
    ticket = Ticket.from_text(text)
    assert shown(vars(ticket)) == said
    assert ticket.to_text() == text
    public = ticket.guest_keys().public
    assert shown({"curve": public.curve, "signing": public.signing}) == guest
    for at in range(len(text) - 1):  # the last character can have bits that belong to no byte
        other = "B" if text[at] == "A" else "A"
        with pytest.raises(FcilError):
            Ticket.from_text(text[:at] + other + text[at + 1 :])


def test_an_enrolment_says_who_the_client_is(vectors: Vectors):
    said = vectors.content("enrolment")
    home = Home(vectors.placed("enrolment.client", "home/client.json").parent)
    enrolment = home.enrolment()
    assert enrolment is not None
    assert shown(vars(enrolment)) == said
    assert enrolment.certificate == vectors.data("certificate.certificate").hex()
    home.save_enrolment(enrolment)
    assert (home.directory / "client.json").read_bytes() == vectors.data("enrolment.client")


# --- messages -------------------------------------------------------------------------------


def signer_of(vectors: Vectors, who: str) -> PublicKeys:
    if who == "guest":
        return Ticket.from_text(vectors.data("ticket.txt").decode()).guest_keys().public
    return vectors.keys(who).public


def all_messages(vectors: Vectors) -> list[dict[str, Any]]:
    """Return the messages of all files: types that came later have files of their own."""
    names = sorted(path.stem for path in vectors.folder.glob("messages*.json"))
    return [message for name in names for message in vectors.content(name)["messages"]]


def test_every_type_of_message_of_this_version_is_frozen(tmp_path: Path):
    newest = Vectors(FOLDERS[-1].with_name(str(PROTOCOL_VERSION)), tmp_path)
    assert {m["type"] for m in all_messages(newest)} == MESSAGES.keys()


def as_stated(fields: Any, said: Any) -> Any:
    """Return the fields that were there when the vector was made, also those of maps within."""
    if not (isinstance(fields, dict) and isinstance(said, dict)):
        return fields
    return {k: as_stated(v, said[k]) for k, v in fields.items() if k in said}


def test_a_message_is_parsed_to_what_it_said_and_encoded_to_the_same_bytes(vectors: Vectors):
    for said in all_messages(vectors):
        frames = frames_of(said)
        received = parse(frames)
        assert received.message.type == said["type"]
        fields = shown(received.message.model_dump())
        assert as_stated(fields, said["fields"]) == said["fields"]
        assert encode(received.message) == frames[0]
        assert list(received.blobs) == frames[2:]
        if received.message.signed:
            signer = signer_of(vectors, said["signer"])
            verify_signature(signer.signing, "message", received.body, received.signature)


def test_the_keys_of_a_session_and_its_macs_are_as_stated(vectors: Vectors):
    said = vectors.content("session-macs")
    of = {}
    for who in ("client", "server"):
        text = f"fcil test vectors, never use: {who} session"
        of[who] = KeyAgreement(hashlib.sha256(text.encode()).digest())
    assert {who: one.public.hex() for who, one in of.items()} == {
        who: key["hex"] for who, key in said["session_keys"].items()
    }
    sides = [
        SessionSide(
            bytes.fromhex(said["nonces"][who]["hex"]),
            vectors.keys(who).public.signing,
            of[who].public,
        )
        for who in of
    ]
    body = bytes.fromhex(said["body"]["hex"])
    for who, own in of.items():
        keys = own.agree(*sides)
        assert (keys.to_server.hex(), keys.to_client.hex()) == (
            said["to_server"]["hex"],
            said["to_client"]["hex"],
        )
        mine = keys.to_server if who == "client" else keys.to_client
        assert mac_of(mine, body).hex() == said["macs"][who]["hex"]
    assert encode(parse([body, bytes(16)]).message) == body


def believe(frames: list[bytes], signer: PublicKeys) -> None:
    received = parse(frames)
    verify_signature(signer.signing, "message", received.body, received.signature)


def test_a_message_with_a_flipped_bit_is_refused(vectors: Vectors):
    """That of a chunk carries no signature: what it names is judged by the header's hashes."""
    for said in all_messages(vectors):
        body, signature, *blobs = frames_of(said)
        if signature:
            signer = signer_of(vectors, said["signer"])
            refused_when_flipped(body, lambda d: believe([d, signature, *blobs], signer), 25)  # noqa: B023
            refused_when_flipped(signature, lambda d: believe([body, d, *blobs], signer), 4)  # noqa: B023


@pytest.mark.parametrize("cls", [Enrol, Rotate])
def test_new_keys_are_proved_by_themselves(vectors: Vectors, cls: type):
    [said] = [m for m in all_messages(vectors) if m["type"] == cls.type]
    message = parse(frames_of(said)).message
    old = signer_of(vectors, said["signer"]).curve
    public = PublicKeys(message.curve, message.signing, message.sealing)
    assert public == vectors.keys("next").public
    verify_signature(message.signing, PROOF, proof_text(old, public), message.proof)


def test_a_lane_is_named_as_it_was(vectors: Vectors):
    said = vectors.content("messages")["lane"]
    ways = {
        "up": (relay_frames.read_up, said["key"]),
        "down": (relay_frames.read_down, {"hex": ""}),
    }
    for way, (read, key) in ways.items():
        for name, frames in ((way, (b"body", b"signature")), (f"{way}_end", ())):
            laned = read([bytes.fromhex(frame["hex"]) for frame in said[name]])
            assert (laned.number, shown(laned.key), laned.frames) == (said["number"], key, frames)


# --- the spool ------------------------------------------------------------------------------


def test_a_segment_of_the_spool_gives_its_records_back(vectors: Vectors):
    said = vectors.content("segment")
    path = vectors.placed("segment.seg", f"spool/{said['file']}")
    [segment] = Segment.all_in(path.parent)
    found = [[r.kind.name, r.key, r.body_bytes] for r in segment.scan()]
    assert found == said["records"]
    spool = Spool(path.parent)
    try:
        assert spool.recovered == []
        assert spool.keys() == list(said["left"])
        for key, digest in said["left"].items():
            assert hashlib.sha256(spool.get(key)).hexdigest() == digest
    finally:
        spool.close()


def test_a_flipped_bit_of_a_segment_spoils_its_record_and_is_noticed(vectors: Vectors):
    said = vectors.content("segment")
    for spoilt in flipped(vectors.data("segment.seg")):
        path = vectors.placed("segment.seg", f"spool/{said['file']}")
        path.write_bytes(spoilt)
        [segment] = Segment.all_in(path.parent)
        found = [[r.kind.name, r.key, r.body_bytes] for r in segment.scan() if hasattr(r, "kind")]
        assert len(found) == len(said["records"]) - 1
        assert all(record in said["records"] for record in found)
