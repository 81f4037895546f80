"""The ledger in Postgres: there and back, one server at a time, and nothing half done."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from typer.testing import CliRunner

import postgres_kit
import sample_run
from fcil_protocol.errors import (
    CommitUnknown,
    CorruptFile,
    FcilError,
    InternalError,
    Locked,
    StorageError,
    UsageError,
)
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server.cli.main import app
from fcil_server.federation.directory import Federation, open_when_free, stopped_ledger
from fcil_server.ledger.databases import opening
from fcil_server.ledger.databases import postgres as database
from fcil_server.ledger.databases import postgres_tables as tables
from fcil_server.ledger.databases.location import LOCATION_NAME, Location
from fcil_server.ledger.databases.opening import location_of, set_aside_moved
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.client_history import ClientReader
from fcil_server.storage import move_ledger as moving
from fcil_server.storage.check import check
from fcil_server.storage.move_ledger import FILE, move_ledger
from fcil_server.web.metrics.totals import TotalsReader
from fcil_server.web.page.reader import HistoryReader
from sample_run import RUN

pytestmark = pytest.mark.ledger_file  # it begins with one


@pytest.fixture(scope="module")
def cluster():
    with postgres_kit.cluster() as started:
        yield started


@pytest.fixture
def directory(tmp_path):
    """Return the directory of a stopped server with a sample run."""
    place = tmp_path / "fed"
    Federation.open(place, None, ()).close()
    (place / LEDGER_NAME).unlink()
    sample_run.build(place / LEDGER_NAME).close()
    return place


@pytest.fixture
def moved(directory, cluster):
    move_ledger(directory, cluster.url, "ann")
    return directory


@pytest.fixture
def ledger(moved):
    with Ledger(moved / LEDGER_NAME) as opened:
        yield opened


def content(path):
    """Return every row and script of an SQLite ledger, without the acts of moving it."""
    with closing(sqlite3.connect(path)) as file:
        return [
            line
            for line in file.iterdump()
            if "move_ledger" not in line and "sqlite_sequence" not in line
        ]


def test_there_and_back_each_row_has_its_number_and_values(directory, cluster):
    before = content(directory / LEDGER_NAME)
    place = move_ledger(directory, cluster.url, "ann")
    assert not (directory / LEDGER_NAME).exists()
    assert place == str(location_of(directory / LEDGER_NAME))
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN).run_id == RUN
        assert ledger.database.place == place
    move_ledger(directory, FILE, "ann")
    assert content(directory / LEDGER_NAME) == before
    assert (directory / LEDGER_NAME).stat().st_mode & 0o777 == 0o600
    with Ledger(directory / LEDGER_NAME) as ledger:
        acts = [(a.actor, a.detail) for a in ledger.audit.newest() if a.action == "move_ledger"]
        assert acts == [("ann", f"to {place}"), ("ann", f"from {place}")]
    with closing(psycopg.connect(cluster.url)) as db:
        schema = place.rpartition(" ")[2]
        assert db.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,)


def shown(path):
    """Return what the dashboard, the metrics and the reports say of a ledger."""
    with HistoryReader(path) as reader, TotalsReader(path, clients=9) as totals:
        history, read = reader.read(), totals.read()
        again = totals.read()
    with Ledger(path, read_only=True) as ledger:
        client = ClientReader(ledger.database)
        clients = [
            (client.counted(c), client.newest_rounds(RUN, c, 9), client.round_results(RUN, c))
            for c in sample_run.CLIENTS
        ]
        flows = [tuple(row) for row in ledger.bytes.records(RUN)]
    return (
        replace(history, version=0, marks={}),
        replace(read, size_bytes=0),
        replace(again, size_bytes=0),
        clients,
        flows,
    )


def test_what_is_shown_is_the_same(directory, cluster):
    before = shown(directory / LEDGER_NAME)
    move_ledger(directory, cluster.url, "ann")
    for old, new in zip(before, shown(directory / LEDGER_NAME), strict=True):
        assert new == old


def test_numbers_of_removed_rows_are_not_given_again(ledger, tmp_path):
    ledger.events.add("info", "test", "the last one")
    last = ledger.events.last_id()
    ledger.database.write("DELETE FROM events WHERE id = ?", (last,))
    ledger.database.copy_to(tmp_path / LEDGER_NAME)
    with Ledger(tmp_path / LEDGER_NAME) as copy:
        copy.events.add("info", "test", "another one")
        assert copy.events.last_id() == last + 1
    ledger.events.add("info", "test", "another one")
    assert ledger.events.last_id() == last + 1


def test_one_server_works_on_it_and_the_next_one_when_that_has_ended(moved):
    first = Federation.open_stopped(moved)
    with pytest.raises(
        Locked, match="a server on the host of Postgres works on the ledger at postgresql"
    ):
        Federation.open_stopped(moved)
    with pytest.raises(Locked), stopped_ledger(moved):
        pass
    first.close()
    Federation.open_stopped(moved).close()


@pytest.fixture(scope="module")
def two_ways():
    """A Postgres that is reached by a socket and by an address, as from two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with postgres_kit.cluster("127.0.0.1", port) as both:
        yield both


def test_commands_say_on_which_other_host_the_server_runs(directory, two_ways):
    move_ledger(directory, two_ways.url, "ann")
    here = location_of(directory / LEDGER_NAME)
    place = ["--dir", str(directory)]
    with Ledger(directory / LEDGER_NAME) as ledger:
        ledger.database.claim()
        # This host: what does not answer is its own, and it says so.
        assert CliRunner().invoke(app, ["status", *place]).exit_code == 0
        assert "no daemon runs" in CliRunner().invoke(app, ["pause", *place]).stderr
        assert check(directory)[0].text == "it is not running"
        Location(two_ways.local_url, here.schema).write(directory / LOCATION_NAME)
        for command in ("status", "stop", "pause", "page"):
            elsewhere = CliRunner().invoke(app, [command, *place])
            assert elsewhere.exit_code == 2
            assert "runs on 127.0.0.1, and answers there alone" in elsewhere.stderr
        assert check(directory)[0].text.startswith("it is running on 127.0.0.1;")
    assert CliRunner().invoke(app, ["status", *place]).exit_code == 0
    assert "no daemon runs" in CliRunner().invoke(app, ["pause", *place]).stderr
    assert check(directory)[0].text == "it is not running"


def test_a_ledger_that_a_server_works_on_is_not_replaced(moved, cluster, tmp_path):
    copy = tmp_path / "restored"
    shutil.copytree(moved, copy)
    (copy / LOCATION_NAME).unlink()
    with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
        ledger.database.copy_to(copy / LEDGER_NAME)
    with closing(Federation.open_stopped(moved)) as federation:
        with pytest.raises(Locked):
            move_ledger(copy, cluster.url, "ann", replace=True)
        assert federation.ledger.runs.get(RUN) is not None


def test_a_role_that_never_waits_for_the_disk_waits_here(moved, cluster):
    with closing(psycopg.connect(cluster.url, autocommit=True)) as db:
        db.execute("ALTER ROLE fcil SET synchronous_commit = off")
        try:
            with Ledger(moved / LEDGER_NAME) as ledger:
                assert ledger.database.number("SHOW synchronous_commit") == "on"
        finally:
            db.execute("ALTER ROLE fcil RESET synchronous_commit")


def test_a_move_from_a_directory_with_an_odd_name(directory, cluster):
    odd = directory.with_name("a #1? 100%")
    directory.rename(odd)
    move_ledger(odd, cluster.url, "ann")
    with Ledger(odd / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN) is not None
    assert sorted(p.name for p in odd.parent.iterdir()) == [odd.name]


def test_who_waits_bears_a_postgres_that_restarts(moved, cluster):
    said, tries = [], iter(["claimed", "gone", "free"])

    def opening():
        match next(tries):
            case "claimed":
                raise Locked("a server works on it.")
            case "gone":
                cluster.stop()
                try:
                    return Federation.open_stopped(moved)
                finally:
                    cluster.start()
        return Federation.open_stopped(moved)

    with closing(open_when_free(opening, moved, said.append)):
        assert len(said) == 2
        assert "takes over when it ends" in said[0]
        assert "cannot be used" in said[1]
        assert "waits for it" in said[1]


def test_a_host_whose_directory_lock_is_its_own_is_refused_and_sweeps_nothing(moved, monkeypatch):
    with closing(Federation.open_stopped(moved)):
        begun = moved / ".state.999999-00000000.tmp"  # of a process on the other host
        begun.touch()
        monkeypatch.setattr(
            DirectoryLock, "acquire", lambda *_: pytest.fail("the directory was touched")
        )
        with pytest.raises(Locked):
            Federation.open_stopped(moved)
        assert begun.exists()


def test_the_claim_goes_with_the_connection_and_so_does_the_right_to_write(moved, cluster):
    first = Ledger(moved / LEDGER_NAME)
    first.database.claim()
    under_way = first.database.transaction()
    under_way.__enter__()
    first.database.execute("UPDATE runs SET seed = 99")
    with closing(psycopg.connect(cluster.url, autocommit=True)) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'fcil-server'"
        )
    with pytest.raises(StorageError, match="cannot be used"):
        first.database.execute("COMMIT")
    with pytest.raises(StorageError, match="Nothing that was acknowledged is lost"):
        first.database.check_still_in_place()
    first.close()
    with closing(Federation.open_stopped(moved)) as second:
        assert second.ledger.runs.get(RUN).seed != 99


def test_a_commit_whose_reply_is_lost_is_unknown_and_another_error_is_not(directory, cluster):
    with closing(postgres_kit.CutCommits(cluster)) as line:
        move_ledger(directory, line.url, "ann")
        with closing(Ledger(directory / LEDGER_NAME)) as first:
            line.armed = True
            with pytest.raises(CommitUnknown, match="may hold or not"), first.transaction():
                first.database.execute("UPDATE runs SET seed = 99")
            with pytest.raises(StorageError) as later, first.transaction():
                raise AssertionError("there is no transaction")
            assert not isinstance(later.value, CommitUnknown), "nothing was to be committed"
        with closing(Ledger(directory / LEDGER_NAME)) as second:
            assert second.runs.get(RUN).seed == 99, "it holds"


def fail_in_it(ledger):
    with ledger.transaction():
        ledger.database.execute("UPDATE runs SET seed = 99")
        ledger.database.execute("INSERT INTO tasks (run) VALUES (NULL)")


def swallow_an_error(ledger):
    with ledger.transaction():
        ledger.database.execute("UPDATE runs SET seed = 99")
        with pytest.raises(InternalError, match="refused a statement"):
            ledger.database.execute("INSERT INTO tasks (run) VALUES (NULL)")


def test_a_swallowed_error_commits_nothing(ledger):
    with pytest.raises(InternalError, match="continued after an error"):
        swallow_an_error(ledger)
    assert ledger.runs.get(RUN).seed != 99


def test_an_inner_transaction_that_fails_is_undone_alone(ledger):
    with ledger.transaction():
        ledger.database.execute("UPDATE runs SET seed = 98")
        with pytest.raises(InternalError):
            fail_in_it(ledger)
    assert ledger.runs.get(RUN).seed == 98


def test_commits_wait_for_the_disk_where_they_should(ledger):
    said = {}
    for durable, waits in ((True, True), (True, False), (False, True)):
        with ledger.transaction(durable=durable, waits=waits):
            said[durable, waits] = ledger.database.number("SHOW synchronous_commit")
    assert said == {(True, True): "on", (True, False): "off", (False, True): "off"}
    assert ledger.database.number("SHOW synchronous_commit") == "on"


def test_sync_brings_what_was_committed_before_to_the_disk(ledger):
    ledger.sync()  # which connects
    with ledger.transaction(waits=False):
        ledger.database.execute("UPDATE runs SET seed = 97")
    at = ledger.database.number("SELECT pg_current_wal_insert_lsn()::text")
    ledger.sync()
    assert ledger.database.number(f"SELECT '{at}' <= pg_current_wal_flush_lsn()")


def test_a_sync_that_failed_fails_for_ever(moved, cluster):
    with Ledger(moved / LEDGER_NAME) as ledger:
        ledger.sync()
        cluster.stop()
        try:
            with pytest.raises(StorageError):
                ledger.sync()
        finally:
            cluster.start()
        with pytest.raises(StorageError):
            ledger.sync()
    with Ledger(moved / LEDGER_NAME) as ledger:
        ledger.sync()


def test_text_with_a_zero_byte_is_kept_without_it(ledger):
    ledger.events.add("info", "test", "a\0b %s ? :name")
    assert ledger.events.newest()[-1].text == "a\N{REPLACEMENT CHARACTER}b %s ? :name"


def test_a_reader_cannot_write_and_the_audit_log_cannot_be_changed(moved, ledger):
    with (
        Ledger(moved / LEDGER_NAME, read_only=True) as reader,
        pytest.raises(FcilError, match="read-only"),
    ):
        reader.events.add("info", "test", "no")
    ledger.audit.add("ann", "revoke", "bob")
    for sql in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
        with pytest.raises(InternalError, match="append-only"):
            ledger.database.execute(sql)


def test_a_ledger_of_an_older_version_is_brought_up_to_date_and_a_newer_one_refused(
    moved, monkeypatch
):
    newer = (*database.MIGRATIONS, "ALTER TABLE runs ADD COLUMN more INTEGER NOT NULL DEFAULT 7;")
    with monkeypatch.context() as later:
        later.setattr(tables, "MIGRATIONS", newer)
        later.setattr(database, "MIGRATIONS", newer)
        later.setattr(database, "SCHEMA_VERSION", len(newer))
        with pytest.raises(StorageError, match="Start the server once"):
            Ledger(moved / LEDGER_NAME, read_only=True)
        with Ledger(moved / LEDGER_NAME) as ledger:
            assert ledger.database.number("SELECT more FROM runs") == 7
            ledger.events.add("info", "test", "it goes on")
        with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
            assert ledger.events.newest()[-1].text == "it goes on"
    with pytest.raises(StorageError, match="written by a newer fcil"):
        Ledger(moved / LEDGER_NAME)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("step", ["move_in", "write", "set_aside_moved"])
def test_a_move_that_is_killed_leaves_the_ledger_whole(directory, cluster, monkeypatch, step):
    def killed(*_, **__):
        raise Killed

    where = {"move_in": (database, "load"), "write": (Location, "write")}
    with monkeypatch.context() as patch:
        patch.setattr(*where.get(step, (moving, step)), killed)
        with pytest.raises(Killed):
            move_ledger(directory, cluster.url, "ann")
    with closing(Federation.open_stopped(directory)) as federation:
        assert federation.ledger.runs.get(RUN) is not None
    if step == "set_aside_moved":
        assert location_of(directory / LEDGER_NAME) is not None
        assert not (directory / LEDGER_NAME).exists(), "the next start sets the file aside"
        return
    assert location_of(directory / LEDGER_NAME) is None
    if step == "write":
        with pytest.raises(UsageError, match="there is a ledger at"):
            move_ledger(directory, cluster.url, "ann")
    move_ledger(directory, cluster.url, "ann", replace=True)
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN) is not None


@pytest.mark.parametrize("step", ["written", "moved"])
def test_a_move_back_that_is_killed_leaves_the_ledger_whole(moved, monkeypatch, step):
    def killed(*_):
        raise Killed

    where = {"written": (moving, "SqliteDatabase"), "moved": (database.PostgresDatabase, "drop")}
    with monkeypatch.context() as patch:
        patch.setattr(*where[step], killed)
        with pytest.raises(Killed):
            move_ledger(moved, FILE, "ann")
    if step == "written":  # and the file that names Postgres is there: so the ledger is, too
        assert (moved / LEDGER_NAME).exists()
        with closing(Federation.open_stopped(moved)) as federation:
            assert federation.ledger.runs.get(RUN) is not None
            federation.ledger.events.add("info", "test", "it goes on")
        move_ledger(moved, FILE, "ann")
        with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
            assert ledger.events.newest()[-1].text == "it goes on"
    assert location_of(moved / LEDGER_NAME) is None
    with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN) is not None


def test_a_move_to_where_it_is_is_refused(moved, cluster):
    with pytest.raises(UsageError, match=r"is at postgresql.* already"):
        move_ledger(moved, cluster.url, "ann")
    move_ledger(moved, FILE, "ann")
    with pytest.raises(UsageError, match="in the file .* already"):
        move_ledger(moved, FILE, "ann")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected the URL"),
        ("host=x dbname=y", "expected the URL"),
        ("mysql://ann@host/db", "expected the URL"),
        ("postgresql://ann@host", "expected the URL"),
        ("postgresql://ann:secret@host/db", "has a password"),
        ("postgresql://ann@host/db?password=secret", "has a password"),
        ("postgresql://ann@host/db?sslpassword=secret", "has a password"),
        ("postgresql://ann:secr/et@host/db", "expected the URL"),
        ("postgresql://ann@host:abc/db", "expected the URL"),
        ("postgresql://ann@host/db\udcff", "expected the URL"),
        ("postgresql://ann@host/db?colour=red", "is not one of Postgres"),
        ("postgresql://ann@host/db?connect_timeout=x", "is not one of Postgres"),
        ("postgresql://ann@host/db?application_name=%FF", "is not one of Postgres"),
    ],
)
def test_a_url_that_is_none_or_tells_a_password_is_refused(directory, url, said):
    with pytest.raises(UsageError, match=said) as refused:
        move_ledger(directory, url, "ann")
    assert "secr" not in str(refused.value)
    assert location_of(directory / LEDGER_NAME) is None
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        assert [a for a in ledger.audit.newest() if a.action == "move_ledger"] == []


def test_a_database_that_is_not_there_leaves_the_ledger_where_it_is(directory, tmp_path):
    with pytest.raises(StorageError, match="cannot be used"):
        move_ledger(directory, f"postgresql:///db?host={tmp_path}", "ann")
    Federation.open_stopped(directory).close()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"url": "x", "schema": "y; DROP"}', "{" * 999])
def test_a_damaged_file_that_says_where_it_is_is_named(moved, text):
    (moved / LOCATION_NAME).write_text(text)
    with pytest.raises(CorruptFile, match="does not say where"):
        Ledger(moved / LEDGER_NAME, read_only=True)


def test_a_file_beside_a_moved_ledger_is_set_aside(moved):
    (moved / LEDGER_NAME).write_bytes(b"of before")
    set_aside_moved(moved / LEDGER_NAME)
    assert not (moved / LEDGER_NAME).exists()
    [kept] = moved.glob("ledger.version-*")
    assert kept.read_bytes() == b"of before"


def test_without_psycopg_it_is_said_what_to_install(moved):
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from fcil_server.ledger.ledger import Ledger\n"
        "from fcil_protocol.errors import StorageError\n"
        "from pathlib import Path\n"
        "try:\n"
        f"    Ledger(Path({str(moved / LEDGER_NAME)!r}), read_only=True)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'fcil[postgres]'" in done.stdout


def test_a_backup_of_it_is_a_file_that_restores_anywhere(moved, tmp_path):
    assert opening.has_ledger(moved)
    with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
        ledger.database.copy_to(tmp_path / LEDGER_NAME)
        rows = [r.key for r in ledger.rounds.all(RUN)]
    with Ledger(tmp_path / LEDGER_NAME) as copy:
        assert [r.key for r in copy.rounds.all(RUN)] == rows
        assert copy.database.faults() == []


def test_a_log_that_a_kill_left_is_not_the_next_files(moved):
    (moved / f"{LEDGER_NAME}-wal").write_bytes(b"of the file before" * 99)
    (moved / f"{LEDGER_NAME}-shm").write_bytes(b"of the file before")
    move_ledger(moved, FILE, "ann")
    with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN) is not None
        assert ledger.database.faults() == []


def test_a_database_of_another_encoding_is_refused(directory, cluster):
    with closing(psycopg.connect(cluster.url, autocommit=True)) as db:
        db.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(UsageError, match="has the encoding LATIN1, expected UTF8"):
        move_ledger(directory, cluster.url.replace("/postgres", "/latin"), "ann")


def test_a_reader_in_postgres_holds_up_the_drop_alone(moved, cluster, monkeypatch):
    monkeypatch.setattr(database, "_DROP_TIMEOUT_MS", 50)
    schema = location_of(moved / LEDGER_NAME).schema
    with closing(psycopg.connect(cluster.url)) as reader:
        reader.execute(f"SELECT count(*) FROM {schema}.runs")
        with pytest.raises(StorageError, match="the ledger is now in .* could not drop its own"):
            move_ledger(moved, FILE, "ann")
    assert location_of(moved / LEDGER_NAME) is None
    with Ledger(moved / LEDGER_NAME, read_only=True) as ledger:
        assert ledger.runs.get(RUN) is not None


def test_the_triggers_of_the_file_are_those_that_postgres_has(moved, directory, cluster):
    [kept] = directory.glob("ledger.version-*")
    with closing(sqlite3.connect(kept)) as file:
        found = file.execute("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'")
        # One for both in Postgres; another one has to be written there too.
        assert found.fetchall() == [("audit_no_update", "audit"), ("audit_no_delete", "audit")]


def test_a_waiting_server_is_a_started_one_for_systemd(tmp_path, monkeypatch):
    place = tmp_path / "fed"
    Federation.open(place, None, ()).close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        tries = iter([True, False])

        def opening():
            if next(tries):
                raise Locked("a server works on it.")
            return Federation.open_stopped(place)

        open_when_free(opening, place, lambda _: None).close()
        assert systemd.recv(999) == b"READY=1\nWATCHDOG=1"
        assert b"this one takes over when it ends" in systemd.recv(999)
        assert os.environ["NOTIFY_SOCKET"], "the service that follows reports there"
