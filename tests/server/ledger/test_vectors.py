"""What an earlier version of the server stored is read for ever, and refused when altered."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import pytest

from fcil_protocol.errors import CannotOpen, CorruptFile, FcilError
from fcil_protocol.payloads.payload import pack, unpack
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.store import StateStore
from fcil_server.ledger.databases.schema import MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.storage import archive
from fcil_server.storage.restore import Keys, restore
from frozen import FOLDERS, Vectors, flipped, payload_of, same

pytestmark = pytest.mark.ledger_file

LEDGERS = [(folder, path.stem) for folder in FOLDERS for path in folder.glob("ledger-*.json")]


@pytest.fixture(params=FOLDERS, ids=lambda folder: f"version {folder.name}")
def vectors(request: pytest.FixtureRequest, tmp_path: Path) -> Vectors:
    return Vectors(request.param, tmp_path)


# --- states ---------------------------------------------------------------------------------


def test_a_state_comes_back_and_is_packed_to_the_same_bytes(vectors: Vectors, tmp_path: Path):
    said = vectors.content("state")
    path = vectors.placed("state.safetensors", f"states/{said['number']:06d}.safetensors")
    record = vectors.placed("state.record", f"states/{said['number']:06d}.json")
    store = StateStore(path.parent)
    state, noted = store.load(said["number"]), store.record(said["number"])
    assert same(state, payload_of(said["payload"]))
    assert (noted.digest, noted.parent, noted.task) == tuple(
        said[name] for name in ("digest", "parent", "task")
    )
    assert pack(state) == pack(unpack(path.read_bytes())) == path.read_bytes()
    again = StateStore(tmp_path / "again")
    again.save(said["number"], state, noted.parent, noted.task)
    assert again.pair(said["number"]) == (path.read_bytes(), record.read_bytes())


def test_a_flipped_bit_of_a_state_is_refused(vectors: Vectors):
    number = vectors.content("state")["number"]
    vectors.placed("state.record", f"states/{number:06d}.json")
    path = vectors.placed("state.safetensors", f"states/{number:06d}.safetensors")
    for spoilt in flipped(path.read_bytes(), 60):
        path.write_bytes(spoilt)
        with pytest.raises(CorruptFile):
            StateStore(path.parent).load(number)


# --- ledgers --------------------------------------------------------------------------------


def test_every_version_of_the_ledger_is_frozen():
    found = {int(name.removeprefix("ledger-")) for _, name in LEDGERS}
    missing = set(range(1, SCHEMA_VERSION + 1)) - found
    assert not missing, "run scripts/vectors once the new tables are as they will be published"


@pytest.mark.parametrize(("folder", "name"), LEDGERS, ids=[name for _, name in LEDGERS])
def test_a_ledger_of_an_earlier_version_holds_all_that_it_held(
    folder: Path, name: str, tmp_path: Path
):
    vectors = Vectors(folder, tmp_path)
    said = vectors.content(name)
    script = MIGRATIONS[said["version"] - 1]
    assert hashlib.sha256(script.encode()).hexdigest() == said["script_sha256"], (
        "a published script never changes: append another one"
    )
    path = vectors.placed(f"{name}.sqlite.gz", LEDGER_NAME)
    with Ledger(path) as ledger:
        assert ledger.database.faults() == []
        [run] = ledger.runs.all()
        [row, *_] = ledger.rounds.all(run.run_id)
        [update] = ledger.updates.of_round(row.key)
        assert (update.samples, update.status) == (240, "counted")
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    try:
        assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
        for table, rows in said["tables"].items():
            held = [dict(row) for row in db.execute(f"SELECT * FROM {table}")]
            held = [{c: v.hex() if isinstance(v, bytes) else v for c, v in r.items()} for r in held]
            for row in rows:
                stated = {c: v["hex"] if isinstance(v, dict) else v for c, v in row.items()}
                assert any(stated.items() <= one.items() for one in held), (table, stated)
    finally:
        db.close()


@pytest.mark.parametrize(("folder", "name"), LEDGERS, ids=[name for _, name in LEDGERS])
def test_a_ledger_with_a_flipped_bit_in_its_structure_is_refused(
    folder: Path, name: str, tmp_path: Path
):
    """SQLite has no checksum for a row's own bytes; a backup's digests cover them."""
    path = Vectors(folder, tmp_path).placed(f"{name}.sqlite.gz", LEDGER_NAME)
    whole = path.read_bytes()
    page = int.from_bytes(whole[16:18], "big")
    # The file's magic word, its owner (application id), and the kinds of two pages.
    for at in (0, 68, page, 3 * page):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(FcilError):
            Ledger(path)


# --- backups --------------------------------------------------------------------------------


def test_a_backup_becomes_a_federation_again(vectors: Vectors, tmp_path: Path):
    said = vectors.content("backup")
    file = vectors.placed("backup.fcil.gz", "backup.fcil")
    manifest = archive.verify(file)
    stated = said["manifest"]
    assert {n: vars(e) for n, e in manifest.files.items()} == stated.pop("files")
    assert {k: v for k, v in vars(manifest).items() if k in stated} == stated
    keys = vectors.content("test-only-keys")
    home = tmp_path / "federation"
    done = restore(file, home, Keys(passphrase=keys["passphrase"]), actor="a test")
    assert done.fork is not None
    assert (done.fork.parent_run, done.fork.parent_state) == (stated["run"], stated["state"])
    own = PrivateKeys.load(home / "keys" / "server.json")
    assert own.public.fingerprint == keys["fingerprints"]["server"]
    with Ledger(home / LEDGER_NAME) as ledger:
        [first] = [s for s in ledger.states.all(done.fork.run_id) if s.digest == said["state"]]
        assert first.state == stated["state"]


def test_a_backup_does_not_open_with_another_passphrase(vectors: Vectors, tmp_path: Path):
    file = vectors.placed("backup.fcil.gz", "backup.fcil")
    with pytest.raises(CannotOpen):
        restore(file, tmp_path / "federation", Keys(passphrase="another one"), actor="a test")
    assert not (tmp_path / "federation").exists()


def test_a_flipped_bit_of_a_backups_members_is_refused(vectors: Vectors):
    file = vectors.placed("backup.fcil.gz", "backup.fcil")
    whole = file.read_bytes()
    with archive.tarfile.open(file) as tar:
        members = [(m.offset_data, m.size) for m in tar]
    for start, size in members:
        for at in (start, start + size // 2, start + size - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(FcilError):
                archive.verify(file)
