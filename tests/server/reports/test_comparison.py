"""Runs side by side: read from federations or run directories, one page, one table."""

import csv
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

import sample_run
from fcil_protocol.errors import UsageError
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.reports import comparison
from sample_run import RUN


@pytest.fixture(scope="module")
def federations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tuple(tmp_path_factory.mktemp(name) for name in ("one", "two"))
    for place in made:
        sample_run.build(place / LEDGER_NAME).close()
        (place / "runs" / RUN).mkdir(parents=True)
    return made


def test_a_federation_stands_for_its_newest_run_and_a_run_directory_for_itself(
    federations: tuple[Path, Path],
) -> None:
    one, two = federations
    runs = comparison.read([one, two / "runs" / RUN])
    assert [data.run.run_id for _, data in runs] == [RUN, RUN]


def test_runs_of_one_method_are_told_apart_by_their_ids(federations: tuple[Path, Path]) -> None:
    (name, data), _ = comparison.read(federations)
    assert name == f"{data.run.method} {RUN}"
    ((alone, _),) = comparison.read(federations[:1])
    assert alone == data.run.method


def test_page_table_and_plot_are_written_with_the_same_numbers(
    federations: tuple[Path, Path], tmp_path: Path
) -> None:
    runs = comparison.read(federations)
    paths = {p.name: p for p in comparison.write(runs, tmp_path)}
    assert set(paths) == {
        "comparison.html", "comparison.csv", "accuracy_over_bytes.png", "accuracy_over_bytes.svg",
    }  # fmt: skip
    page = paths["comparison.html"].read_text()
    lines = list(csv.DictReader(paths["comparison.csv"].read_text().splitlines()))
    data = runs[0][1]
    assert len(lines) == 2 * len(data.metrics.task_mean)
    assert float(lines[0]["accuracy"]) == pytest.approx(data.metrics.task_mean[0], abs=1e-4)
    assert lines[0]["wire_source"] == "kernel"
    assert page.count("<polyline") == 2
    for cell in comparison.rows(runs)[0]:
        assert cell in page
    assert "://" not in page  # it asks nobody for anything
    assert "default-src 'none'; style-src 'sha256-" in unescape(page)


def test_a_task_that_nobody_tested_leaves_the_numbers_of_the_others_alone(
    federations: tuple[Path, Path],
) -> None:
    ((name, data),) = comparison.read(federations[:1])
    untested = replace(data.metrics, task_mean=(None, *data.metrics.task_mean[1:]))
    text = comparison._csv([(name, replace(data, pooled=untested))])
    lines = csv.DictReader(text.splitlines())
    assert [line["after_task"] for line in lines] == ["1", "2"]


def test_what_is_no_federation_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is neither a federation's directory nor one of its"):
        comparison.read([tmp_path])
