"""Experiments through real processes: killed in the middle, they go on and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]

ROOT = Path(__file__).resolve().parents[3]
TOY = """
title = "Two cells"
data = { name = "digits", classes = 10, tasks = 1, order = "natural", train_per_class = 3, test_per_class = 3 }
setting = { seeds = [1], clients = 2, rounds_per_task = 1 }
budget = { cell_s = 5 }
partitions = [{ name = "alpha=5", kind = "quantity", alpha = 5 }]
rows = [{ title = "A", method = "%s" }, { title = "B", method = "%s", clients = 3 }]
"""
NUMBERS = ("faa", "aia", "forgetting", "matrix", "train_images", "rounds")


def written(path: Path) -> dict[str, object]:
    """Return a cell's file."""
    return json.loads(path.read_bytes())


@pytest.fixture
def reproduce() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start runners; none outlives its test."""
    started = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fcil_server.lab", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def until(process: subprocess.Popen[str], seen: Callable[[], bool], timeout_s: float = 200) -> None:
    """Wait until something is there, while the process lives."""
    ends = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < ends
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        assert seen(), process.communicate()[0]


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def kill_in_second_cell(process: subprocess.Popen[str], results: Path) -> str:
    """Kill -9 the runner once a second cell's server and swarm run; return the first's file."""
    until(process, lambda: len(list((results / "cells").glob("*.json"))) == 1)
    (first,) = (results / "cells").glob("*.json")

    def second_runs() -> bool:
        rooms = [p for p in (results / "work").iterdir() if p.name != first.stem]
        return any((room / "logs" / "swarm.log").exists() for room in rooms)

    until(process, second_runs)
    orphans = family(process)
    assert len(orphans) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(orphans, timeout=30)
    assert alive == []
    return first.name


@pytest.mark.full
def test_killed_in_a_cell_it_leaves_no_process_and_goes_on_with_that_cell(
    tmp_path, reproduce
) -> None:
    toml, results = tmp_path / "toy.toml", tmp_path / "results"
    toml.write_text(TOY % ("running_mean", "running_mean"))
    first = kill_in_second_cell(reproduce(toml, "--results", results), results)
    kept = (results / "cells" / first).stat().st_mtime_ns
    said = finished(reproduce(toml, "--results", results))
    assert "1 cells to run (1 of 2 are there already)" in said
    files = {p.name: written(p) for p in (results / "cells").glob("*.json")}
    assert len(files) == 2
    assert (results / "cells" / first).stat().st_mtime_ns == kept
    for content in files.values():
        assert content["faa"] > 50  # chance is 10
        assert content["rounds"]["not_done"] == 0
        assert content["bytes"]["up"]["true_wire"] > content["bytes"]["up"]["tensor"] > 0
    assert {c["rounds"]["updates"] for c in files.values()} == {2, 3}
    assert list((results / "work").iterdir()) == []
    assert f"| A | {files[first]['faa']:.1f} |" in (results / "report.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_was_interrupted_ends_with_the_numbers_of_an_undisturbed_run(
    tmp_path, reproduce
) -> None:
    toml, results, calm = tmp_path / "toy.toml", tmp_path / "results", tmp_path / "calm"
    toml.write_text(TOY % ("fedncm", "analytic"))
    kill_in_second_cell(reproduce(toml, "--results", results), results)
    finished(reproduce(toml, "--results", results, "--jobs", "2"))
    finished(reproduce(toml, "--results", calm))
    names = sorted(p.name for p in (calm / "cells").glob("*.json"))
    assert len(names) == 2
    assert names == sorted(p.name for p in (results / "cells").glob("*.json"))
    for name in names:
        one, other = (written(folder / "cells" / name) for folder in (results, calm))
        assert {k: one[k] for k in NUMBERS} == {k: other[k] for k in NUMBERS}
        for way in ("up", "down"):
            assert one["bytes"][way]["tensor"] == other["bytes"][way]["tensor"]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_cells_compute_a_feature_once_and_give_the_same_results(tmp_path, reproduce) -> None:
    """The second cell has other clients and another method, and all images of the first."""
    toml, bare = tmp_path / "toy.toml", tmp_path / "bare.toml"
    toml.write_text(TOY % ("fedncm", "analytic"))
    bare.write_text(toml.read_text().replace("cell_s = 5", "cell_s = 5, feature_cache_mb = 0"))
    said = finished(reproduce(toml, "--results", tmp_path / "shared"))
    assert "frozen features of 2 cells: 60 read from the cache, 60 computed" in said
    finished(reproduce(bare, "--results", tmp_path / "apart"))
    found = [
        {c["cell"]: c for c in map(written, (tmp_path / place / "cells").glob("*.json"))}
        for place in ("shared", "apart")
    ]
    assert [found[0][n]["features"]["computed"] for n in ("A/alpha=5/1", "B/alpha=5/1")] == [60, 0]
    assert all("features" not in content for content in found[1].values())
    for name, content in found[0].items():
        other = found[1][name]
        assert {k: content[k] for k in NUMBERS} == {k: other[k] for k in NUMBERS}
        assert content["key"] == other["key"]
    assert not (tmp_path / "apart" / "work" / "features").exists()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_smallest_experiment_gives_a_whole_report(tmp_path, reproduce) -> None:
    toml = ROOT / "experiments" / "digits.toml"
    finished(reproduce(toml, "--results", tmp_path, "--jobs", "2"))
    text = (tmp_path / "report.md").read_text()
    assert "Not complete" not in text
    assert "| holds | Ridge regression on all images at once is above PILoRA of one epoch |" in text
    for content in map(written, (tmp_path / "cells").glob("*.json")):
        assert content["faa"] > 50
        assert content["rounds"]["not_done"] == content["rounds"]["excluded"] == 0
