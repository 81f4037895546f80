"""Rounds as the command line lists them: true bytes, and a table for spreadsheets."""

import csv
import io
from pathlib import Path

import pytest

import sample_run
from fcil_protocol.ids import RoundKey, UpdateId
from fcil_server.cli.show_rounds import rounds_csv, show_rounds
from fcil_server.ledger.enums import RunStatus
from fcil_server.reports.charts.history import frozen
from fcil_server.reports.results.run_data import collect, round_rows
from fcil_server.reports.sections import rounds as page_rounds
from sample_run import RUN


@pytest.fixture
def ledger(tmp_path: Path):
    with sample_run.build(tmp_path / "ledger.sqlite") as opened:
        yield opened


def test_bytes_are_the_kernels_where_it_counted(ledger):
    rows = round_rows(ledger, RUN)
    views = collect(ledger, RUN).rounds
    assert [r["wire_up"] for r in rows] == [v.up.wire_kernel for v in views]
    assert [r["wire_down"] for r in rows] == [v.down.wire_kernel for v in views]
    assert [r["tensors_up"] for r in rows] == [v.up.tensor for v in views]
    assert {r["wire_source"] for r in rows} == {"kernel"}


def test_without_the_kernel_they_are_predicted_and_say_so(ledger, capsys):
    ledger.database.execute("DELETE FROM bytes WHERE source = 'kernel'", ())
    rows = round_rows(ledger, RUN)
    views = collect(ledger, RUN).rounds
    assert [r["wire_up"] for r in rows] == [v.up.wire for v in views]
    assert {r["wire_source"] for r in rows} == {"predicted"}
    show_rounds(rows)
    assert "by the exact formula" in capsys.readouterr().out


def test_seconds_are_those_from_a_rounds_opening_to_its_end_or_to_now(ledger):
    ledger.runs.set_status(RUN, RunStatus.RUNNING)
    key = RoundKey(RUN, 2, "train", 9)
    began = ledger.now
    ledger.rounds.open(key, asked=sample_run.CLIENTS, base_state=1)
    ledger.database.clock.now += 18.5
    open_row = round_rows(ledger, RUN)[-1]
    assert (open_row["outcome"], open_row["seconds"]) == ("open", 18.5)
    ledger.rounds.close(key, "skipped", phases={"collect_s": 0.1})  # it was killed before
    ledger.database.clock.now += 100
    assert round_rows(ledger, RUN)[-1]["seconds"] == ledger.rounds.all(RUN)[-1].closed_at - began


def test_the_seconds_of_a_round_that_was_cut_off_with_its_run_do_not_grow(ledger):
    key = RoundKey(RUN, 2, "train", 9)
    ledger.rounds.open(key, asked=sample_run.CLIENTS, base_state=1)
    ledger.database.clock.now += 5
    with ledger.transaction():
        ledger.updates.accept(
            key, sample_run.ALICE, update_id=UpdateId("ab" * 32), samples=1, tensor_bytes=1,
            sealed_bytes=1,
        )  # fmt: skip
    ledger.runs.set_status(RUN, RunStatus.STOPPED)
    ledger.database.clock.now += 1000
    assert round_rows(ledger, RUN)[-1]["seconds"] == 5


def test_what_a_killed_server_spent_is_told_beside_the_phases(ledger):
    key = RoundKey(RUN, 2, "train", 9)
    ledger.rounds.open(key, asked=sample_run.CLIENTS, base_state=1)
    ledger.database.clock.now += 18.5
    ledger.rounds.close(key, "skipped", phases={"collect_s": 0.5})
    history = frozen(collect(ledger, RUN))
    row = page_rounds._row(history.rounds[-1])
    assert row.seconds == 18.5
    assert row.phases == "collect 0.50 s, before a restart, or waiting 18.00 s"


def test_csv_has_a_line_for_each_round_and_numbers_for_lists(ledger, capsys):
    rows = round_rows(ledger, RUN)
    rounds_csv(rows)
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(x["seq"]) for x in lines] == [r["seq"] for r in rows]
    assert [int(x["answers"]) for x in lines] == [len(r["answers"]) for r in rows]
    assert [int(x["wire_up"]) for x in lines] == [r["wire_up"] for r in rows]


def test_csv_of_a_run_without_rounds_is_a_heading(capsys):
    rounds_csv([])
    assert capsys.readouterr().out == "seq\n"
