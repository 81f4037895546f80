"""A learning curve: the loss of real training falls, and a client that keeps its own keeps it."""

import json

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.reports.results.run_data import collect
from system.kit import command, member, open_ledger, settings, write_client

pytestmark = pytest.mark.processes

LORA = {
    "method__name": "fedavg_lora",
    "method__epochs": 4,
    "method__augment": "none",
    "run__backbone": "embedded",
    "run__evaluate": False,
    "round__rounds_per_task": 3,
    "tasks__classes": [["0", "1", "2"]],
}


@pytest.mark.full
def test_the_loss_falls_and_who_keeps_it_keeps_it(tmp_path):
    folders = {
        name: write_client(tmp_path / name, range(3), per_class=16, offset=16 * i)
        for i, name in enumerate("ab")
    }
    with LocalFederation(tmp_path) as federation:
        tested = write_client(tmp_path / "tested", range(3), per_class=8, offset=40)
        every = {"run__central_test": str(tested), "run__central_test_every": 2}
        federation.serve("--until-done", *settings(**LORA, **every))
        federation.join("a", folders["a"], "--threads", "1")
        federation.join("b", folders["b"], "--threads", "1", "--no-training-metrics")
        assert federation.server.wait(150) == 0, federation.last_words("server")
        rounds = command(federation, "rounds", "--json")["rounds"]
        status = command(federation, "status", "--json")
        own = member(federation, folders["a"])

    losses = [row["train_loss"] for row in rounds]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert all(0 <= row["train_accuracy"] <= 1 for row in rounds)
    assert [row["test_accuracy"] is not None for row in rounds] == [False, True, False]
    assert status["run"]["training"]["loss"] == losses[-1]
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
        names = {row.client_id: row.name for row in ledger.clients.all()}
        for view in data.rounds:
            assert len(view.counted) == 2
            assert [names[client] for client in view.trained] == [own]
    run = federation.federation / "runs" / data.run.run_id
    page = (run / "report.html").read_text()
    assert "Training loss per round" in page
    assert "on the server&#39;s test images" in page
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    told = [line.get("data", line)["training"]["loss"] for line in lines if "training" in line]
    assert told == losses
