"""Clients' predict follows the state that the operator promotes, and goes back; real processes."""

import json
import subprocess
import sys

import pytest

from fcil_client.state.current_model import read_record
from fcil_client.state.home import Home, data_digest
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, until_log, write_client
from system.test_rounds import command

pytestmark = pytest.mark.processes

KEPT = "the operator promoted it"


def model_of(federation, name):
    (found,) = (federation.directory / "state").rglob(data_digest(federation.directory / name))
    record = read_record(Home(found))
    return record.state, record.promoted, record.progress_text


def join(federation, name):
    folder = federation.directory / name
    if not folder.exists():
        write_client(folder, range(4), offset=12 * "abc".index(name))
    federation.join(name, folder, "--threads", "1", "--engine", "onnx")


def states(federation):
    with open_ledger(federation) as ledger:
        return {row.task: row.state for row in ledger.states.all(ledger.runs.newest().run_id)}


def predicted(federation, name):
    folder = federation.directory / name
    done = subprocess.run(
        [sys.executable, "-m", "fcil_client", "predict", str(folder / "0"), "--data", str(folder),
         "--no-calibrate", "--json"],
        env=federation.environment(), capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)["data"]["model"]


@pytest.mark.full
def test_predict_follows_a_promoted_state_over_rounds_kills_and_back(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(method__name="fedncm"))
        for name in "ab":
            join(federation, name)
        federation.until("task_done")  # the next task begins meanwhile
        told = command(federation, "run", "promote", str(states(federation)[0]))
        assert told["promoted"] is True
        for name in "ab":
            until_log(federation, name, KEPT)
        federation.until("run_done")
        newest = states(federation)
        assert newest[0] < newest[1]
        for name in "ab":
            assert model_of(federation, name) == (newest[0], True, "after task 0")
        assert predicted(federation, "a")["when"] == "after task 0"
        assert federation.status()["run"]["promoted"] == newest[0]

        federation.kill_client("a")
        told = command(federation, "run", "promote", "last")
        assert (told["promoted"], told["state"], told["clients"]) == (False, newest[1], 1)
        until_log(federation, "b", "newer ones replace it")
        assert model_of(federation, "b") == (newest[1], False, "after task 1")
        assert model_of(federation, "a") == (newest[0], True, "after task 0")
        join(federation, "a")  # no round comes any more: the server offers the newest
        until_log(federation, "a", "newer ones replace it")
        assert model_of(federation, "a") == (newest[1], False, "after task 1")
        federation.kill_client("a")

        federation.kill_server()
        told = command(federation, "run", "promote", "best")
        assert told == {
            "run": told["run"], "state": newest[1], "task": 1, "promoted": True, "clients": None,
        }  # fmt: skip
        run = told["run"]
        join(federation, "a")
        federation.serve(*settings(method__name="fedncm"))
        for name in "ab":
            until_log(federation, name, f"model after task 1 of run {run}: {KEPT}")
            assert model_of(federation, name) == (newest[1], True, "after task 1")
        with open_ledger(federation) as ledger:
            acts = [row.detail for row in ledger.audit.newest() if row.action == "promote"]
        assert acts == [
            f"state {newest[0]} of {run}", f"the newest state of {run}", f"state {newest[1]} of {run}",
        ]  # fmt: skip


@pytest.mark.full
def test_who_was_away_when_a_promotion_ended_gets_the_newest_of_the_runs_end(tmp_path):
    for number, name in enumerate("abc"):
        write_client(tmp_path / name, (0, 1), offset=12 * number)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(method__name="fedncm"))
        for name in "abc":
            join(federation, name)
        federation.until("task_done")  # nobody has images of the second task
        command(federation, "run", "promote", "best")
        until_log(federation, "c", KEPT)
        federation.kill_client("c")
        command(federation, "run", "promote", "last")
        for number, name in enumerate("ab"):
            write_client(tmp_path / name, (2, 3), offset=12 * number)
        federation.until("run_done")
        join(federation, "c")
        until_log(federation, "c", "newer ones replace it")
        newest = (states(federation)[1], False, "after task 1")
        assert [model_of(federation, name) for name in "abc"] == [newest] * 3
