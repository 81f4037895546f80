"""Experiments and runs from Python: the tables say what the files say."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sample_run
from fcil_protocol.errors import ConfigError, Locked, NotYet, UsageError
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server import api
from fcil_server.lab import plan
from fcil_server.lab.data import PartitionImages
from fcil_server.lab.engine import RESULTS
from fcil_server.lab.experiment import load as load_experiment
from fcil_server.lab.records import TEXT
from fcil_server.lab.results import Results
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.results.run_data import collect
from server.lab.kit import content, experiment

ROOT = Path(__file__).resolve().parents[3]
FOUND = experiment(
    papers=[{"source": "S", "setting": "T", "figures": {"NCM": {"beta=1": {"faa": 65.6}}}}],
    claims=[
        {
            "text": "NCM wins", "source": "S", "left": "NCM", "right": "Ridge",
            "partition": "beta=1",
        }
    ],
)  # fmt: skip
FRAMES = ("cells", "curves", "matrices", "bytes", "summary", "papers", "claims")
RUN_FRAMES = ("rounds", "bytes")
FAA = {
    "NCM/alpha=1/1": 70.0, "NCM/beta=1/1": 60.0, "NCM/beta=1/2": 64.0, "Ridge/beta=1/1": 50.0,
}  # fmt: skip


def example(words) -> str:
    """Return the Python of docs/python.md in which these words are."""
    blocks = (ROOT / "docs/python.md").read_text().split("```python\n")[1:]
    (found,) = (code for block in blocks if words in (code := block.partition("```")[0]))
    return found


def write_results(folder, faa, found=FOUND):
    """Write results of these cells, as if they had run; return the file of each."""
    results, cells = Results(folder), plan.make(found)
    results.make()
    parts = {
        c.split.slug: PartitionImages(folder, "p" + c.split.slug, "d", (("a",),), 8, ())
        for c in cells
    }
    known = results.add_sources("backbone", parts)
    chosen = [c for c in cells if c.name in faa]
    for cell in chosen:
        results.save(known.key(cell), cell, known, content(cell.name, faa[cell.name]))
    return {c.name: folder / "cells" / f"{known.key(c)}.json" for c in chosen}


@pytest.fixture
def measured(tmp_path):
    """Results of some cells, as if they had run."""
    write_results(tmp_path, FAA)
    return api.load(FOUND, results=tmp_path)


def test_the_table_has_the_papers_order_and_means_over_seeds(measured):
    table = measured.table()
    assert list(table.index) == ["NCM", "Ridge", "Joint"]
    assert list(table.columns) == ["alpha=1", "beta=1"]
    assert table.loc["NCM"].to_list() == [70.0, 62.0]
    assert table.loc["Ridge", "beta=1"] == 50.0
    assert table.isna().sum().to_list() == [2, 1], "not measured, or not asked for"
    spread = measured.table("faa", deviation=True)
    assert spread.loc["NCM", "beta=1"] == pytest.approx(8**0.5)
    assert pd.isna(spread.loc["NCM", "alpha=1"])
    assert measured.table("forgetting").loc["NCM", "beta=1"] == 5.0
    with pytest.raises(ConfigError, match="no metric 'loss'; expected faa, aia or forgetting"):
        measured.table("loss")


def test_every_cell_is_a_line_and_its_numbers_keep_their_kind(measured):
    cells = measured.cells
    assert [f"{c.row}/{c.partition}/{c.seed}" for c in cells.itertuples()] == list(FAA)
    assert cells["faa"].to_list() == list(FAA.values())
    assert cells["method"].to_list() == ["fedncm", "fedncm", "fedncm", "analytic"]
    for column in ("up_tensor", "run_up_wire", "rounds", "updates", "train_images"):
        assert cells[column].dtype == "int64", column
    assert cells.loc[0, ["up_wire", "run_down_wire", "wall_s"]].to_list() == [150, 3000, 10.0]
    assert cells["key"].str.len().eq(24).all()


def test_curves_matrices_and_bytes_are_long_and_tidy(measured):
    pick = {"row": "NCM", "partition": "beta=1", "seed": 2}

    def of(table):
        return table[(table[list(pick)] == pd.Series(pick)).all(axis=1)].drop(columns=list(pick))

    assert of(measured.curves).to_numpy().tolist() == [[0, 80.0], [1, 64.0]]
    assert of(measured.matrices).to_numpy().tolist() == [[0, 0, 80.0], [1, 0, 54.0], [1, 1, 74.0]]
    flows = of(measured.bytes)
    assert flows[["cause", "direction"]].to_numpy().tolist() == [
        ["update", "up"], ["update", "down"], ["connection", "up"], ["connection", "down"],
    ]  # fmt: skip
    assert flows["wire"].to_list() == [2900, 2900, 0, 0]


def test_the_summary_papers_and_claims_are_those_of_the_report(measured):
    summary = measured.summary.set_index(["row", "partition"])
    line = summary.loc[("NCM", "beta=1")]
    assert line[["seeds", "missing", "faa_mean", "up_wire_mean"]].to_list() == [2, 0, 62.0, 150.0]
    assert summary.loc[("Ridge", "beta=1"), "missing"] == 1
    assert measured.papers[["row", "source", "faa"]].to_numpy().tolist() == [["NCM", "S", 65.6]]
    assert measured.claims["verdict"].to_list() == ["holds"]
    assert "60.0 against 50.0" in measured.claims.loc[0, "measured"]


def test_a_result_says_how_far_it_is(measured):
    assert repr(measured) == "<Result of 'A table': 4 of 10 cells>"
    assert len(measured.missing) == 6
    assert "Joint/beta=1/2" in measured.missing
    assert "<td>62.0</td>" in measured._repr_html_()


@pytest.mark.parametrize("faa", [{}, {"NCM/alpha=1/1": 70.0}], ids=["no cell", "one seed"])
def test_a_column_without_any_value_is_of_numbers_that_can_be_averaged_and_drawn(tmp_path, faa):
    write_results(tmp_path, faa)
    result = api.load(FOUND, results=tmp_path)
    for name in FRAMES:
        table = getattr(result, name)
        numbers = [c for c in table if c not in TEXT]
        assert all(pd.api.types.is_numeric_dtype(table[c]) for c in numbers), name
    spread = result.table("faa", deviation=True)
    assert spread.isna().all(axis=None)
    assert (spread.dtypes == "float64").all()
    assert list(spread.columns) == ["alpha=1", "beta=1"]


def test_every_column_of_text_is_known_as_one(measured, federation):
    run = api.open_run(federation[0])
    tables = [getattr(measured, name) for name in FRAMES] + [run.rounds, run.bytes]
    found = {c for t in tables for c in t if t[c].map(lambda value: isinstance(value, str)).any()}
    assert found == TEXT


def test_the_docs_name_every_column(measured, federation):
    run = api.open_run(federation[0])
    tables = (ROOT / "docs/python.md").read_text().partition("## Columns")[2].split("| of a ")[1:]
    for text, given, names in zip(tables, (measured, run), (FRAMES, RUN_FRAMES), strict=True):
        lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
        said = {name: re.findall(r"`(\w+)`", columns) for name, columns in lines}
        assert said == {name: list(getattr(given, name).columns) for name in names}


def test_what_the_docs_read_is_there(federation, tmp_path, monkeypatch):
    place, data, _ = federation
    scope: dict[str, object] = {"api": api}
    small = load_experiment(ROOT / "experiments" / "cifar100-small.toml")
    write_results(tmp_path / "results" / small.name, {"PILoRA/beta=0.05/1": 22.0}, small)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    exec(compile(example("small = "), "docs/python.md", "exec"), scope)
    assert scope["small"].table("faa").loc["PILoRA", "beta=0.05"] == 22.0
    assert scope["wide"]["PILoRA"].to_list() == [80.0, 22.0]
    (place / "federation").symlink_to(place)
    monkeypatch.chdir(place)
    exec(compile(example("open_run"), "docs/python.md", "exec"), scope)
    assert scope["run"].id == data.run.run_id


def test_a_damaged_file_of_a_cell_is_a_cell_that_is_missing(tmp_path):
    files = write_results(tmp_path, FAA)
    files["NCM/beta=1/2"].write_bytes(files["NCM/beta=1/2"].read_bytes()[:100])
    result = api.load(FOUND, results=tmp_path)
    assert "NCM/beta=1/2" in result.missing
    assert result.table().loc["NCM", "beta=1"] == 60.0


def test_nothing_measured_is_an_error_of_one_sentence(tmp_path):
    with pytest.raises(NotYet, match="holds no results yet") as caught:
        api.load(FOUND, results=tmp_path / "none")
    assert "--" not in caught.value.action, "an option is of no use here"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"experiment": None}, "experiment is None; expected the path of a TOML, or its keys"),
        ({"results": 3}, "results is 3; expected a path"),
        ({"results": "~nobody-has-this-name/r"}, "results is '~nobody.*'; expected a path"),
        ({"data": b"toys"}, "data is b'toys'; expected a path"),
        ({"only": None}, "only is None; expected ROW or ROW/PARTITION"),
        ({"only": [3]}, "there is no cell '3'"),
        ({"seeds": 1}, r"seeds is 1; expected whole numbers, such as \[1, 2\]"),
        ({"seeds": "12"}, "seeds is '12'; expected whole numbers"),
        ({"seeds": [1.5]}, r"seeds is \[1.5\]; expected whole numbers"),
        ({"jobs": "2"}, "jobs is '2'; expected a whole number"),
        ({"jobs": 1.5}, "jobs is 1.5; expected a whole number"),
    ],
)
def test_an_argument_of_another_kind_is_named(tmp_path, given, said):
    arguments = {"experiment": FOUND, "results": tmp_path / "r", **given}
    with pytest.raises(ConfigError, match=said):
        api.run(**arguments)
    assert not (tmp_path / "r").exists()


def test_seeds_and_names_may_come_from_anywhere():
    engine = api._engine(FOUND, None, {"ncm"}, (seed for seed in np.array([2])))
    assert [c.name for c in engine.chosen] == ["NCM/alpha=1/2", "NCM/beta=1/2"]


def test_a_tilde_is_the_home_as_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert api._engine(FOUND, "~/r", (), ()).results.folder == tmp_path / "r"
    with pytest.raises(ConfigError, match=f"there is no experiment {tmp_path}/x.toml"):
        api.load("~/x.toml")


def test_a_second_call_on_a_folder_is_refused(tmp_path):
    with DirectoryLock.acquire(tmp_path, "experiment"), pytest.raises(Locked, match="in use by"):
        api.run(FOUND, results=tmp_path, progress=False)


def test_what_is_wrong_is_said_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"title is missing.*partitions is missing"):
        api.run({"data": {"name": "digits", "classes": 10, "tasks": 5}}, results=tmp_path / "r")
    with pytest.raises(ConfigError, match="jobs is 0"):
        api.run(FOUND, results=tmp_path / "r", jobs=0)
    with pytest.raises(ConfigError, match="there is no cell 'PILoRA'"):
        api.run(FOUND, results=tmp_path / "r", only="PILoRA")
    with pytest.raises(ConfigError, match="needs the data set 'toys'"):
        api.run(FOUND, results=tmp_path / "s", progress=False)
    assert not (tmp_path / "r").exists()


def test_without_pandas_the_extra_is_named_before_anything_runs(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pandas" else real(name, *a)
    )
    for call in (api.run, api.load):
        with pytest.raises(UsageError) as caught:
            call(FOUND, results=tmp_path / "r")
        assert "fcil[lab]" in caught.value.action
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Two methods, on digits!", "two-methods-on-digits"),
        ("***", "experiment"),
        ("A" * 99, "a" * 64),
    ],
)
def test_a_mapping_gets_the_folder_of_its_title(tmp_path, monkeypatch, title, name):
    monkeypatch.chdir(tmp_path)
    fields = FOUND.model_dump(exclude={"name"}) | {"title": title}
    engine = api._engine(fields, None, (), ())
    assert engine.results.folder == tmp_path / RESULTS / name


# --- a federation's run ---------------------------------------------------------------------


@pytest.fixture
def federation(tmp_path):
    with sample_run.build(tmp_path / "ledger.sqlite") as ledger:
        data = collect(ledger, sample_run.RUN)
        flows = ledger.bytes.records(sample_run.RUN)
    return tmp_path, data, flows


def test_a_runs_tables_hold_what_its_files_hold(federation):
    place, data, flows = federation
    run = api.open_run(place)
    assert run.id == sample_run.RUN
    assert repr(run) == f"<Run {sample_run.RUN}: pilora, done>"
    assert run.summary == run_directory.summary(data)["data"]
    written = list(csv.DictReader(io.StringIO(run_directory.bytes_csv(flows))))
    table = run.bytes
    assert len(table) == len(written) > 10
    assert list(table.columns) == list(written[0])
    assert table["wire"].sum() == sum(int(line["wire"]) for line in written)
    assert set(table["direction"]) == {"up", "down"}
    lines = [view.line() for view in data.rounds]
    rounds = run.rounds
    assert rounds["counted"].to_list() == [len(line["counted"]) for line in lines]
    assert rounds["up_true_wire"].to_list() == [line["bytes"]["up"]["true_wire"] for line in lines]
    assert rounds["closed_at"].map(pd.Timestamp.timestamp).to_list() == pytest.approx(
        [line["closed_at"] for line in lines]
    )
    assert str(rounds["opened_at"].dt.tz) == "UTC"
    matrix = run.accuracy
    assert matrix.shape == (3, 3)
    assert (matrix.index.name, matrix.columns.name) == ("after_task", "task")
    assert pd.isna(matrix.loc[0, 1])
    assert matrix.loc[1, 0] == data.metrics.matrix[1][0]


def test_a_run_is_found_by_its_directory_or_the_beginning_of_its_id(federation, monkeypatch):
    place, *_ = federation
    directory = place / "runs" / sample_run.RUN
    directory.mkdir(parents=True)
    assert api.open_run(directory).id == sample_run.RUN
    assert api.open_run(place, sample_run.RUN[:9]).id == sample_run.RUN
    monkeypatch.chdir(directory)
    assert api.open_run(".").id == sample_run.RUN
    with pytest.raises(ConfigError, match="place is None; expected a path"):
        api.open_run(None)
    with pytest.raises(UsageError, match="no run's id begins with 'x'"):
        api.open_run(place, "x")
    with pytest.raises(UsageError, match="neither a federation's directory nor one of its runs"):
        api.open_run(place / "elsewhere" / "a" / "b")


def test_a_run_without_a_round_has_empty_tables_of_the_same_kinds(tmp_path):
    with Ledger(tmp_path / LEDGER_NAME) as ledger:
        sample_run.add_run(ledger)
        run = api.open_run(tmp_path)  # its writer still has it open
    assert (len(run.rounds), len(run.bytes), run.accuracy.shape) == (0, 0, (0, 0))
    assert run.rounds[["up_true_wire", "down_true_wire"]].sum().to_list() == [0.0, 0.0]
    assert str(run.rounds["closed_at"].dt.tz) == "UTC"


# --- through processes ----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.full
def test_the_example_of_the_docs_runs_and_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(example("study = "), "docs/python.md", "exec"), scope)
    result = scope["result"]
    said = capfd.readouterr()
    assert "FedNCM" in said.out
    assert "2 cells to run" in said.err
    assert result.missing == []
    assert result.failed == {}
    assert (result.table() > 50).all(axis=None)  # chance is 10
    assert (result.table("forgetting") >= 0).all(axis=None)
    assert result.folder == tmp_path / "results" / "two-methods-on-digits"
    lines = list(csv.DictReader((result.folder / "cells.csv").read_text().splitlines()))
    assert [float(line["faa"]) for line in lines] == result.cells["faa"].to_list()
    files = [json.loads(p.read_bytes()) for p in (result.folder / "cells").glob("*.json")]
    assert sorted(f["faa"] for f in files) == sorted(result.cells["faa"])
    assert (result.cells["run_up_wire"] > result.cells["up_tensor"]).all()
    again = api.run(scope["study"], progress=False)
    assert capfd.readouterr().err == ""
    pd.testing.assert_frame_equal(again.cells, result.cells)

    # A longer study, of which only what is new runs; and here it may not take any time.
    more = {**scope["study"], "budget": {"cell_s": 15, "limit_s": 0.001}}
    more["rows"] = [*more["rows"], {"title": "Again", "method": "fedncm", "clients": 2}]
    with pytest.warns(
        api.FailedCells, match="1 of 3 cells failed:\nAgain/alpha=1/1: it took longer"
    ):
        third = api.run(more, progress=False)
    assert list(third.failed) == third.missing == ["Again/alpha=1/1"]
    pd.testing.assert_frame_equal(third.cells, result.cells)
