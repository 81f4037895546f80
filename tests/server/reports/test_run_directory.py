"""The run directory: complete, consistent with the ledger, safe to open."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import sample_run
from byte_counts import add_bytes
from fcil_protocol.errors import DiskFull, UsageError
from fcil_protocol.formats import format_bytes
from fcil_protocol.ids import RunId
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_protocol.process.tables import show
from fcil_server.aggregation.store import StateStore
from fcil_server.cli.show_report import summary_tables
from fcil_server.ledger.enums import CENTRAL, Cause, CountSource, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports import plots, run_directory
from fcil_server.reports.charts.svg import scale
from fcil_server.reports.results.round_views import Bytes
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.sections import static_page
from markup import Page
from sample_run import ALICE, BOB, GONE, RUN, digest


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with sample_run.build(tmp_path_factory.mktemp("run") / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def written(ledger: Ledger, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    states = StateStore(folder / "states")
    newest = ledger.states.newest(RUN)
    states.save(newest.state - 1, Payload({"w": np.zeros(2, np.float32)}), None, 0)
    made = states.save(newest.state, Payload({"w": np.ones(2, np.float32)}), digest("zero"), 2)
    ledger.database.write("UPDATE states SET digest = ? WHERE state = ?", (made, newest.state))
    run_directory.write(ledger, RUN, folder / "run", states=states)
    return folder / "run"


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        sample_run.add_clients(opened)
        sample_run.add_run(opened)
        yield opened


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(error: Exception) -> None:
    raise error


def terminal(ledger: Ledger) -> str:
    console = Console(width=100, file=io.StringIO())
    for table in summary_tables(collect(ledger, RUN), console):
        show(console, table)
    return console.file.getvalue()


class TestFiles:
    def test_every_promised_file_is_there_and_private(self, written: Path) -> None:
        expected = {
            "rounds.jsonl", "bytes.csv", "accuracy_matrix.csv", "summary.json", "report.html",
            "environment.json", "final.safetensors",
        }  # fmt: skip
        pictures = ("accuracy_matrix", "accuracy", "bytes_per_round", "seconds_per_round")
        expected |= {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
        assert {p.name for p in written.iterdir()} == expected
        assert {p.stat().st_mode & 0o777 for p in written.iterdir()} == {0o600}

    def test_pictures_are_left_out_where_they_are_not_wanted(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        run_directory.write(ledger, RUN, tmp_path, plots=False)
        names = {f.name for f in tmp_path.iterdir()}
        assert names >= {"summary.json", "report.html"}
        assert not [name for name in names if name.endswith((".png", ".svg"))]

    @pytest.mark.full
    def test_writing_again_gives_the_same_bytes(self, ledger: Ledger, written: Path) -> None:
        before = {p.name: p.read_bytes() for p in written.iterdir()}
        for path in written.iterdir():
            path.unlink()
        run_directory.write(ledger, RUN, written, states=StateStore(written.parent / "states"))
        assert {p.name: p.read_bytes() for p in written.iterdir()} == before

    def test_the_headlines_are_those_of_the_matrix(self, written: Path) -> None:
        data = json.loads((written / "summary.json").read_text())["data"]
        assert data["accuracy_matrix"] == [list(row) for row in sample_run.MATRIX]
        assert data["faa"] == pytest.approx(80.0)
        assert data["aia"] == pytest.approx((90 + 75 + 80) / 3)
        assert data["forgetting"] == pytest.approx((30 - 5) / 2)
        assert data["run_status"] == "done"
        assert data["tasks"][1]["classes"] == ["cat", "dog"]

    def test_the_matrix_file_has_a_row_per_evaluation(self, written: Path) -> None:
        found = read_csv(written / "accuracy_matrix.csv")
        assert found[1] == {
            "after_task": "1", "task_0": "70.0000", "task_1": "80.0000", "task_2": "",
            "task_mean": "75.0000",
        }  # fmt: skip
        assert len(found) == 3

    def test_bytes_agree_in_all_files(self, ledger: Ledger, written: Path) -> None:
        """The CSV's rows, the rounds' sums and the summary's totals are the same bytes."""
        total = json.loads((written / "summary.json").read_text())["data"]["bytes"]
        rounds = lines(written / "rounds.jsonl")
        table = [r for r in read_csv(written / "bytes.csv") if r["run"] == RUN]
        for way in ("up", "down"):
            for level in ("tensor", "sealed", "application", "wire"):
                counted = sum(
                    int(r[level])
                    for r in table
                    if r["direction"] == way and r["source"] == "predicted"
                )
                assert counted == total[way][level] == sum(r["bytes"][way][level] for r in rounds)
            kernel = sum(
                int(r["wire"]) for r in table if r["direction"] == way and r["source"] == "kernel"
            )
            assert kernel == total[way]["wire_kernel"] > 0
        assert total["up"] == {
            "tensor": 7_765_296,
            "sealed": 7_765_296 + 34 * 1_500,
            "application": 7_765_296 + 34 * 2_000,
            "wire": 7_765_296 + 34 * 3_000,
            "wire_kernel": 7_765_296 + 34 * 3_100,
            "retransmitted": 0,
            "link": 7_765_296 + 34 * 9_000,
            "true_wire": 7_765_296 + 34 * 3_100,
            "rest": 34 * 100,
            "object_store": 0,
        }
        assert total["down"]["retransmitted"] == 34 * 40

    def test_bytes_of_no_run_are_named_and_not_added(self, written: Path) -> None:
        total = json.loads((written / "summary.json").read_text())["data"]["bytes"]
        assert total["outside_run"]["up"]["wire"] == 900
        last = read_csv(written / "bytes.csv")[-1]
        assert (last["run"], last["seq"], last["cause"], last["wire"]) == (
            "",
            "",
            "handshake",
            "900",
        )

    def test_flows_name_their_round_and_their_client(self, ledger: Ledger, written: Path) -> None:
        """Each count of the ledger is a line, and it is the only one of its kind."""
        found = [tuple(r.values()) for r in read_csv(written / "bytes.csv")]
        seq = {row.key: row.seq for row in ledger.rounds.all(RUN)}
        names = {c.client_id: c.name for c in ledger.clients.all()}
        expected = [
            (f.run, seq.get((f.run, f.task, f.kind, f.round)), f.task, f.kind, f.round, f.client)
            + (names[f.client], f.direction, f.cause, f.source, f.tensor, f.sealed)
            + (f.application, f.wire, f.retransmitted, f.link)
            for f in (*ledger.bytes.all(RUN), *ledger.bytes.all(None))
        ]
        as_text = [tuple("" if v is None else str(v) for v in flow) for flow in expected]
        assert sorted(found) == sorted(as_text)

    def test_the_flows_stand_in_the_order_of_rounds(self, written: Path) -> None:
        seqs = [int(r["seq"]) for r in read_csv(written / "bytes.csv") if r["seq"]]
        assert seqs == sorted(seqs)
        assert set(seqs) == set(range(12))

    def test_a_rounds_line_says_who_counted_and_why_others_did_not(self, written: Path) -> None:
        rounds = lines(written / "rounds.jsonl")
        assert [r["seq"] for r in rounds] == list(range(12))
        assert rounds[5]["silent"] == {GONE: {"answer": "declined", "reason": "on battery"}}
        assert rounds[6]["silent"][GONE]["answer"] == "lost"
        last_train = rounds[10]
        assert last_train["counted"] == [ALICE, GONE]
        assert last_train["excluded"] == {BOB: "its norm is 40 times the round's median"}
        assert last_train["seconds"] == {"collect_s": 6.0, "aggregate_s": 0.25}
        assert (last_train["base_state"], last_train["new_state"]) == (8, 9)

    def test_the_final_model_is_the_newest_state(self, written: Path) -> None:
        payload = unpack((written / "final.safetensors").read_bytes())
        assert payload.tensors["w"].tolist() == [1.0, 1.0]
        final = json.loads((written / "summary.json").read_text())["data"]["final_state"]
        assert (final["number"], final["task"]) == (9, 2)

    def test_the_best_tested_state_is_in_the_summary_and_the_page(
        self, ledger: Ledger, written: Path
    ) -> None:
        best = json.loads((written / "summary.json").read_text())["data"]["best_state"]
        found = ledger.evaluations.best(RUN)
        assert found is not None
        assert best == {
            "state": found.state,
            "task": 2,
            "correct": found.correct,
            "total": found.total,
            "central": found.central,
            "accuracy": 100 * found.correct / found.total,
            "tested_by": "clients" if not found.central else "server",
        }
        page = (written / "report.html").read_text()
        assert f"The best tested state is {found.state}, of task 2: " in page

    def test_an_older_state_never_passes_for_the_final_model(
        self, ledger: Ledger, written: Path, tmp_path: Path
    ) -> None:
        """Where the newest state is damaged there is no final model, and the rest is written."""
        states = StateStore(tmp_path / "states")
        for path in (written.parent / "states").iterdir():
            (states.directory / path.name).write_bytes(path.read_bytes())
        states.path(9).write_bytes(b"x")
        run_directory.write(ledger, RUN, tmp_path / "run", states=states, plots=False)
        assert not (tmp_path / "run" / "final.safetensors").exists()
        assert run_directory.is_complete(tmp_path / "run")

    def test_results_without_a_summary_are_not_complete(
        self, ledger: Ledger, tmp_path: Path
    ) -> None:
        """The summary is written last, so a kill before it is noticed."""
        assert not run_directory.is_complete(tmp_path)
        run_directory.write(ledger, RUN, tmp_path, plots=False)
        assert run_directory.is_complete(tmp_path)
        real = run_directory.write_atomic
        with pytest.MonkeyPatch.context() as patch:
            for path in tmp_path.iterdir():
                path.unlink()
            full = DiskFull("no space.")
            patch.setattr(
                run_directory,
                "write_atomic",
                lambda p, d: real(p, d) if "html" not in p.name else fail(full),
            )
            with pytest.raises(DiskFull):
                run_directory.write(ledger, RUN, tmp_path, plots=False)
        assert not run_directory.is_complete(tmp_path)
        (tmp_path / "summary.json").write_text("{")
        assert not run_directory.is_complete(tmp_path)

    def test_the_environment_is_that_of_the_run(self, written: Path) -> None:
        content = json.loads((written / "environment.json").read_text())
        assert content["data"]["threads"] == 2
        assert content["data"]["method_version"] == "1"
        assert content["data"]["backbone"]["digest"] == digest("backbone")
        assert 'name = "pilora"' in content["data"]["config"]

    def test_this_machine_is_described_without_names_or_paths(self) -> None:
        found = run_directory.describe_environment({"name": "cpu"}, threads=3)
        assert (found["threads"], found["device"]) == (3, {"name": "cpu"})
        assert found["packages"]["numpy"] == np.__version__
        assert len(found["source_digest"]) == 64
        assert str(Path.home()) not in json.dumps(found)

    def test_a_run_without_any_round_can_be_reported(self, empty: Ledger, tmp_path: Path) -> None:
        run_directory.write(empty, RUN, tmp_path / "run", states=StateStore(tmp_path / "s"))
        assert {f.name for f in (tmp_path / "run").iterdir()} == {
            "rounds.jsonl", "bytes.csv", "accuracy_matrix.csv", "summary.json", "report.html",
            "environment.json",
        }  # fmt: skip
        data = json.loads((tmp_path / "run" / "summary.json").read_text())["data"]
        assert (data["faa"], data["accuracy_matrix"], data["final_state"]) == (None, None, None)

    def test_without_clients_tests_the_servers_folder_makes_the_headline(
        self, empty: Ledger, tmp_path: Path
    ) -> None:
        empty.tasks.open(RUN, 0, [0])
        empty.classes.add(RUN, "cat", "cat", class_id=0)
        empty.evaluations.add(RUN, 0, CENTRAL, {0: (3, 4)})
        run_directory.write(empty, RUN, tmp_path / "run", plots=False)
        data = json.loads((tmp_path / "run" / "summary.json").read_text())["data"]
        assert (data["faa"], data["evaluation"]) == (75.0, None)
        assert "the server's test folder" in static_page.report(collect(empty, RUN))

    def test_an_unknown_run_lists_the_known_ones(self, ledger: Ledger, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=f"newest are {RUN}"):
            run_directory.write(ledger, RunId("r20000101-000000-0000"), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_reader_can_report_while_the_server_runs(
        self, ledger: Ledger, written: Path, tmp_path: Path
    ) -> None:
        with Ledger(ledger.path, read_only=True) as reader:
            run_directory.write(reader, RUN, tmp_path, plots=False)
        assert (tmp_path / "rounds.jsonl").read_bytes() == (written / "rounds.jsonl").read_bytes()


class TestAppending:
    @pytest.mark.full
    def test_appended_lines_are_those_written_at_once(
        self, ledger: Ledger, written: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "new" / "rounds.jsonl"
        held = b""
        for row in ledger.rounds.all(RUN):
            run_directory.append_round(ledger, row.key, path.parent)
            assert path.read_bytes().startswith(held)
            held = path.read_bytes()
        assert path.read_bytes() == (written / "rounds.jsonl").read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("held", [b"", b'{"seq": 0}\n', b"{}\n" * 11 + b'{"se', b"{}\n" * 99])
    @pytest.mark.full
    def test_a_torn_or_missing_line_is_made_good(
        self, ledger: Ledger, written: Path, tmp_path: Path, held: bytes
    ) -> None:
        """A kill in the middle of a line, or between a round's end and its line."""
        path = tmp_path / "rounds.jsonl"
        path.write_bytes(held)
        run_directory.append_round(ledger, ledger.rounds.all(RUN)[-1].key, tmp_path)
        assert path.read_bytes() == (written / "rounds.jsonl").read_bytes()


class TestReport:
    def test_the_page_shows_numbers_clients_and_reasons(self, written: Path) -> None:
        page = Page((written / "report.html").read_text())
        for expected in (
            "80.0 %", "81.7 %", "12.5 pp", "7.87 MB", "alice", "on battery",
            "its norm is 40 times", "Käse", "outside any run", "12 rounds, 3 tasks",
        ):  # fmt: skip
            assert expected in page.text

    def test_rounds_without_the_kernels_count_are_not_hidden_by_those_with_it(
        self, ledger: Ledger
    ) -> None:
        data = collect(ledger, RUN)
        some = data.rounds[0].round.key
        flows = [
            f
            for f in ledger.bytes.all(RUN)
            if f.source is not CountSource.KERNEL or (f.run, f.task, f.kind, f.round) == some
        ]
        for d in Direction:
            total = Bytes.total(f for f in flows if f.direction is d)
            rounds = [v.up if d is Direction.UP else v.down for v in data.rounds]
            assert total.true_wire == rounds[0].wire_kernel + sum(b.wire for b in rounds[1:])
            assert total.rest == rounds[0].rest

    @pytest.mark.parametrize("most", [0, 1, 7, 10, 999, 1000, 2.5e6, 5e9])
    def test_axes_end_above_the_largest_value_with_few_ticks(self, most: float) -> None:
        top, ticks = scale(most)
        assert top >= most
        assert (ticks[0], ticks[-1]) == (0, top)
        assert 3 <= len(ticks) <= 6

    def test_the_terminal_shows_the_same_numbers(self, ledger: Ledger) -> None:
        text = terminal(ledger)
        for expected in ("90.0", "80.0 %", "12.5 pp", "evaluate 0", "7.87 MB", "10.5 MB", "2 of 3"):
            assert expected in text
        assert max(map(len, text.splitlines())) <= 100

    def test_many_rounds_are_summed_by_task(self, tmp_path: Path) -> None:
        with sample_run.build(tmp_path / "l") as ledger:
            ledger.tasks.open(RUN, 3, [6])
            for number in range(200):
                key = sample_run.RoundKey(RUN, 3, "train", number)
                ledger.rounds.open(key, asked=(ALICE,), base_state=0)
                add_bytes(ledger, Direction.UP, Cause.UPDATE, round_key=key, tensor=1000, wire=1100)
                ledger.rounds.close(key, "skipped")
            text = terminal(ledger)
            page = Page(static_page.report(collect(ledger, RUN)))
        assert re.search(r"train x 200 +0 of 200 +200 kB +220 kB", text)
        assert page.text.count("per task") >= 2
        assert sum(a.get("id", "").startswith("rounds-task-") for _, a in page.tags) == 4

    def test_plots_are_pictures_with_something_on_them(self, written: Path) -> None:
        for path in written.glob("*.png"):
            with Image.open(path) as image:
                colours = image.convert("RGB").getcolors(1 << 24)
            assert len(colours) > 50, path.name

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"),
            (999_500, "1.00 MB"), (9_995_000, "10.0 MB"), (12_340_000_000, "12.3 GB"),
            (5_000_000_000_000, "5,000 GB"),
        ],
    )  # fmt: skip
    def test_bytes_have_three_digits_and_decimal_units(self, count: int, text: str) -> None:
        assert format_bytes(count) == text


def test_a_style_that_matplotlib_finds_somewhere_changes_no_picture() -> None:
    """It looks for one in the current directory; ``text.usetex`` there would start LaTeX."""
    plain = plots.cost([("a", [(1000, 50.0), (2000, 60.0)])])
    with mpl.rc_context({"text.usetex": True, "axes.facecolor": "black"}):
        assert plots.cost([("a", [(1000, 50.0), (2000, 60.0)])]) == plain


def test_neither_torch_nor_matplotlib_is_needed_to_import_reports() -> None:
    """The daemon imports all of this; it must stay small."""
    code = (
        "import sys; import fcil_server.reports.run_directory, fcil_server.rounds.classes, fcil_server.reports.plots;"
        "heavy = {'torch', 'timm', 'matplotlib', 'zmq', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
