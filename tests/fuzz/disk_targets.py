"""Everything that is read back from a disk, which may have failed or been in other hands."""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from fcil_client.data import manifest
from fcil_client.state import privacy_budget, sent_journal
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.outbox import Outbox
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import StoredEnvelope, read_envelope, seal
from fcil_protocol.errors import CannotOpen, FcilError, WireError
from fcil_protocol.ids import ClientId
from fcil_protocol.storage.segment import HEAD_BYTES, RecordKind, Segment
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.passphrase import open_with_passphrase
from fcil_server.federation.api_tokens import (
    REQUESTS_NAME,
    TOKENS_NAME,
    find_token,
    make_token,
    read_tokens,
)
from fcil_server.sessions.relay.home import load_record
from fcil_server.storage import archive
from fcil_server.web.api.past_acts import PastActs
from fcil_server.web.requests import RefusedRequest
from fuzz.harness import CUT, Once, must, target
from fuzz.wire_targets import CLIENT, CORE, PLAIN, ROOT, sealed_seeds

# In TMPDIR, which scripts/fuzz puts into memory and removes.
scratch = Once(lambda: Path(tempfile.mkdtemp(prefix="fcil-fuzz-")))


def file(name, data):
    """Write a private file and return its path."""
    path = scratch() / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


# --- envelopes ------------------------------------------------------------------------------


def stored_seeds():
    return [sealed.stored(wrap).to_bytes() for sealed, wrap in sealed_seeds()]


@target("stored", stored_seeds, max_bytes=32768)
def stored(data):
    found = StoredEnvelope.from_bytes(data)
    must(found.to_bytes() == data, "an envelope is read as it was written")
    return True


def with_checksum(data):
    """Let the sizes and the small pieces be what they are: their checksum fits."""
    sizes = data[:24]
    small = sum(int.from_bytes(data[a:b], "little") for a, b in ((8, 12), (12, 14), (14, 16)))
    digest = hashlib.sha256(sizes + data[56 : 56 + small]).digest()
    return sizes + digest + data[56:]


@target("stored_file", stored_seeds, max_bytes=32768)
def stored_file(data):
    """Written by somebody who can compute a checksum."""
    found = read_envelope(file("envelope", with_checksum(data)))
    must(found.to_bytes()[56:] == data[56:], "every byte is what was there")
    return True


def assembly_header():
    sealed, _ = seal(PLAIN, CORE, CLIENT, chunk_bytes=16384)
    return sealed


@target("assembly", lambda: [bytes([0, 4]), bytes([1, 2, 0, 3, 4]), bytes([0, 3, 2, 5, 4])])
def assembly(data, sealed=Once(assembly_header)):  # noqa: B008  made once for all inputs
    """Chunks in any order, good and bad, with restarts between."""
    envelope = sealed()
    path = scratch() / "assembly"
    path.unlink(missing_ok=True)
    one, here = Assembly(envelope.parsed, path=path), set()
    for number in data[:64]:
        index, what = number % 4, number // 4 % 4
        if what == 3:
            one = Assembly(envelope.parsed, path=path)  # after a crash
            continue
        chunk = bytes(envelope.chunk(index)) if index < 2 else b"x" * number
        try:
            one.put(index, chunk if what else chunk[:-1] + b"\0")
        except WireError:
            continue
        here.add(index)
    must(set(one.missing(9)) == {0, 1} - here, "it knows what it lacks")
    must(one.complete == (here >= {0, 1}), "and when it is complete")
    if one.complete:
        must(b"".join(one.steps()) == envelope.body, "and then it is the body")
    return one.complete


# --- the spool ------------------------------------------------------------------------------

SALT = bytes(16)


def record(piece):
    """Return a record with checksums that fit; its first bytes say kind and length of key."""
    kind, key_bytes = piece[0] % 5, piece[1] % 9
    key, body = piece[2 : 2 + key_bytes], piece[2 + key_bytes :]
    from fcil_protocol.storage.segment import _FIELDS, _MAGIC, _VERSION  # noqa: PLC0415

    fields = _FIELDS.pack(_MAGIC, _VERSION, kind, len(key), len(body))
    digest = hashlib.sha256(SALT + fields + key + body).digest()
    return Segment(Path("-"), 1, SALT)._head(fields, digest) + key + body


def segment_seeds():
    one, two = bytes([1, 3]) + b"oneBODY", bytes([1, 3]) + b"twoBODY"
    gone = bytes([int(RecordKind.REMOVED), 3]) + b"one"
    return [
        CUT.join((one, two, gone)),
        CUT.join((one, b"\xffjunk", two)),
        one + CUT + b"\xff" + record(two)[: HEAD_BYTES + 2],
    ]


@target("spool", segment_seeds)
def spool(data):
    """Records and junk in any order; junk begins with 255 and has no checksums made for it."""
    directory = scratch() / "spool"
    for path in directory.rglob("*.*"):
        path.unlink()
    directory.mkdir(exist_ok=True)
    parts = [p[1:] if p[0] == 255 else record(p) for p in data.split(CUT) if len(p) > 1]
    name = f"00000001-{SALT.hex()}.seg"
    (directory / name).write_bytes(b"".join(parts))
    first = Spool(directory)
    found = {key: first.get(key) for key in first.keys()}  # noqa: SIM118  no mapping
    first.close()
    again = Spool(directory)
    try:
        must(not again.recovered, "what was repaired stays repaired")
        must({key: again.get(key) for key in again.keys()} == found, "and nothing was lost")  # noqa: SIM118
    finally:
        again.close()
    return bool(found)


# --- files of keys and clients --------------------------------------------------------------


def key_seeds():
    path = scratch() / "seed"
    for keys in (CLIENT, ROOT):
        keys.save(path)
        yield path.read_bytes()


@target("key_file", key_seeds, form="json")
def key_file(data):
    path = file("keys.json", data)
    kind = RootKey if b"fcil-root-key" in data else PrivateKeys
    found = kind.load(path)
    must(repr(found).count("(") == 1, "it shows its fingerprint")
    return True


MEMBER = Enrolment(
    ClientId("a" * 26), "c", ROOT.federation, ROOT.certify(CLIENT.public).to_bytes().hex(),
    ("localhost:1",), "/images",
)  # fmt: skip


def token_seeds():
    folder = scratch() / "tokens"
    folder.mkdir(exist_ok=True)
    (folder / TOKENS_NAME).unlink(missing_ok=True)
    seeds = []
    for name, lasts_s in (("a", None), ("b", 60.0)):
        make_token(folder, name, "operate", lasts_s=lasts_s, now=1.0)
        seeds.append((folder / TOKENS_NAME).read_bytes())
    return seeds


@target("api_tokens", token_seeds, form="json")
def api_tokens(data):
    tokens = read_tokens(file(TOKENS_NAME, data).parent)
    must(find_token(tokens, "fcil_", 0.0) is None, "a text that was never made opens nothing")
    return True


@target(
    "past_acts",
    lambda: [
        b'{"version": 1, "acts": {"k": {"request": "r", "at": 1.0, "status": 200, "content": {"a": 1}}}}'
    ],
    form="json",
)
def past_acts(data):
    acts = PastActs(file(REQUESTS_NAME, data).parent, clock=lambda: 2.0)
    with suppress(RefusedRequest):
        acts.begin("k", "r")
    return True


def home():
    found = Home(scratch() / "home")
    found.make()
    return found


HOME = Once(home)


def client_seeds():
    HOME().save_enrolment(MEMBER)
    return [(HOME().directory / "client.json").read_bytes()]


@target("client_file", client_seeds, form="json")
def client_file(data):
    (HOME().directory / "client.json").write_bytes(data)
    found = HOME().enrolment()
    HOME().save_enrolment(found)
    must(HOME().enrolment() == found, "a client is read as it was written")
    return True


def outbox_seeds():
    sealed, wrap = next(sealed_seeds())
    return [sealed.stored(wrap).to_bytes()]


@target("outbox_file", outbox_seeds, max_bytes=32768)
def outbox_file(data):
    """An update that an earlier process left; one that cannot be read is dropped."""
    path = HOME().outbox_path("5" * 64)
    path.write_bytes(data)
    with suppress(FcilError):
        path = path.rename(HOME().outbox_path(read_envelope(path).parsed.update_id))
    order, digest = Outbox(HOME()).waiting()
    must((order is None) == (digest == ""), "an update comes with its order")
    must(bool(digest) == path.exists(), "the other is dropped")
    HOME().reset_state()
    return bool(digest)


def relay_seeds():
    fields = {
        "client_id": "a" * 26, "name": "r", "federation": ROOT.federation, "ticket": "5" * 64,
        "certificate": MEMBER.certificate, "addresses": ["localhost:1"],
    }  # fmt: skip
    yield json.dumps(fields).encode()


@target("relay_record", relay_seeds, form="json")
def relay_record(data):
    path = file("relay.json", data)
    return load_record(path.parent) is not None


def charge_seeds():
    fields = {
        "time": "2026-01-02T03:04:05+00:00", "run": CORE.run, "task": 0, "kind": "train",
        "round": 0, "classes": ["cat"], "statistics": ["mean"], "noise_multiplier": 1.5,
        "clip": 3.0, "sampling_rate": 1.0, "delta": 1e-6, "epsilon": 2.5,
    }  # fmt: skip
    line = json.dumps(fields).encode() + b"\n"
    return [line, line * 2 + line[:20]]


@target("privacy_ledger", charge_seeds, form="json")
def privacy_ledger(data):
    file(privacy_budget.NAME, data if data.endswith(b"\n") else data + b"\n")
    for charge in privacy_budget.PrivacyLedger(scratch()).read():
        must(charge.noise_multiplier > 0, "noise is a number above 0")
        must(all(isinstance(name, str) for name in charge.classes), "classes have names")
        must(len(charge.statistics) >= 0, "statistics can be counted")
    return data.count(b"\n") > 0


def journal_seeds():
    at = {"time": "2026-01-02T03:04:05+00:00", "digest": "5" * 64}
    events = ({"event": "sealed", "run": CORE.run, "tensors": []}, {"event": "sent"},
              {"event": "refused", "code": "too_large"})  # fmt: skip
    yield b"".join(json.dumps(at | event).encode() + b"\n" for event in events)


@target("egress_journal", journal_seeds)
def egress_journal(data):
    """A damaged line is counted and the others are shown."""
    file(sent_journal.NAME, data)
    rows, damaged = sent_journal.read(scratch())
    for row in rows:
        sent_journal.last_event(row)
    must(len(rows) + damaged <= data.count(b"\n") + 1, "no more rows than lines")
    return bool(rows)


def manifest_seeds():
    rows = {f"a/{i}.png": ["a", None, 10, 20, f"{i:064x}", "", True] for i in range(3)}
    rows["b/bad.png"] = ["b", "train", 1, 2, "", "cannot be read", True]
    sides = {f"{i:064x}": side for i, side in enumerate(("train", "select", "test"))}
    mark = manifest._salt_mark(bytes(16))
    yield json.dumps(
        {"salt": mark, "files": rows, "sides": sides, "faults": [], "notes": ["x"], "format": 1}
    ).encode()


@target("manifest", manifest_seeds, form="json")
def manifest_file(data):
    found = manifest.load(file("manifest.json", data), bytes(16))
    if found is not None:
        must(all(i.side in ("train", "select", "test") for i in found.images), "every side is one")
        len(found.digest + str(found.counts("train")))
    return found is not None


# --- backups --------------------------------------------------------------------------------


def backup_seeds():
    """Archives with a short state: without and with sealed keys, and with an extended header."""
    state = "runs/r20260102-030405-abcd/states/000001"
    members = {"federation.toml": b"", f"{state}.json": b"{}", f"{state}.safetensors": b"x" * 600}
    for more in ({}, {"keys.sealed": b"fcilpwd1"}):
        out = io.BytesIO()
        writer = archive.ArchiveWriter(out, 0.0)
        for name, data in (members | more).items():
            writer.add(name, data)
        writer.finish(
            archive.BackupManifest("1", 0.0, "f", "n", None, None, bool(more), writer.files)
        )
        yield out.getvalue()
    extended = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(out.getvalue())) as plain,
        tarfile.open(fileobj=extended, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member in plain:
            member.pax_headers = {"comment": "GNU.sparse.map=1,2"}
            tar.addfile(member, plain.extractfile(member))
    yield extended.getvalue()


@target("backup", backup_seeds, max_bytes=32768)
def backup(data):
    """Whatever a backup holds, nothing is written outside the directory, and only plain files."""
    path, place = file("backup.tar", data), scratch() / "restored"
    shutil.rmtree(place, ignore_errors=True)
    before = {p.name for p in scratch().iterdir()}
    manifest = archive.verify(path)
    place.mkdir()
    archive.unpack_into(path, manifest, place)
    made = {str(p.relative_to(place)) for p in place.rglob("*") if not p.is_dir()}
    must(made == set(manifest.files), "what the manifest names is what is written")
    must(not any(p.is_symlink() for p in place.rglob("*")), "no links")
    must({p.name for p in scratch().iterdir()} == before | {"restored"}, "nothing beside it")
    return True


@target("passphrase", lambda: [b"fcilpwd1\x01" + bytes(44), b"fcilpwd1\x02" + bytes(60)])
def passphrase_bytes(data):
    """A guess never costs more than the bound, and opens nothing."""
    try:
        open_with_passphrase(
            data[:8] + bytes(b % 4 for b in data[8:9]) + data[9:], "a passphrase", b"c"
        )
    except CannotOpen:
        return True  # understood
    return False
