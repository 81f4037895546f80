"""The ledger: what it must never lose, and how it says that something is wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import sample_run
from byte_counts import add_bytes
from fcil_protocol.errors import (
    AlreadyHave,
    CorruptFile,
    DiskFull,
    InternalError,
    Locked,
    StorageError,
    UsageError,
)
from fcil_protocol.ids import ClientId, RoundKey, RunId, UpdateId
from fcil_server.ledger import events as event_tables
from fcil_server.ledger.databases import database, sqlite
from fcil_server.ledger.databases.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.enums import (
    SPLIT_SUM,
    Answer,
    Cause,
    CountSource,
    Direction,
    Outcome,
    RunStatus,
    UpdateStatus,
)
from fcil_server.ledger.ledger import Ledger
from sample_run import ALICE, BOB, CLIENTS, GONE, RUN, Clock, digest
from server.storage_kit import build, spoil_index

KEY = RoundKey(RUN, 0, "train", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path):
    with Ledger(path, clock=Clock()) as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


@pytest.fixture
def in_round(ledger: Ledger) -> Ledger:
    ledger.tasks.open(RUN, 0, [0, 1])
    ledger.rounds.open(KEY, asked=CLIENTS, base_state=3, remaining_s=600.0)
    return ledger


def accept(
    ledger: Ledger,
    client: ClientId = ALICE,
    name: str = "u",
    key: RoundKey = KEY,
    sum_id: UpdateId | None = None,
) -> None:
    with ledger.transaction():
        ledger.updates.accept(
            key,
            client,
            update_id=UpdateId(digest(name + client)),
            samples=5,
            tensor_bytes=10,
            sealed_bytes=20,
            sum_id=sum_id,
        )


@pytest.mark.ledger_file
class TestFile:
    def test_the_file_and_its_log_are_private(self, path: Path) -> None:
        """Whatever the umask, nobody else may read the ledger, its log or its index."""
        old = os.umask(0)
        try:
            with Ledger(path) as ledger:
                ledger.audit.add("uid 0", "start")
                modes = {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
        finally:
            os.umask(old)
        assert modes == dict.fromkeys((path.name, f"{path.name}-wal", f"{path.name}-shm"), 0o600)

    def test_a_ledger_that_others_could_read_is_made_private(self, path: Path) -> None:
        Ledger(path).close()
        path.chmod(0o644)
        Ledger(path).close()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_a_newer_ledger_is_refused_with_both_versions(self, path: Path) -> None:
        Ledger(path).close()
        raw = sqlite3.connect(path)
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        raw.close()
        with pytest.raises(
            StorageError, match=rf"expected .* {SCHEMA_VERSION} .* got {SCHEMA_VERSION + 1}"
        ):
            Ledger(path)

    def test_another_programs_database_is_not_touched(self, path: Path) -> None:
        raw = sqlite3.connect(path)
        raw.execute("CREATE TABLE theirs (x)")
        raw.close()
        before = path.read_bytes()
        with pytest.raises(CorruptFile, match="not an fcil ledger"):
            Ledger(path)
        assert path.read_bytes() == before

    def test_a_file_that_is_no_database_is_named_as_damaged(self, path: Path) -> None:
        path.write_bytes(b"not a database " * 100)
        with pytest.raises(CorruptFile, match="damaged"):
            Ledger(path)

    def test_an_index_that_does_not_fit_its_table_is_refused(self, tmp_path: Path) -> None:
        """Its page is well-formed, but an update could be counted twice."""
        built = build(tmp_path / "fed")
        spoil_index(built)
        with pytest.raises(CorruptFile, match="damaged.*sqlite_autoindex_updates_1"):
            built.ledger()

    @pytest.mark.parametrize("end", ["", "-wal"])
    def test_a_file_that_is_removed_under_the_server_is_noticed(self, path: Path, end: str) -> None:
        Ledger(path).close()
        with Ledger(path) as ledger:
            ledger.database.check_still_in_place()
            ledger.audit.add("uid 0", "start")
            ledger.database.empty_log()
            ledger.database.check_still_in_place()
            path.with_name(path.name + end).unlink()
            with pytest.raises(CorruptFile, match="removed or replaced"):
                ledger.database.check_still_in_place()
            path.with_name(path.name + end).touch()
            with pytest.raises(CorruptFile, match="removed or replaced"):
                ledger.database.check_still_in_place()

    def test_reading_needs_an_existing_file_and_makes_none(self, path: Path) -> None:
        with pytest.raises(StorageError, match="no ledger"):
            Ledger(path, read_only=True)
        assert not path.exists()

    def test_a_reader_sees_commits_while_the_server_writes(self, ledger: Ledger) -> None:
        with Ledger(ledger.path, read_only=True) as reader:
            assert [c.name for c in reader.clients.all()] == ["alice", "bob", "gone"]
            ledger.clients.mark_seen(ALICE, device="laptop")
            assert reader.clients.get(ALICE).device == "laptop"

    def test_a_reader_works_after_the_server_has_stopped(self, path: Path) -> None:
        Ledger(path).close()
        with Ledger(path, read_only=True) as reader:
            assert reader.runs.newest() is None

    def test_a_reader_cannot_write(self, ledger: Ledger) -> None:
        with (
            Ledger(ledger.path, read_only=True) as reader,
            pytest.raises(StorageError, match="cannot be used"),
        ):
            reader.audit.add("uid 0", "sneak")

    def test_a_second_writer_is_told_that_the_file_is_locked(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sqlite, "BUSY_S", 0.01)
        with Ledger(ledger.path) as other, ledger.transaction():
            ledger.runs.set_status(RUN, RunStatus.STOPPED)
            with pytest.raises(Locked):
                other.runs.set_status(RUN, RunStatus.DONE)

    def test_a_full_disk_undoes_the_transaction_and_says_so(self, ledger: Ledger) -> None:
        pages = ledger.database.number("PRAGMA page_count")
        ledger.database.execute(f"PRAGMA max_page_count = {pages}")

        @ledger.transaction()
        def too_much() -> None:
            ledger.runs.set_status(RUN, RunStatus.DONE)
            for i in range(1000):
                ledger.audit.add("uid 0", f"action {i}", "x" * 1000)

        with pytest.raises(DiskFull, match="no space"):
            too_much()
        assert ledger.runs.get(RUN).status is RunStatus.RUNNING
        assert ledger.audit.newest() == []
        ledger.clients.mark_seen(ALICE)  # the connection goes on working

    def test_durable_commits_wait_for_the_disk_and_others_do_not(self, ledger: Ledger) -> None:
        levels = {}
        for durable in (True, False):
            with ledger.transaction(durable=durable):
                levels[durable] = ledger.database.number("PRAGMA synchronous")
        assert levels == {True: 2, False: 1}  # FULL, NORMAL

    def test_a_durable_write_inside_a_lazy_transaction_is_our_bug(self, ledger: Ledger) -> None:
        with pytest.raises(AssertionError), ledger.transaction(durable=False):
            ledger.runs.set_status(RUN, RunStatus.DONE)

    def test_what_is_remembered_is_read_again_once_its_table_changes(self, ledger: Ledger) -> None:
        reads = []

        def known() -> list[str]:
            return ledger.database.remember("names", ["classes"], read)

        def read() -> list[str]:
            reads.append(1)
            return [row["name"] for row in ledger.database.rows("SELECT name FROM classes")]

        before = known()
        ledger.clients.mark_seen(ALICE)  # another table
        assert (known(), len(reads)) == (before, 1)
        ledger.classes.add(RUN, "yak", "Yak")
        assert (known(), len(reads)) == ([*before, "Yak"], 2)

        @ledger.transaction()
        def undone() -> None:
            ledger.classes.add(RUN, "emu", "Emu")
            assert known() == [*before, "Yak", "Emu"]
            raise ValueError("undone")

        with pytest.raises(ValueError, match="undone"):
            undone()
        assert known() == [*before, "Yak"]
        ledger.database.execute("WITH one AS (SELECT 1) DELETE FROM classes WHERE key = 'yak'")
        assert known() == before, "a statement of an unknown kind may change any table"

    def test_a_file_that_others_write_is_read_each_time(self, ledger: Ledger) -> None:
        with Ledger(ledger.path, read_only=True) as other:
            before = other.classes.all(RUN)
            ledger.classes.add(RUN, "yak", "Yak")
            assert len(other.classes.all(RUN)) == len(before) + 1

    def test_an_inner_failure_that_is_caught_leaves_the_outer_work(self, ledger: Ledger) -> None:
        @ledger.transaction()
        def fails() -> None:
            ledger.audit.add("uid 0", "undone")
            raise ValueError("oops")

        with ledger.transaction():
            ledger.runs.set_status(RUN, RunStatus.DONE)
            with pytest.raises(ValueError, match="oops"):
                fails()
        assert ledger.runs.get(RUN).status is RunStatus.DONE
        assert ledger.audit.newest() == []

    def test_after_a_failure_that_ended_it_nothing_more_is_committed(self, ledger: Ledger) -> None:
        """SQLite ends a transaction itself when the disk is full, whoever catches the error."""
        pages = ledger.database.number("PRAGMA page_count")

        @ledger.transaction()
        def too_much() -> None:
            for i in range(1000):
                ledger.audit.add("uid 0", f"action {i}", "x" * 1000)

        @ledger.transaction()
        def outer() -> None:
            ledger.audit.add("uid 0", "before")
            ledger.database.execute(f"PRAGMA max_page_count = {pages}")
            with pytest.raises(DiskFull):
                too_much()
            ledger.database.execute("PRAGMA max_page_count = 1000000")
            with pytest.raises(StorageError, match="ended a transaction"):
                ledger.audit.add("uid 0", "after")

        with pytest.raises(StorageError, match="ended a transaction"):
            outer()
        assert ledger.audit.newest() == []
        ledger.audit.add("uid 0", "later")  # the connection goes on working
        assert len(ledger.audit.newest()) == 1

    def test_an_exception_undoes_everything(self, ledger: Ledger) -> None:
        @ledger.transaction()
        def interrupted() -> None:
            ledger.runs.set_status(RUN, RunStatus.DONE)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert ledger.runs.get(RUN).status is RunStatus.RUNNING

    def test_kill_9_keeps_what_was_committed_and_nothing_else(self, path: Path) -> None:
        """A killed server's accepted updates are all there, an uncommitted one is not."""
        script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(sample_run.__file__).parent)!r})
from collections import Counter
from pathlib import Path
import sample_run as s
from fcil_server.ledger.ledger import Ledger
from fcil_protocol.ids import RoundKey
ledger = Ledger(Path({str(path)!r}))
s.add_clients(ledger); s.add_run(ledger)
key = RoundKey(s.RUN, 0, "train", 0)
ledger.tasks.open(s.RUN, 0, [0, 1])
ledger.rounds.open(key, asked=s.CLIENTS, base_state=3, remaining_s=600.0)
sizes = dict(samples=5, tensor_bytes=10, sealed_bytes=20)
with ledger.transaction():
    ledger.updates.accept(key, s.ALICE, update_id=s.digest("a"), **sizes)
ledger.rounds.set_remaining(key, 123.0)
with ledger.transaction():
    ledger.updates.accept(key, s.BOB, update_id=s.digest("b"), **sizes)
    os.kill(os.getpid(), signal.SIGKILL)
"""
        killed = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
        assert killed.returncode == -9
        with Ledger(path) as ledger:
            row = ledger.rounds.current(RUN)
            assert row.key == KEY
            assert (row.asked, row.base_state, row.remaining_s) == (CLIENTS, 3, 123.0)
            assert [u.client for u in ledger.updates.accepted(KEY)] == [ALICE]


class TestClients:
    def test_whether_there_are_any(self, ledger: Ledger, tmp_path: Path) -> None:
        assert ledger.clients.any()
        with Ledger(tmp_path / "empty.sqlite") as empty:
            assert not empty.clients.any()

    def test_a_client_is_found_by_id_key_and_name(self, ledger: Ledger) -> None:
        row = ledger.clients.get(BOB)
        assert row == ledger.clients.by_curve(row.curve) == ledger.clients.by_name("bob")
        assert ledger.clients.get(ClientId("x" * 26)) is None
        assert ledger.clients.by_curve(b"") is None

    def test_names_and_keys_are_taken_once(self, ledger: Ledger) -> None:
        new = ClientId("d" * 26)
        with pytest.raises(UsageError, match="named 'bob'"):
            ledger.clients.add(new, "bob", curve=b"n" * 32, signing=b"", sealing=b"")
        key = ledger.clients.get(BOB).curve
        with pytest.raises(UsageError, match="belongs to the enrolled client 'bob'"):
            ledger.clients.add(new, "dora", curve=key, signing=b"", sealing=b"")

    def test_a_free_name_is_offered(self, ledger: Ledger) -> None:
        assert ledger.clients.free_name("dora") == "dora"
        assert ledger.clients.free_name("bob") == "bob-2"

    def test_a_revoked_client_may_not_join_and_gives_its_name_free(self, ledger: Ledger) -> None:
        assert ledger.clients.get(BOB).may_join(ledger.now)
        assert ledger.clients.may_join(BOB)
        ledger.clients.revoke(BOB)
        first = ledger.clients.get(BOB).revoked_at
        ledger.database.clock.now += 10
        ledger.clients.revoke(BOB)
        assert ledger.clients.get(BOB).revoked_at == first
        assert not ledger.clients.get(BOB).may_join(ledger.now)
        assert not ledger.clients.may_join(BOB)
        assert ledger.clients.get(BOB).curve in ledger.clients.curves()[1]
        assert not ledger.clients.may_join(ClientId("z" * 26)), "it was never enrolled"
        assert ledger.clients.free_name("bob") == "bob"

    def test_a_client_expires(self, ledger: Ledger) -> None:
        ledger.clients.add(
            ClientId("d" * 26), "d", curve=b"d" * 32, signing=b"", sealing=b"", not_after=50.0
        )
        row = ledger.clients.by_name("d")
        for now, may in ((49.9, True), (50.0, False)):
            ledger.database.clock.now = now
            assert (row.may_join(now), ledger.clients.may_join(row.client_id)) == (may, may)
            members, former = ledger.clients.curves()
            assert (row.curve in members, row.curve in former) == (may, not may)

    def test_keys_do_not_show_in_a_repr(self, ledger: Ledger) -> None:
        assert "curve" not in repr(ledger.clients.get(BOB))

    def test_erasing_removes_the_person_and_says_what_remains(self, path: Path) -> None:
        with sample_run.build(path) as ledger:
            ledger.events.add("warning", "slow", "bob is slow", run=RUN, client=BOB)
            ledger.refusals.add(BOB, "malformed", "bob's message")
            erased = ledger.clients.erase(BOB)
            assert (erased.evaluations, erased.events, erased.counted) == (12, 1, 11)
            row = ledger.clients.get(BOB)
            assert (row.name, row.curve, row.sealing, row.device) == (
                "erased-bbbbbbbb",
                b"",
                b"",
                "",
            )
            assert not row.may_join(ledger.now)
            assert not ledger.clients.may_join(BOB)
            assert all(b"" not in keys for keys in ledger.clients.curves())
            assert ledger.refusals.newest() == []
            assert all(e.client != BOB for e in ledger.evaluations.all(RUN))
            ledger.clients.erase(GONE)  # two clients without keys do not collide


class TestHistory:
    def test_a_run_comes_back_as_it_was_written(self, ledger: Ledger) -> None:
        run = ledger.runs.newest()
        assert run.hparams == {"rank": 4, "lr": 2e-3}
        assert run.backbone["dim"] == 192
        assert (run.status, run.seed, run.parent_run) == (RunStatus.RUNNING, 1993, None)

    def test_the_run_that_was_added_last_is_the_newest(self, ledger: Ledger) -> None:
        last = RunId("r20260102-030405-0001")
        ledger.runs.add(
            last, method="m", method_version="1", config="", hparams={}, backbone={},
            schema_digest="", seed=1,
        )  # fmt: skip
        newest = ledger.runs.newest()
        assert (newest.run_id, newest.parent_run, newest.parent_state) == (last, None, None)

    def test_tasks_have_no_gaps(self, ledger: Ledger) -> None:
        with pytest.raises(InternalError, match="expected task 0"):
            ledger.tasks.open(RUN, 1, [0])

    def test_an_unknown_run_is_refused(self, ledger: Ledger) -> None:
        with pytest.raises(InternalError, match="(?i)foreign key"):
            ledger.tasks.open(RunId("r20260102-030405-ffff"), 0, [0])

    def test_rounds_are_counted_through_the_run(self, in_round: Ledger) -> None:
        in_round.rounds.close(KEY, Outcome.DONE, new_state=4, phases={"collect_s": 1.5})
        second = in_round.rounds.open(KEY._replace(round=1), asked=(ALICE,), base_state=4)
        assert (second.seq, second.remaining_s) == (1, None)
        first = in_round.rounds.get(KEY)
        assert (first.outcome, first.new_state, first.phases) == ("done", 4, {"collect_s": 1.5})
        assert in_round.rounds.current(RUN).key == second.key

    def test_one_round_of_a_run_is_open_at_a_time(self, in_round: Ledger) -> None:
        with pytest.raises(InternalError, match="(?i)unique"):
            in_round.rounds.open(KEY._replace(round=1), asked=(), base_state=3)

    def test_a_closed_round_is_closed(self, in_round: Ledger) -> None:
        in_round.rounds.close(KEY, Outcome.SKIPPED)
        for change in (
            lambda: in_round.rounds.close(KEY, Outcome.DONE),
            lambda: in_round.rounds.set_remaining(KEY, 1.0),
            lambda: in_round.rounds.set_asked(KEY, ()),
        ):
            with pytest.raises(
                InternalError, match=f"^task 0 train round 0 of run {RUN} is not open"
            ):
                change()

    def test_a_short_round_reopens_with_its_updates(self, in_round: Ledger) -> None:
        accept(in_round)
        in_round.rounds.close(KEY, Outcome.SHORT)
        in_round.rounds.reopen(KEY, asked=(ALICE, BOB), remaining_s=300.0)
        row = in_round.rounds.current(RUN)
        assert (row.outcome, row.reopened, row.asked) == ("reopened", 1, (ALICE, BOB))
        assert [u.client for u in in_round.updates.accepted(KEY)] == [ALICE]

    def test_what_closed_a_round_is_remembered_for_its_task_alone(
        self, in_round: Ledger, path: Path
    ) -> None:
        in_round.rounds.close(KEY, Outcome.SHORT, why="rest_of_task")
        with Ledger(path, read_only=True) as again:  # as after a restart
            assert again.rounds.was_closed_by(RUN, 0, "rest_of_task")
            assert not again.rounds.was_closed_by(RUN, 0, "operator")
            assert not again.rounds.was_closed_by(RUN, 1, "rest_of_task")

    def test_a_round_that_made_a_state_stays_closed(self, in_round: Ledger) -> None:
        in_round.rounds.close(KEY, Outcome.DONE, new_state=4)
        with pytest.raises(InternalError, match="cannot be reopened"):
            in_round.rounds.reopen(KEY, asked=(), remaining_s=None)

    def test_the_first_update_wins(self, in_round: Ledger) -> None:
        accept(in_round)
        with pytest.raises(AlreadyHave, match="accepted before"):
            accept(in_round, name="other")
        assert [u.update_id for u in in_round.updates.of_round(KEY)] == [digest("u" + ALICE)]

    def test_accepting_outside_a_transaction_is_our_bug(self, in_round: Ledger) -> None:
        with pytest.raises(AssertionError):
            in_round.updates.accept(
                KEY, BOB, update_id=UpdateId("x"), samples=1, tensor_bytes=1, sealed_bytes=1
            )

    def test_updates_come_in_client_order_and_excluded_ones_are_not_counted(
        self, in_round: Ledger
    ) -> None:
        for client in (GONE, ALICE, BOB):
            accept(in_round, client)
        in_round.updates.exclude(KEY, BOB, "norm too large")
        assert [u.client for u in in_round.updates.accepted(KEY)] == [ALICE, GONE]
        in_round.updates.mark_counted(KEY)
        found = {u.client: (u.status, u.reason) for u in in_round.updates.of_round(KEY)}
        assert found == {
            ALICE: (UpdateStatus.COUNTED, ""),
            BOB: (UpdateStatus.EXCLUDED, "norm too large"),
            GONE: (UpdateStatus.COUNTED, ""),
        }
        assert [u.status for u in in_round.updates.of_client(RUN, BOB)] == ["excluded"]

    def test_an_update_that_came_in_a_sum_is_known_by_both_digests(self, in_round: Ledger) -> None:
        accept(in_round, ALICE, sum_id=UpdateId("s"))
        accept(in_round, BOB)
        assert in_round.updates.holds(RUN, digest("u" + ALICE))
        assert in_round.updates.holds(RUN, "s")
        assert not in_round.updates.holds(RUN, "other")
        rows = in_round.updates.of_round(KEY)
        assert [row.record for row in rows] == ["s", digest("u" + BOB)]

    def test_the_others_of_a_sum_are_excluded_with_one_of_it_and_nobody_else(
        self, in_round: Ledger
    ) -> None:
        accept(in_round, ALICE, sum_id=UpdateId("s"))
        accept(in_round, BOB, sum_id=UpdateId("s"))
        accept(in_round, GONE)
        in_round.updates.exclude(KEY, BOB, "revoked")
        found = {u.client: u.reason for u in in_round.updates.of_round(KEY)}
        assert found == {ALICE: SPLIT_SUM, BOB: "revoked", GONE: ""}
        in_round.updates.exclude(KEY, ALICE, "damaged")  # its own reason says more
        in_round.updates.exclude(KEY, GONE, "damaged")
        found = {u.client: u.reason for u in in_round.updates.of_round(KEY)}
        assert found == {ALICE: "damaged", BOB: "revoked", GONE: "damaged"}

    def test_the_last_update_is_known_though_the_clock_was_set_back(self, path: Path) -> None:
        """A client's last verdict is told again and again: it must not be an older one."""
        times = iter(range(10**9, 0, -3600))
        with Ledger(path, clock=lambda: float(next(times))) as ledger:
            sample_run.add_clients(ledger)
            sample_run.add_run(ledger)
            ledger.tasks.open(RUN, 0, [0, 1])
            for number in range(3):
                key = RoundKey(RUN, 0, "train", number)
                ledger.rounds.open(key, asked=CLIENTS, base_state=3, remaining_s=600.0)
                accept(ledger, ALICE, f"u{number}", key)
                ledger.updates.mark_counted(key)
                ledger.rounds.close(key, Outcome.DONE)
            assert [u.round for u in ledger.updates.of_client(RUN, ALICE)] == [0, 1, 2]

    def test_the_latest_answer_stands_until_an_update_comes(self, in_round: Ledger) -> None:
        in_round.answers.set(KEY, BOB, Answer.LOST, "gone")
        in_round.answers.set(KEY, BOB, Answer.STRAGGLER, "deadline")
        assert [(a.client, a.answer, a.reason) for a in in_round.answers.of_round(KEY)] == [
            (BOB, Answer.STRAGGLER, "deadline")
        ]
        accept(in_round, BOB)
        assert in_round.answers.of_round(KEY) == []

    def test_states_and_parts_come_back(self, in_round: Ledger) -> None:
        in_round.states.add(KEY, 4, digest("four"), digest("three"))
        assert in_round.states.newest(RUN).digest == digest("four")
        part = {
            "plain_digest": digest("plain"), "digest": digest("sealed"), "file": "x.part",
            "plain_bytes": 10, "sealed_bytes": 20, "wrapped": b"w" * 1168,
        }  # fmt: skip
        in_round.parts.add(RUN, "task/0", **part)
        row = in_round.parts.get(RUN, digest("sealed"))
        assert row == in_round.parts.by_plain(RUN, "task/0", digest("plain"))
        assert (row.wrapped, row.name) == (b"w" * 1168, "task/0")
        with pytest.raises(InternalError, match="(?i)unique"):
            in_round.parts.add(RUN, "task/0", **{**part, "digest": digest("again")})
        in_round.parts.remove(RUN, digest("sealed"))
        assert in_round.parts.all(RUN) == []


class TestAccounts:
    def test_bytes_add_up_per_flow(self, in_round: Ledger) -> None:
        for wire in (100, 50):
            add_bytes(
                in_round,
                Direction.UP,
                Cause.UPDATE,
                round_key=KEY,
                client=BOB,
                tensor=10,
                wire=wire,
            )
        add_bytes(in_round, Direction.DOWN, Cause.CONTROL, run=RUN, wire=7)
        for _ in range(2):
            add_bytes(in_round, Direction.UP, Cause.HANDSHAKE, wire=9)
        found = [(f.client, f.cause, f.round, f.tensor, f.wire) for f in in_round.bytes.all(RUN)]
        assert found == [
            (None, Cause.CONTROL, None, 0, 7),
            (BOB, Cause.UPDATE, 0, 20, 150),
        ]
        assert [f.wire for f in in_round.bytes.all(None)] == [18]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"cause": Cause.UPDATE, "source": CountSource.KERNEL, "wire": 5},
            {"cause": Cause.CONNECTION, "source": CountSource.PREDICTED, "wire": 5},
            {"cause": Cause.CONNECTION, "source": CountSource.KERNEL, "tensor": 5},
        ],
    )
    def test_kernel_counts_are_of_connections_and_wire_only(
        self, ledger: Ledger, wrong: dict
    ) -> None:
        with pytest.raises(InternalError, match="(?i)check"):
            add_bytes(ledger, Direction.UP, **wrong)

    @pytest.mark.parametrize("cause", list(Cause))
    def test_every_cause_and_direction_has_a_place(self, ledger: Ledger, cause: Cause) -> None:
        told = {Cause.CONNECTION: CountSource.KERNEL, Cause.OBJECT_STORE: CountSource.REPORTED}
        source = told.get(cause, CountSource.PREDICTED)
        for direction in Direction:
            add_bytes(ledger, direction, cause, source=source, wire=1)
        assert {(f.direction, f.cause) for f in ledger.bytes.all(None)} == {
            (d, cause) for d in Direction
        }

    def test_a_repeated_evaluation_replaces_the_first(self, ledger: Ledger) -> None:
        ledger.evaluations.add(RUN, 0, ALICE, {0: (1, 10), 1: (2, 10)})
        ledger.evaluations.add(RUN, 0, ALICE, {0: (9, 10)})
        assert [(e.class_id, e.correct) for e in ledger.evaluations.all(RUN)] == [(0, 9)]

    def test_more_right_than_tested_is_refused_whole(self, ledger: Ledger) -> None:
        with pytest.raises(InternalError, match="(?i)check"):
            ledger.evaluations.add(RUN, 0, ALICE, {0: (1, 10), 1: (11, 10)})
        assert ledger.evaluations.all(RUN) == []

    def test_refusals_are_counted_without_end_but_kept_with_one(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_tables, "KEPT_REFUSALS", 10)
        monkeypatch.setattr(event_tables, "_TRIM_EVERY", 4)
        with ledger.transaction():
            for i in range(100):
                ledger.refusals.add(None, "malformed", f"{i} " + "x" * 10_000)
        kept = ledger.refusals.newest(limit=1000)
        assert ledger.refusals.counts() == {"malformed": 100}
        assert len(kept) == 10
        assert kept[0].reason.startswith("99 ")
        assert all(len(r.reason) <= 2000 for r in kept)

    def test_the_newest_events_are_those_of_all_runs_or_of_one(self, ledger: Ledger) -> None:
        for i in range(5):
            ledger.events.add("info", "test", f"{i}", run=RUN if i % 2 else None)
        assert [e.text for e in ledger.events.newest(limit=2)] == ["3", "4"]
        assert [e.text for e in ledger.events.newest(RUN)] == ["1", "3"]

    def test_events_have_an_end_in_number_and_length(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_tables, "KEPT_EVENTS", 5)
        monkeypatch.setattr(event_tables, "_TRIM_EVERY", 1)
        for i in range(9):
            ledger.events.add("error", "test", f"{i}" * 5000)
        assert [(e.text[0], len(e.text)) for e in ledger.events.newest()] == [
            (f"{i}", 2000) for i in range(4, 9)
        ]

    def test_nobody_pushes_out_what_others_caused(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(event_tables, "KEPT_EVENTS", 100)
        monkeypatch.setattr(event_tables, "_TRIM_EVERY", 10)
        monkeypatch.setattr(event_tables, "KEPT_REFUSALS", 100)
        for i in range(30):
            ledger.events.add("info", "test", f"{i} of the server")
            ledger.events.add("info", "test", f"{i} of bob", client=BOB)
            ledger.refusals.add(BOB, "malformed", f"{i}")
        for i in range(400):
            ledger.events.add("info", "test", f"{i} of alice", client=ALICE)
            ledger.refusals.add(ALICE, "malformed", f"{i}")
        events = ledger.events.newest(limit=10_000)
        held = Counter(e.client for e in events)
        assert held[None] == held[BOB] == 30
        assert 30 < held[ALICE] <= 45, "the newest of hers"
        assert events[-1].text == "399 of alice"
        refusals = ledger.refusals.newest(limit=10_000)
        assert sum(r.client == BOB for r in refusals) == 30
        assert len(refusals) <= 105
        assert ledger.refusals.counts() == {"malformed": 430}

    @pytest.mark.parametrize(
        ("held", "room", "share"),
        [([5, 5, 900], 100, 90), ([50, 60, 70], 100, 33), ([1, 2], 100, 2), ([9] * 20, 10, 1)],
    )
    def test_who_has_most_gives_most_away(self, held: list[int], room: int, share: int) -> None:
        assert event_tables.even_share(held, room) == share

    @pytest.mark.ledger_file
    @pytest.mark.parametrize("sql", ["UPDATE audit SET actor = 'x'", "DELETE FROM audit"])
    def test_the_audit_log_refuses_changes_even_to_other_programs(
        self, ledger: Ledger, sql: str
    ) -> None:
        ledger.audit.add("uid 1000 (ann)", "revoke", "bob")
        raw = sqlite3.connect(ledger.path)
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            raw.execute(sql)
        raw.close()
        assert [(a.actor, a.action, a.detail) for a in ledger.audit.newest()] == [
            ("uid 1000 (ann)", "revoke", "bob")
        ]


def test_a_ledger_from_before_forks_keeps_its_updates_in_order(path: Path) -> None:
    """The table was made anew in version 5, so that a fork may hold its parent's updates."""
    with sqlite3.connect(path) as old:
        old.executescript(f"PRAGMA application_id = {APPLICATION_ID};")
        for number, script in enumerate(MIGRATIONS[:4], start=1):
            old.executescript(f"{script} PRAGMA user_version = {number};")
        old.executescript(
            """
            INSERT INTO clients (client_id, name, curve, signing, sealing, enrolled_at)
              VALUES ('c', 'camera', x'01', x'02', x'03', 0);
            INSERT INTO runs VALUES ('r', 0, 'm', '1', '', '{}', '{}', 's', 1, 'running',
              NULL, NULL, '{}');
            INSERT INTO tasks VALUES ('r', 0, '[0]', 0, NULL);
            INSERT INTO rounds (run, task, kind, round, seq, opened_at, asked, base_state, closed_at)
              VALUES ('r', 0, 'train', 0, 0, 0, '[]', 0, 1), ('r', 0, 'z', 0, 1, 0, '[]', 0, 1);
            """
        )
        for kind, name in (("z", "late"), ("train", "early")):
            old.execute(
                "INSERT INTO updates VALUES ('r', 'c', 0, ?, 0, ?, 7, 5, 10, 20, 'counted', 'why')",
                (kind, name),
            )
    old.close()
    with Ledger(path) as ledger:
        rows = ledger.updates.of_client(RunId("r"), ClientId("c"))
        assert [(r.update_id, r.reason) for r in rows] == [("late", "why"), ("early", "why")]
        assert ledger.runs.get(RunId("r")).inherited == 0
        assert ledger.updates.rounds_by_client() == {"c": 2}


def test_the_newest_run_is_the_last_one_whatever_the_clock_says(ledger: Ledger) -> None:
    ledger.database.clock.now -= 1e6
    later = RunId("r20260102-030405-ffff")
    sample_run.add_run(ledger, later)
    assert ledger.runs.newest().run_id == later
    assert [r.run_id for r in ledger.runs.all()] == [RUN, later]


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("SELECT * FROM classes", ""),
        ("  pragma wal_checkpoint", ""),
        ("SAVEPOINT level1", ""),
        ("INSERT INTO Classes (run) VALUES (1)", "classes"),
        ("INSERT OR REPLACE INTO bytes VALUES (1)", "bytes"),
        ('UPDATE "tasks" SET closed_at = 1', "tasks"),
        ("\n DELETE  FROM parts", "parts"),
        ("WITH x AS (SELECT 1) INSERT INTO parts SELECT * FROM x", database.ANY_TABLE),
        ("DROP TABLE parts", database.ANY_TABLE),
    ],
)
def test_a_statement_names_the_table_that_it_changes(sql: str, table: str) -> None:
    assert database.changed_table(sql) == table
