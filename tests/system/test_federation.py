"""Real processes over real sockets: whole runs, killed clients, restarts."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from adapters.kit import needs_peft
from fcil_adapters.export.exported_model import ExportedModel
from fcil_adapters.export.peft_adapter import WEIGHTS
from fcil_protocol.payloads.payload import unpack
from fcil_protocol.process import control_socket
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, RunStatus, UpdateStatus
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def summary_of(federation):
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
    return json.loads((federation.federation / "runs" / run.run_id / "summary.json").read_text())


def test_a_run_of_two_tasks_ends_with_all_its_results(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(run__plots=True))
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    data = summary_of(federation)["data"]
    assert data["run_status"] == "done"
    assert len(data["accuracy_matrix"]) == 2
    # Nearest class mean on grey thumbnails tells four digits apart far above chance.
    assert data["faa"] > 60
    run = federation.federation / "runs" / data["run"]
    for name in (
        "rounds.jsonl", "bytes.csv", "accuracy_matrix.csv", "report.html", "environment.json",
        "final.safetensors", "accuracy.png", "accuracy_matrix.png", "bytes_per_round.png",
    ):  # fmt: skip
        assert (run / name).stat().st_size > 0, name
    with open_ledger(federation) as ledger:
        for row in ledger.rounds.all(data["run"]):
            assert row.outcome is Outcome.DONE
            assert len(ledger.updates.of_round(row.key)) == 2
            assert {u.status for u in ledger.updates.of_round(row.key)} == {UpdateStatus.COUNTED}


@pytest.mark.full
def test_the_model_of_a_run_is_exported(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    export_it(federation, tmp_path / "model.onnx", images=tmp_path / "a")


def export_it(federation, file, images):
    """The model of the run as one file, that knows all classes by name."""
    command = [sys.executable, "-m", "fcil_server", "export", "--dir", federation.federation]
    subprocess.run([*command, "--onnx", file, "--calibrate", images], check=True)
    info = ExportedModel.load(file, "cpu", 1).info
    assert info.names == ("0", "1", "2", "3")
    assert info.checked.images > 4  # beside the probe images
    assert info.checked.agreement == 1


ADAPTED = {
    "method__name": "fedavg_lora",
    "method__rank": 2,
    "method__blocks": [0],
    "tasks__classes": [["0", "1"]],
}


@pytest.mark.full
def test_the_best_round_is_kept_and_leaves_for_timm(tmp_path):
    """With one newest state kept; a client's folder has the weights of the server's last state."""
    tested = write_client(tmp_path / "tested", range(2), per_class=8, offset=40)
    options = {
        **ADAPTED, "run__central_test": str(tested), "run__central_test_every": 1,
        "round__rounds_per_task": 3, "storage__keep_states": 1, "method__epochs": 1,
        "method__augment": "none",
    }  # fmt: skip
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(**options))
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        assert federation.server.wait(240) == 0, federation.last_words("server")
        command = [sys.executable, "-m", "fcil_server", "export", "--dir", federation.federation]
        for name in ("best", "last"):
            subprocess.run([*command, "--timm", tmp_path / name, "--state", name], check=True)
        of_client = [sys.executable, "-m", "fcil_client", "export", "--data", tmp_path / "a"]
        env = federation.environment()
        subprocess.run([*of_client, "--timm", tmp_path / "mine"], check=True, env=env)
    about = {
        n: json.loads((tmp_path / n / "fcil.json").read_text()) for n in ("best", "last", "mine")
    }
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        tests = {
            r.new_state: r.metrics["test_correct"] / r.metrics["test_total"]
            for r in ledger.rounds.all(run.run_id)
            if "test_total" in r.metrics
        }
    assert len(tests) == 3
    best = max(tests, key=lambda state: (tests[state], state))
    assert (about["best"]["state"], about["last"]["state"]) == (best, max(tests))
    assert set(states_of(federation, run).numbers()) == {best, max(tests)}
    learned = about["best"]["learned"]
    assert learned["accuracy"] == pytest.approx(100 * tests[best])
    assert (learned["clients"], learned["tested"], learned["tester"]) == (2, 16, "server")
    assert learned["up_bytes"] > 0
    assert about["mine"]["weights_sha256"] == about["last"]["weights_sha256"]
    assert about["mine"]["learned"] is None


@needs_peft
@pytest.mark.full
def test_a_run_begins_with_the_adapter_of_another_even_after_a_restart(tmp_path):
    """The adapter is gone by then: the run has what it read."""
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(**ADAPTED))
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        assert federation.server.wait(240) == 0, federation.last_words("server")
        command = [sys.executable, "-m", "fcil_server", "export", "--dir", federation.federation]
        subprocess.run([*command, "--peft", tmp_path / "adapter"], check=True)
        of_client = [sys.executable, "-m", "fcil_client", "export", "--data", tmp_path / "a"]
        env = federation.environment()
        subprocess.run([*of_client, "--peft", tmp_path / "mine"], check=True, env=env)
        weights = [(tmp_path / n / WEIGHTS).read_bytes() for n in ("adapter", "mine")]
        assert weights[0] == weights[1]
        options = settings(**ADAPTED, run__init_from=str(tmp_path / "adapter"), method__epochs=1)
        federation.serve("--until-done", "--new-run", *options)
        federation.until("task_opened")
        federation.kill_server()
        (tmp_path / "adapter").rename(tmp_path / "elsewhere")
        federation.serve("--until-done", *options)
        assert federation.server.wait(240) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        old, new = ledger.runs.all()
        assert new.environment["start"]["places"] == ["0.fc1", "0.fc2", "0.q", "0.v"]
        last = ledger.states.newest(old.run_id).state
    first = unpack(states_of(federation, new).path(0).read_bytes())
    learned = unpack(states_of(federation, old).path(last).read_bytes())
    for name in learned.tensors:
        if name.startswith("lora."):
            np.testing.assert_array_equal(first.f32(name), learned.f32(name))
    report = (federation.federation / "runs" / new.run_id / "report.html").read_text()
    assert "the LoRA begins as that of" in report


def states_of(federation, row):
    return StateStore(states_folder(federation.federation, row.run_id))


@pytest.mark.full
def test_a_client_killed_in_the_middle_is_done_without_and_can_come_back(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(round__quorum=2, round__min_clients=3))
        folders = {
            n: write_client(tmp_path / n, range(4), offset=12 * i) for i, n in enumerate("abc")
        }
        for name, folder in folders.items():
            federation.join(name, folder)
        federation.until("task_done", text="task 0")
        federation.kill_client("c")
        federation.until("left", text=":c")
        federation.join("c", folders["c"])  # the next round waits for three again
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        assert len(ledger.clients.all()) == 3  # the same client came back, not a fourth


def test_a_server_killed_in_a_round_goes_on_with_it(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], round__rounds_per_task=3)
        federation.serve("--until-done", *arguments)
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        federation.until("update")
        federation.kill_server()
        federation.serve("--until-done", *arguments)
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert len(ledger.runs.all()) == 1
        rounds = ledger.rounds.all(run.run_id)
        assert [r.kind for r in rounds] == ["train"] * 3 + ["evaluate"]
        for row in rounds:
            updates = ledger.updates.of_round(row.key)
            assert len({u.client for u in updates}) == len(updates) == 2


@pytest.mark.full
def test_everybody_who_is_here_is_asked_not_only_the_first(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())  # min_clients is 2
        for k, name in enumerate("abcd"):
            federation.join(name, write_client(tmp_path / name, range(4), offset=12 * k))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        last = ledger.rounds.all(ledger.runs.newest().run_id)[-1]
        assert len(last.asked) == 4


@pytest.mark.full
def test_a_second_run_with_another_method_takes_its_clients_along(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(tasks__classes=[["0", "1"]]))
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
        options = settings(tasks__classes=[["0", "1"]], method__side=4)
        federation.serve("--until-done", "--new-run", *options)
        assert federation.server.wait(120) == 0, federation.last_words("server")
        federation.check_clients()  # the daemons are still those of the first run
    with open_ledger(federation) as ledger:
        assert [r.status for r in ledger.runs.all()] == [RunStatus.DONE, RunStatus.DONE]


@pytest.mark.full
def test_status_and_rounds_tell_the_truth_while_it_runs_and_after(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.until("task_opened")
        before = _command(federation, "fcil_server", "status", "--json")
        while before["now"]["phase"] == "publishing":  # the round is about to begin
            before = _command(federation, "fcil_server", "status", "--json")
        assert before["running"] is True
        assert before["now"]["phase"] == "gathering"
        assert "2 more clients" in before["now"]["waiting_for"]
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        federation.until("run_done")
        during = _command(federation, "fcil_server", "status", "--json")
        assert [c["state"] for c in during["clients"]] == ["ready", "ready"]
        mine = _command(federation, "fcil_client", "status", "--json", directory=False)
        assert {c["link"] for c in mine["clients"]} == {"ready"}
    after = _command(federation, "fcil_server", "status", "--json")
    assert after["running"] is False
    assert after["run"]["status"] == "done"
    rounds = _command(federation, "fcil_server", "rounds", "--json")["rounds"]
    assert [r["kind"] for r in rounds] == ["train", "evaluate"] * 2
    assert all(r["wire_up"] > 0 and r["wire_down"] > 0 for r in rounds)


def _command(federation, module, *arguments, directory=True):
    where = ["--dir", str(federation.federation)] if directory else []
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments, *where],
        env=federation.environment(),
        capture_output=True,
        check=True,
    )
    envelope = json.loads(done.stdout)
    assert envelope["status"] == "ok"
    return envelope["data"]


@pytest.mark.full
def test_ctrl_c_on_either_side_ends_cleanly(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")
        client = federation.clients.pop("a")
        os.kill(client.pid, signal.SIGINT)
        assert client.wait(120) == 0, federation.last_words("a")
        federation.until("left")
        os.kill(federation.server.pid, signal.SIGINT)
        assert federation.server.wait(120) == 0, federation.last_words("server")
    assert "Traceback" not in federation.log("server").read_text()
    assert "Traceback" not in federation.log("a").read_text()


@pytest.mark.full
def test_discovered_classes_open_tasks_by_themselves(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__schedule="discovered", tasks__classes=[], tasks__settle_s=0.2)
        federation.serve(*arguments)
        a = write_client(tmp_path / "a", [0, 1])
        federation.join("a", a)
        federation.join("b", write_client(tmp_path / "b", [0, 1], offset=12))
        federation.until("task_done", text="task 0")
        write_client(a, [7])  # a new folder on a running client
        federation.until("task_opened", text="7")
        federation.until("task_done", text="task 1")
        status = control_socket.ask(federation.federation, "status")
        assert {c["name"]: c["task"] for c in status["classes"]} == {"0": 0, "1": 0, "7": 1}


@pytest.mark.full
def test_classes_of_a_client_that_left_again_do_not_hold_up_the_others(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__schedule="discovered", tasks__classes=[], tasks__settle_s=1.0)
        federation.serve(*arguments)
        federation.join("a", write_client(tmp_path / "a", [0]))
        federation.join("b", write_client(tmp_path / "b", [0], offset=12))
        federation.until("task_done", text="task 0")
        federation.join("c", write_client(tmp_path / "c", [5]))
        federation.until("announced", text=":c")
        federation.kill_client("c")
        write_client(tmp_path / "a", [6])
        federation.until("task_done", text="task 1")
        status = control_socket.ask(federation.federation, "status")
        tasks = {c["name"]: c["task"] for c in status["classes"]}
        assert tasks == {"0": 0, "6": 1, "5": None}


@pytest.mark.full
def test_where_nobody_has_a_test_image_the_evaluation_is_skipped(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(tasks__classes=[["0", "1"]]))
        federation.join("a", write_client(tmp_path / "a", [0, 1], per_class=1))
        federation.join("b", write_client(tmp_path / "b", [0, 1], per_class=1, offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        rounds = ledger.rounds.all(ledger.runs.newest().run_id)
    assert [(r.kind, r.outcome) for r in rounds] in (
        [("train", Outcome.DONE), ("evaluate", Outcome.SKIPPED)],
        [("train", Outcome.DONE), ("evaluate", Outcome.DONE)],  # the hash gave one to test
    )


@pytest.mark.full
def test_an_operator_can_close_a_round_that_nobody_can_answer(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["zebra"]], round__min_clients=1, run__evaluate=False)
        federation.serve("--until-done", *arguments)
        federation.join("a", write_client(tmp_path / "a", [0]))
        federation.until("announced")
        control_socket.ask(federation.federation, "close_round")
        assert federation.server.wait(60) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        [row] = ledger.rounds.all(ledger.runs.newest().run_id)
        assert row.outcome is Outcome.SKIPPED
