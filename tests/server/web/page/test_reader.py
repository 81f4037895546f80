"""Histories for the page: the numbers of reports, read again at little cost and never wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import page_kit
import sample_run
from byte_counts import add_bytes
from fcil_protocol.errors import CorruptFile, StorageError, UsageError
from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.ledger.enums import Cause, Direction, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.tasks import TaskTable
from fcil_server.reports.charts.history import History, frozen
from fcil_server.reports.results.run_data import collect
from fcil_server.web.page import tally
from fcil_server.web.page.reader import HistoryReader
from sample_run import ALICE, BOB, GONE, RUN, Clock

SIZES = {"tensor": 10, "sealed": 20, "application": 30, "wire": 1_000}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with sample_run.build(tmp_path / "ledger.sqlite", clock=clock) as opened:
        yield opened


@pytest.fixture
def reader(ledger: Ledger, clock: Clock) -> Iterator[HistoryReader]:
    with HistoryReader(ledger.path) as opened:
        opened.database.clock = clock
        yield opened


def numbers(history: History) -> dict[str, Any]:
    """Return what a report and a reader must agree on."""
    names = {"run", "tasks", "classes", "rounds", "totals", "outside", "pooled", "central", "paper"}
    found = {f.name: getattr(history, f.name) for f in fields(history) if f.name in names}
    people = {m.client: (m.name, m.rounds, m.up, m.down, m.device) for m in history.members}
    return {**found, "people": people}


def test_a_reader_has_the_numbers_of_a_report(ledger: Ledger, reader: HistoryReader) -> None:
    assert numbers(reader.read()) == numbers(frozen(collect(ledger, RUN)))


def test_it_has_them_at_every_moment_of_a_run(tmp_path: Path, clock: Clock) -> None:
    """What is remembered of closed rounds never stands in the way of what is new."""
    path = tmp_path / "ledger.sqlite"
    readers: list[HistoryReader] = []
    real = TaskTable.close

    def close_task(self: TaskTable, run: RunId, task: int) -> None:
        real(self, run, task)
        if not readers:
            readers.append(HistoryReader(path))
            readers[0].database.clock = clock
        for passed in (0, 10, 200):
            clock.now += passed
            with Ledger(path, read_only=True, clock=clock) as ledger:
                assert numbers(readers[0].read()) == numbers(frozen(collect(ledger, run)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskTable, "close", close_task)
        sample_run.build(path, clock=clock).close()
    (reader,) = readers
    assert len(reader.read().rounds) == 12
    reader.close()


def test_what_did_not_change_is_the_same_object(ledger: Ledger, reader: HistoryReader) -> None:
    first = reader.read()
    assert reader.read() is first
    ledger.audit.add("uid 0", "pause")  # written, but nothing that is shown
    assert reader.read() is first


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda ledger: ledger.clients.mark_seen(ALICE), {"clients"}),
        (lambda ledger: ledger.events.add("info", "x", "hello", run=RUN), {"events"}),
        (lambda ledger: ledger.refusals.add(BOB, "schema", "no"), {"clients"}),
        (lambda ledger: ledger.classes.add(RUN, "fox", "fox", first_seen_by=BOB), {"tasks"}),
        (lambda ledger: ledger.runs.set_status(RUN, RunStatus.FAILED), None),
    ],
)
def test_a_change_names_the_sections_that_show_it(
    ledger: Ledger,
    reader: HistoryReader,
    clock: Clock,
    write: Callable[[Ledger], None],
    names: set[str] | None,
) -> None:
    first = reader.read()
    clock.now += 1
    write(ledger)
    second = reader.read()
    assert second.version > first.version
    assert second.changed(second.version) == frozenset()
    changed = second.changed(first.version)
    assert changed == names if names is not None else {"head", "now"} <= changed


def test_bytes_that_come_after_a_rounds_end_are_counted(
    ledger: Ledger, reader: HistoryReader, clock: Clock
) -> None:
    """Counts are flushed some seconds later; nobody writes anything when they are looked for."""
    key = reader.read().rounds[-1].key
    add_bytes(ledger, Direction.UP, Cause.CONTROL, round_key=key, client=ALICE, **SIZES)
    stale = reader.read()  # too early to look at that round again
    clock.now += 10
    fresh = reader.read()
    assert numbers(fresh) == numbers(frozen(collect(ledger, RUN)))
    assert fresh.version > stale.version
    assert "bytes" in fresh.changed(stale.version)


def test_a_settled_round_is_not_read_again(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now += 10_000
    with HistoryReader(ledger.path) as reader:
        reader.database.clock = clock
        reader.read()
        taken: list[Any] = []
        monkeypatch.setattr(tally.Tally, "_take", lambda self, row, *_: taken.append(row["seq"]))
        ledger.clients.mark_seen(ALICE)
        reader.read()
        assert taken == []


def test_a_round_that_goes_on_is_open_again(tmp_path: Path, clock: Clock) -> None:
    key = RoundKey(RUN, 3, "train", 0)
    with (
        sample_run.build(tmp_path / "l", clock=clock) as ledger,
        HistoryReader(tmp_path / "l") as reader,
    ):
        reader.database.clock = clock
        ledger.tasks.open(RUN, 3, [6])
        ledger.rounds.open(key, asked=(ALICE, BOB), base_state=9)
        opened = reader.read()
        assert opened.open is not None
        assert (opened.open.asked, len(opened.rounds)) == (2, 12)
        ledger.rounds.close(key, "short", why="deadline")
        clock.now += 1_000
        assert len(reader.read().rounds) == 13
        ledger.rounds.reopen(key, asked=(ALICE,), remaining_s=5.0)
        again = reader.read()
        assert (len(again.rounds), again.open.reopened, again.open.asked) == (12, 1, 1)
        assert numbers(again) == numbers(frozen(collect(ledger, RUN)))


def test_a_long_history_is_read_in_pieces_the_newest_first(
    ledger: Ledger, clock: Clock, reader: HistoryReader
) -> None:
    whole = numbers(reader.read())
    with HistoryReader(ledger.path, patience_s=0.0) as hasty:
        hasty.database.clock = clock
        for left in range(11, -1, -1):
            found = hasty.read()  # goes on though nobody writes
            assert found.unread == left
            assert [r.seq for r in found.rounds] == list(range(left, 12))
        assert numbers(found) == whole
        assert hasty.read() is found


def test_a_round_that_goes_on_while_it_is_young_is_read_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = RoundKey(RUN, 3, "train", 0)
    with (
        sample_run.build(tmp_path / "l", clock=clock) as ledger,
        HistoryReader(tmp_path / "l") as reader,
    ):
        reader.database.clock = clock
        ledger.tasks.open(RUN, 3, [6])
        ledger.rounds.open(key, asked=(ALICE, BOB), base_state=9)
        clock.now += 1_000
        reader.read()
        ledger.rounds.close(key, "short", why="deadline")
        reader.read()
        ledger.rounds.reopen(key, asked=(ALICE,), remaining_s=5.0)
        taken: list[int] = []
        real = tally.Tally._take
        monkeypatch.setattr(
            tally.Tally,
            "_take",
            lambda self, seq, *a: (taken.append(seq), real(self, seq, *a)),
        )
        assert reader.read().open is not None
        assert taken == [12]


def test_who_was_erased_is_nowhere_any_more(ledger: Ledger, reader: HistoryReader) -> None:
    ledger.events.add("warning", "lost", "gone is away", run=RUN)
    assert "gone" in {m.name for m in reader.read().members}
    ledger.clients.revoke(GONE, "sold")
    with ledger.transaction():
        ledger.clients.erase(GONE)
    after = reader.read()
    assert "gone" not in {m.name for m in after.members}
    named = [a.name for r in after.rounds for a in r.without]
    assert named
    assert "gone" not in named
    assert not [e for e in after.events if e.text.startswith("gone")]
    assert [m.standing for m in after.members if m.client == GONE] == ["erased"]


def test_who_was_erased_before_the_first_run_is_nowhere_either(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger, HistoryReader(tmp_path / "l") as reader:
        sample_run.add_clients(ledger)
        ledger.events.add("info", "x", "alice knows gone")
        ledger.refusals.add(ALICE, "x", "alice knows gone")
        assert "alice knows gone" in {e.text for e in reader.read().events}
        with ledger.transaction():
            ledger.clients.erase(GONE)
        after = reader.read()
        texts = [e.text for e in after.events] + [m.refusal for m in after.members if m.refusal]
        assert texts == ["alice knows erased-cccccccc"] * 2


def test_a_new_run_is_found_though_the_older_one_was_just_read(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger, HistoryReader(tmp_path / "l") as reader:
        sample_run.add_run(ledger)
        reader.read()
        other = RunId("r20260103-030405-abcd")
        sample_run.add_run(ledger, other)
        assert reader.read(RUN).run.run_id == RUN
        assert reader.read().run.run_id == other


def test_an_older_run_can_be_read_beside_the_newest(tmp_path: Path) -> None:
    with page_kit.small(tmp_path / "l") as ledger, HistoryReader(tmp_path / "l") as reader:
        other = RunId("r20260103-030405-abcd")
        sample_run.add_run(ledger, other)
        assert (reader.read().run.run_id, len(reader.read().rounds)) == (other, 0)
        older = reader.read(RUN)
        assert (older.run.run_id, len(older.rounds)) == (RUN, 12)
        assert [r.run for r in older.runs] == [other, RUN]
        assert reader.read(RUN) is older
        for number in range(8):
            sample_run.add_run(ledger, RunId(f"r20260104-00000{number}-abcd"))
            reader.read()
        assert len(reader._known) <= 4  # what is remembered is bounded
        assert numbers(reader.read(RUN)) == numbers(older)


def test_an_unknown_run_is_named(reader: HistoryReader) -> None:
    with pytest.raises(UsageError, match="there is no run 'r1'"):
        reader.read(RunId("r1"))


def test_a_missing_or_damaged_ledger_is_named_and_read_again_once_it_is_mended(
    ledger: Ledger, clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="no ledger at"):
        HistoryReader(tmp_path / "none")
    phases = ledger.database.number("SELECT phases FROM rounds WHERE seq = 3")
    ledger.database.write("UPDATE rounds SET phases = 'x' WHERE seq = 3")
    with HistoryReader(ledger.path) as reader:
        reader.database.clock = clock
        for _ in range(2):
            with pytest.raises(CorruptFile, match="column phases"):
                reader.read()
        ledger.database.write("UPDATE rounds SET phases = ? WHERE seq = 3", (phases,))
        assert numbers(reader.read()) == numbers(frozen(collect(ledger, RUN)))


def test_the_newest_events_are_kept_and_the_others_counted(
    ledger: Ledger, reader: HistoryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcil_server.web.page.reader.KEPT_EVENTS", 5)
    for number in range(7):
        ledger.events.add("info", "x", f"event {number}", run=RUN)
    first = reader.read()
    assert [e.text for e in first.events] == [f"event {n}" for n in (6, 5, 4, 3, 2)]
    assert first.older == 2
    ledger.events.add("info", "x", "event 7")  # of no run: of the server itself
    ledger.events.add("info", "x", "of another run", run=RunId("r1"))
    second = reader.read()
    assert [e.text for e in second.events][:2] == ["event 7", "event 6"]
    assert second.older == 3


@pytest.mark.parametrize("client", [ALICE, GONE])  # GONE's are the newest rows
def test_metrics_follow_the_evaluations(
    ledger: Ledger, reader: HistoryReader, client: ClientId
) -> None:
    before = reader.read()
    ledger.evaluations.add(RUN, 2, client, dict.fromkeys(range(6), (0, 10)))
    after = reader.read()
    assert after.metrics.faa < before.metrics.faa
    assert "accuracy" in after.changed(before.version)
