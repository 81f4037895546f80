"""Commits that do not wait for the disk, and the one sync that follows them."""

import os

import pytest

import sample_run
from fcil_protocol.errors import StorageError
from fcil_protocol.storage import atomic_files
from fcil_server.ledger.databases import sqlite as database
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from sample_run import RUN

pytestmark = pytest.mark.ledger_file


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / LEDGER_NAME) as made:
        sample_run.add_run(made)
        yield made


def mode(ledger):
    return ledger.database.number("PRAGMA synchronous")


def test_a_commit_that_does_not_wait_is_there_for_others_and_not_synced(ledger):
    with ledger.transaction(waits=False):
        ledger.runs.set_status(RUN, RunStatus.DONE)
        assert mode(ledger) == 1, "NORMAL: a commit only writes"
    with Ledger(ledger.path, read_only=True) as other:
        assert other.runs.get(RUN).status is RunStatus.DONE


def test_what_waits_still_waits_and_after_it_too(ledger):
    with ledger.transaction(waits=False):
        pass
    with ledger.transaction():
        assert mode(ledger) == 2, "FULL"


def test_an_update_may_be_accepted_where_a_sync_follows(ledger):
    with ledger.transaction(waits=False), ledger.transaction():
        assert ledger.database.in_durable
    with ledger.transaction(durable=False):
        assert not ledger.database.in_durable


def test_sync_waits_for_the_log_of_the_ledger(ledger, monkeypatch):
    synced = []
    monkeypatch.setattr(
        database, "sync_data", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    ledger.sync()
    assert synced == [f"{ledger.path}-wal"]


def test_a_log_that_is_gone_is_told_and_not_passed_over(ledger):
    database.log_path(ledger.path).unlink()
    with pytest.raises(StorageError, match="sync"):
        ledger.sync()


def test_what_a_sync_has_lost_is_not_forgotten_by_the_next(ledger, monkeypatch):
    def lost(_fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(database, "sync_data", lost)
        with pytest.raises(StorageError):
            ledger.sync()
    with pytest.raises(StorageError, match="fault"):
        ledger.sync()


def test_a_log_by_hand_grows_until_a_checkpoint_and_loses_nothing(ledger, monkeypatch):
    ledger.database.checkpoint_by_hand()
    before = ledger.path.stat().st_size
    while not ledger.long_log:
        ledger.events.add("info", "test", "x" * 1000)
    for _ in range(1500):  # more than SQLite would keep in the log by itself
        ledger.events.add("info", "test", "x" * 1000)
    assert ledger.path.stat().st_size == before, "nothing was brought into the file by itself"
    ledger.checkpoint()
    assert not ledger.long_log
    assert ledger.path.stat().st_size > before
    assert len(ledger.events.newest(limit=10_000)) >= 1500


def log_bytes(ledger):
    return database.log_path(ledger.path).stat().st_size


def grow(ledger, size):
    """Commit rows until the log is as long as this."""
    while log_bytes(ledger) < size:
        with ledger.transaction(durable=False):
            for _ in range(1000):
                ledger.events.add("info", "test", "x" * 2000)


def test_a_long_log_begins_anew_and_is_cut_with_the_next_commit(ledger):
    ledger.database.checkpoint_by_hand()
    grow(ledger, 3 * database.KEPT_LOG_BYTES)
    assert ledger.long_log, "however few commits made it so"
    count = len(ledger.events.newest(limit=100_000))
    ledger.checkpoint()
    ledger.events.add("info", "test", "the next one")
    assert log_bytes(ledger) <= database.KEPT_LOG_BYTES
    assert len(ledger.events.newest(limit=100_000)) == count + 1


class Writes(database.sqlite3.Connection):
    """A connection beside the ledger's, with a commit of the ledger's after each checkpoint."""

    def execute(self, sql, *args):
        done = super().execute(sql, *args)
        if "PASSIVE" in sql:
            rows = done.fetchall()
            self.ledger.events.add("info", "test", "somebody writes meanwhile")
            _, pages, moved = rows[0]
            return super().execute("SELECT 0, ?, ?", (pages + 1, moved))
        return done


def test_a_log_that_somebody_always_writes_to_is_emptied_before_it_is_too_long(ledger, monkeypatch):
    ledger.database.checkpoint_by_hand()
    monkeypatch.setattr(database, "MOST_LOG_BYTES", 2 << 20)
    grow(ledger, 3 << 20)
    connect = database.sqlite3.connect

    def beside(*args, **kwargs):
        made = connect(*args, factory=Writes, **kwargs)
        made.ledger = ledger
        return made

    monkeypatch.setattr(database.sqlite3, "connect", beside)
    ledger.checkpoint()
    assert log_bytes(ledger) == 0
    assert ledger.events.newest()[-1].text == "somebody writes meanwhile"


def test_a_reader_is_not_waited_for_and_reads_on(ledger, monkeypatch):
    """The log stays as long as somebody reads from it, and is cut afterwards."""
    monkeypatch.setattr(database, "KEPT_LOG_BYTES", 1 << 19)
    ledger.database.checkpoint_by_hand()
    monkeypatch.setattr(database, "MOST_LOG_BYTES", 0)
    grow(ledger, 1 << 20)
    with Ledger(ledger.path, read_only=True) as reader, reader.database.moment():
        seen = len(reader.events.newest(limit=100_000))
        grow(ledger, 2 << 20)
        ledger.checkpoint()
        ledger.events.add("info", "test", "later")
        assert len(reader.events.newest(limit=100_000)) == seen
        assert log_bytes(ledger) >= 2 << 20
    ledger.checkpoint()
    ledger.events.add("info", "test", "later still")
    assert log_bytes(ledger) <= 1 << 19


def test_files_of_what_can_be_made_anew_are_not_synced_and_states_are(tmp_path, monkeypatch):
    from fcil_protocol.ids import Digest
    from fcil_protocol.payloads.payload import Payload
    from fcil_server.aggregation.store import PartStore, StateStore

    synced = []
    monkeypatch.setattr(atomic_files, "sync_data", lambda fd: synced.append("content"))
    monkeypatch.setattr(atomic_files, "sync_directory", lambda _: synced.append("names"))
    PartStore(tmp_path / "parts").put(Digest("0" * 64), b"sealed")
    assert synced == []
    StateStore(tmp_path / "states").save(0, Payload({}, {}), None, 0)
    assert synced == ["content", "content", "names"]
