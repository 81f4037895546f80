"""A ledger of an earlier version is brought up to date with all that it holds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fcil_protocol.errors import CorruptFile, DiskFull, FcilError, Locked, StorageError
from fcil_protocol.ids import RoundKey
from fcil_server.ledger.databases import sqlite as database
from fcil_server.ledger.databases.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.databases.sqlite import SqliteDatabase, older_name
from fcil_server.ledger.enums import Answer
from fcil_server.ledger.ledger import Ledger
from sample_run import ALICE, BOB, RUN

pytestmark = pytest.mark.ledger_file

KEY = RoundKey(RUN, 0, "train", 0)

# What a server of version 3 wrote; the columns are named, so it fits every later version.
ROWS = f"""
INSERT INTO clients (client_id, name, curve, signing, sealing, enrolled_at) VALUES
  ('{ALICE}', 'alice', x'01', x'01', x'01', 1.0), ('{BOB}', 'bob', x'02', x'02', x'02', 1.0);
INSERT INTO runs (run_id, created_at, method, method_version, config, hparams, backbone,
  schema_digest, seed, status, environment)
  VALUES ('{RUN}', 1.0, 'm', '1', '', '{{}}', '{{}}', 's', 7, 'running', '{{}}');
INSERT INTO classes (run, key, name, class_id, task, first_seen_by, seen_at)
  VALUES ('{RUN}', 'cat', 'Cat', 0, 0, '{ALICE}', 1.0), ('{RUN}', 'dog', 'dog', NULL, NULL, '{BOB}', 2.0);
INSERT INTO tasks (run, task, class_ids, opened_at) VALUES ('{RUN}', 0, '[0]', 1.0);
INSERT INTO rounds (run, task, kind, round, seq, opened_at, asked, base_state, closed_at, outcome)
  VALUES ('{RUN}', 0, 'train', 0, 0, 1.0, '["{ALICE}", "{BOB}"]', 0, 2.0, 'done');
INSERT INTO updates (run, client, task, kind, round, update_id, accepted_at, samples,
  tensor_bytes, sealed_bytes, status)
  VALUES ('{RUN}', '{ALICE}', 0, 'train', 0, 'u', 1.5, 5, 1, 2, 'counted');
INSERT INTO answers (run, task, kind, round, client, answer, reason, at)
  VALUES ('{RUN}', 0, 'train', 0, '{BOB}', 'lost', 'away', 1.7);
"""


def older(path: Path, version: int = SCHEMA_VERSION - 1) -> bytes:
    """Write a ledger of an earlier version; return its bytes."""
    old = sqlite3.connect(path)
    old.executescript("".join(MIGRATIONS[:version]) + ROWS)
    old.executescript(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {version};")
    old.close()
    path.chmod(0o600)
    return path.read_bytes()


@pytest.mark.parametrize("version", range(3, SCHEMA_VERSION))
def test_what_an_earlier_version_wrote_is_all_there(tmp_path: Path, version: int) -> None:
    path = tmp_path / "ledger.sqlite"
    older(path, version)
    with Ledger(path) as ledger:
        assert [(c.name, c.admitted) for c in ledger.classes.all(RUN)] == [
            ("Cat", True),
            ("dog", True),
        ]
        [row] = ledger.rounds.all(RUN)
        assert (row.outcome, row.why, row.asked) == ("done", "", (ALICE, BOB))
        [update] = ledger.updates.of_round(KEY)
        assert (update.client, update.samples) == (ALICE, 5)
        [answer] = ledger.answers.of_round(KEY)
        assert (answer.client, answer.answer, answer.reason) == (BOB, Answer.LOST, "away")
        ledger.answers.set(KEY, BOB, Answer.SURPLUS, "")  # a word that it did not know
        assert ledger.answers.of_round(KEY)[0].answer is Answer.SURPLUS


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_who_only_reads_an_earlier_version_changes_nothing(tmp_path: Path) -> None:
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite"
    before = older(path)
    with Ledger(path, read_only=True) as ledger:
        assert ledger.database.is_older
        assert [c.admitted for c in ledger.classes.all(RUN)] == [True, True]
        with pytest.raises(FcilError, match="readonly"):
            ledger.answers.set(KEY, BOB, Answer.SURPLUS, "")
        ledger.database.copy_to(copy)
    assert path.read_bytes() == before
    assert version_of(copy) == SCHEMA_VERSION - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.sqlite", "ledger.sqlite"]


def test_an_empty_file_is_no_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.touch(0o600)
    with pytest.raises(StorageError, match="is empty"):
        Ledger(path, read_only=True)


def test_the_ledger_of_before_is_kept_and_its_version_can_go_on_with_it(tmp_path: Path) -> None:
    path, kept = tmp_path / "ledger.sqlite", tmp_path / older_name(SCHEMA_VERSION - 1)
    older(path)
    Ledger(path).close()
    assert version_of(path) == SCHEMA_VERSION
    assert version_of(kept) == SCHEMA_VERSION - 1
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.replace(path)  # as docs/upgrades.md says
    with Ledger(path) as ledger:
        assert not ledger.database.is_older
        assert [u.samples for u in ledger.updates.of_round(KEY)] == [5]
    assert kept.exists()


def test_a_ledger_that_cannot_be_kept_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    before = older(path)

    def full(*_: object) -> None:
        raise DiskFull("planted: the disk is full.")

    monkeypatch.setattr("fcil_server.ledger.databases.database.sync_data", full)
    with pytest.raises(DiskFull):
        Ledger(path)
    assert version_of(path) == SCHEMA_VERSION - 1
    assert len(path.read_bytes()) == len(before)
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_damage_in_the_file_of_an_earlier_version_is_found_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration may make anew what is damaged; the file is damaged all the same."""
    path = tmp_path / "ledger.sqlite"
    older(path)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE INDEX planted ON classes (run, key)")
        raw.execute("PRAGMA writable_schema = ON")
        other = "CREATE INDEX planted ON classes (run, name)"
        raw.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'planted'", (other,))
        raw.commit()
    mending = (*MIGRATIONS[:-1], f"{MIGRATIONS[-1]} REINDEX;")
    monkeypatch.setattr(database, "MIGRATIONS", mending)
    with Ledger(path, read_only=True) as ledger:
        assert ledger.database.is_older
        assert ledger.database.faults()
        with pytest.raises(CorruptFile):
            ledger.database.refuse_damage()


def test_a_ledger_that_is_upgraded_while_a_reader_copies_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    older(path)
    copy_into = SqliteDatabase._copy_into

    def late(self: SqliteDatabase, copy: sqlite3.Connection) -> None:
        monkeypatch.setattr(SqliteDatabase, "_copy_into", copy_into)
        Ledger(path).close()  # a server starts
        copy_into(self, copy)

    monkeypatch.setattr(SqliteDatabase, "_copy_into", late)
    with Ledger(path, read_only=True) as ledger:
        assert [u.samples for u in ledger.updates.of_round(KEY)] == [5]


def test_a_reader_of_an_earlier_version_waits_for_no_lock_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    older(path)
    copy_into = SqliteDatabase._copy_into
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def late(self: SqliteDatabase, copy: sqlite3.Connection) -> None:
            self._file.execute("PRAGMA busy_timeout = 1")
            other.execute("BEGIN EXCLUSIVE")
            copy_into(self, copy)

        monkeypatch.setattr(SqliteDatabase, "_copy_into", late)
        with pytest.raises(Locked):
            Ledger(path, read_only=True)
