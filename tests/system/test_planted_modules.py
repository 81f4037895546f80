"""Modules that lie where one stands, and beside the images, are run by no process of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from event_files import events
from fcil_server.lab.local.federation import LocalFederation
from planted import plant
from system.kit import open_ledger, settings, write_client
from system.test_metrics import get

pytestmark = [pytest.mark.processes, pytest.mark.full]

BIN = Path(sys.executable).parent


@pytest.fixture
def standing(tmp_path, monkeypatch):
    """Stand in a data set that brings modules, in its own folder and in a class folder."""
    marks, data = tmp_path / "marks", write_client(tmp_path / "a", range(4))
    plant(data / "0", marks)
    monkeypatch.chdir(plant(data, marks))
    yield data
    assert os.listdir(marks) == []


def by_hand(federation, program, *words):
    """Run a command as users do; its exit code is the test's business alone."""
    command = [BIN / program, *words]
    return subprocess.run(
        command, env=federation.environment(), capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip


def test_server_page_figures_sink_and_clients(tmp_path, standing):
    other = write_client(tmp_path / "b", range(4), offset=12)
    plant(other, tmp_path / "marks")
    with LocalFederation(tmp_path / "f") as federation:
        sites = ("--page", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        sink = f"sinks.tensorboard.log_dir={tmp_path / 'curves'}"
        federation.serve(*sites, *settings(run__plots=True), "-c", sink)
        place = federation.status()["federation"]
        assert get(f"{place['page']['address']}/healthz")[0] == 200
        assert get(place["metrics"]["address"])[0] == 200
        with federation.log("a").open("wb") as log:
            federation.clients["a"] = subprocess.Popen(
                [BIN / "fcil-client", "join", "--data", "."],
                env=federation.environment(),
                stdout=log,
                stderr=log,
            )
        federation.join("b", other)
        federation.until("run_done")
        assert by_hand(federation, "fcil-client", "doctor", "--data", ".", "--json").stdout
        status = by_hand(federation, "fcil-server", "status", "--dir", str(federation.federation))
        assert status.returncode == 0, status.stderr
        federation.stop()
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest().run_id
    assert events(tmp_path / "curves" / run)
    assert list((federation.federation / "runs" / run).rglob("*.png"))


def test_a_training_worker_and_the_lab(tmp_path, standing):
    """Torch, its optimiser and its compiler's helpers, and a process that dies with its parent."""
    with LocalFederation(tmp_path / "f") as federation:
        given = settings(
            method__name="fedavg_lora", run__backbone="embedded", round__min_clients=1,
            method__epochs=1,
        )  # fmt: skip
        federation.serve("--until-done", *given)
        federation.join("a", standing)
        assert federation.server.wait(250) == 0, federation.last_words("server")
    words = ("split", "--data", ".", "--out", str(tmp_path / "p.json"), "--partition", "iid")
    done = by_hand(federation, "fcil-client", *words, "--clients", "2", "--tasks", "2")
    assert done.returncode == 0, done.stderr
