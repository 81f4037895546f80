"""A real run's figures in TensorBoard and MLflow, through kills of the server and of the sink."""

import csv
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from event_files import events
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def learn(federation, tmp_path, *sinks, between=lambda _: None):
    """Run two tasks of two clients to their end; ``between`` happens in the middle."""
    serving = ["--until-done", *settings(round__rounds_per_task=2), *sinks]
    federation.serve(*serving)
    for k, name in enumerate("ab"):
        federation.join(name, write_client(tmp_path / name, range(4), offset=12 * k))
    federation.until("update")
    between(serving)
    assert federation.server.wait(120) == 0, federation.last_words("server")


def followers(federation):
    """Return the processes of the server's sinks."""
    found = psutil.Process(federation.server.pid).children()
    return [p for p in found if "fcil_server.reports.sinks.follower" in p.cmdline()]


@pytest.mark.full
def test_killed_servers_and_sinks_leave_whole_curves(tmp_path):
    with LocalFederation(tmp_path) as federation:

        def trouble(serving):
            (sink,) = followers(federation)
            os.kill(sink.pid, signal.SIGKILL)
            federation.until("sink", text="ended with code -9")
            federation.kill_server()
            federation.serve(*serving)

        sink = f"sinks.tensorboard.log_dir={tmp_path / 'curves'}"
        learn(federation, tmp_path, "-c", sink, between=trouble)
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest()
            rounds = {row.seq: row.closed_at for row in ledger.rounds.all(run.run_id)}
    found = events(tmp_path / "curves" / run.run_id)
    asked = {step: at for (tag, step), (_, at) in found.items() if tag == "round/asked"}
    assert asked == rounds
    assert len(rounds) == 6
    so_far = [found["bytes/up_so_far", step][0] for step in sorted(rounds)]
    assert so_far == sorted(so_far)
    assert so_far[-1] > 0
    matrix = federation.federation / "runs" / run.run_id / "accuracy_matrix.csv"
    for line in csv.DictReader(matrix.read_text().splitlines()):
        value, _ = found["clients/accuracy", int(line["after_task"])]
        assert value == pytest.approx(float(line["task_mean"]), abs=1e-3)
    assert "sinks" not in run.config.replace("[sinks]", ""), "they are the server's, not the run's"


@pytest.mark.full
def test_mlflow_has_one_run_with_all_metrics_and_reports(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = f"file://{tmp_path / 'tracker'}"
    with LocalFederation(tmp_path) as federation:

        def trouble(serving):
            federation.kill_server()
            federation.serve(*serving)

        sink = f"sinks.mlflow={{tracking_uri={json.dumps(where)}, files=true}}"
        learn(federation, tmp_path, "-c", sink, between=trouble)
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest()
        assert "sink" not in federation.log("server").read_text()
    client = mlflow.MlflowClient(where)
    (found,) = client.search_runs([client.get_experiment_by_name("fcil").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.tags["fcil.run"] == run.run_id
    assert found.data.params["method.name"] == "running_mean"
    history = client.get_metric_history(found.info.run_id, "round/counted")
    assert {(m.step, m.value) for m in history} == {(step, 2.0) for step in range(6)}
    names = {Path(item.path).name for item in client.list_artifacts(found.info.run_id)}
    assert "report.html" in names
