"""A damaged frame in the ledger's log is told; the tail that a kill leaves is none."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from fcil_server.federation.directory import Federation
from fcil_server.ledger.databases.wal_check import lost_frames
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.storage.check import check
from fcil_server.storage.findings import Severity
from server.storage_kit import build

pytestmark = pytest.mark.ledger_file

HEADER, FRAME = 32, 24 + 4096
COMMITS = 5


def entries(path: Path) -> list[str]:
    with Ledger(path) as ledger:
        return [entry.detail for entry in ledger.audit.newest()]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A ledger as a kill leaves it: with a log that holds five commits."""
    live, left = tmp_path / "live" / LEDGER_NAME, tmp_path / "left" / LEDGER_NAME
    for path in (live, left):
        path.parent.mkdir()
    Ledger(live).close()  # the tables are in the file, not in the log
    with Ledger(live) as ledger:
        for number in range(COMMITS):
            ledger.audit.add("me", "test", str(number))
        for path in live.parent.iterdir():
            shutil.copy(path, left.parent / path.name)
    return left


def log_of(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}-wal")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_whole_log_has_lost_nothing(killed: Path) -> None:
    assert lost_frames(log_of(killed).read_bytes()) == 0
    assert entries(killed) == [str(n) for n in range(COMMITS)]


@pytest.mark.parametrize("within", [0, 9, 17, 24, 3000], ids=["page", "salt", "sum", "data", "end"])
def test_what_follows_a_damaged_frame_is_counted(killed: Path, within: int) -> None:
    log = log_of(killed)
    frames = (log.stat().st_size - HEADER) // FRAME
    flip(log, HEADER + FRAME + within)
    assert lost_frames(log.read_bytes()) == frames - 2
    assert len(entries(killed)) < COMMITS  # SQLite opens it, and says nothing


@pytest.mark.parametrize("at", [0, 3, 9, 17, 25])
def test_a_damaged_header_loses_the_whole_log(killed: Path, at: int) -> None:
    log = log_of(killed)
    frames = (log.stat().st_size - HEADER) // FRAME
    flip(log, at)
    assert lost_frames(log.read_bytes()) == frames
    assert entries(killed) == []


def test_a_log_cut_anywhere_is_what_a_kill_leaves(killed: Path) -> None:
    data = log_of(killed).read_bytes()
    for size in (0, 1, HEADER, HEADER + 10, HEADER + FRAME, *range(5000, len(data), 1777)):
        assert lost_frames(data[:size]) == 0


def test_frames_of_an_earlier_use_of_the_log_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_NAME
    with Ledger(path) as ledger:
        for number in range(COMMITS):
            ledger.audit.add("me", "test", str(number))
        other = sqlite3.connect(path)
        other.execute("PRAGMA wal_checkpoint(RESTART)")
        other.close()
        ledger.audit.add("me", "test", "after")
        log = log_of(path).read_bytes()
    assert len(log) > HEADER + 4 * FRAME  # the older frames are there
    assert lost_frames(log) == 0


def test_frames_of_a_transaction_that_was_undone_are_not_counted(tmp_path: Path) -> None:
    """They bear the present salts, and the next commit overwrites the first of them only."""
    path = tmp_path / LEDGER_NAME
    with Ledger(path) as ledger, ledger.transaction():
        for number in range(200):
            ledger.events.add("info", "test", f"{number}" * 200)
    with Ledger(path) as ledger:
        ledger.audit.add("me", "test", "before")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("PRAGMA cache_size = 2")  # pages: so that the rest goes to the log early
        other.execute("BEGIN")
        other.execute("UPDATE events SET at = at + 1")  # each page once
        other.execute("ROLLBACK")
        undone = log_of(path).stat().st_size
        ledger.audit.add("me", "test", "after")
        log = log_of(path).read_bytes()
        other.close()
    assert len(log) == undone > HEADER + 20 * FRAME
    assert lost_frames(log) == 0


def damaged_federation(tmp_path: Path) -> Path:
    """A federation whose server was killed, with a bit of the log's first frame changed."""
    built = build(tmp_path / "live")
    with built.ledger() as ledger:
        for number in range(COMMITS):
            ledger.audit.add("me", "test", str(number))
        shutil.copytree(built.directory, tmp_path / "left")
    flip(log_of(tmp_path / "left" / LEDGER_NAME), HEADER + 100)
    return tmp_path / "left"


def test_check_reports_a_damaged_log(tmp_path: Path) -> None:
    directory = damaged_federation(tmp_path)
    (found,) = [f for f in check(directory) if f.level is Severity.FAILURE]
    assert "frames of the ledger's log after a damaged one are lost" in found.text
    assert "backup" in found.action


def test_an_opened_federation_knows_what_is_lost_and_tells_it_once(tmp_path: Path) -> None:
    directory = damaged_federation(tmp_path)
    notes: list[tuple[str, ...]] = []
    federation = Federation.open(directory, None, ())
    try:
        federation.tell_lost_frames(lambda *note: notes.append(note))
        left = shutil.copytree(directory, tmp_path / "again")  # as another kill would leave it
    finally:
        federation.close()
    ((level, code, text),) = notes
    assert (level, code) == ("warning", "corrupt_file")
    assert "are lost" in text
    again = Federation.open(left, None, ())
    try:
        again.tell_lost_frames(lambda *note: notes.append(note))
    finally:
        again.close()
    assert len(notes) == 1
