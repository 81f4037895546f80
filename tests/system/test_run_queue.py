"""Runs begin one after the other while members stay; real processes."""

import json

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus
from system.kit import open_ledger, settings, write_client
from system.test_rounds import command

pytestmark = pytest.mark.processes


def write_toml(path, **sections):
    lines = []
    for section, keys in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def runs(federation):
    with open_ledger(federation) as ledger:
        return ledger.runs.all()


def warnings(federation, code):
    return [note for note in federation.status()["notes"] if note["code"] == code]


@pytest.mark.full
def test_a_submitted_run_begins_when_the_one_before_is_complete_and_clients_stay(tmp_path):
    one = write_toml(
        tmp_path / "one.toml",
        tasks={"schedule": "listed", "classes": [["3", "2"]]},
        method={"name": "running_mean"},
    )
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve(*settings())
        for name in "ab":
            federation.join(name, write_client(tmp_path / name, range(4)))
        federation.until("run_done")
        told = command(federation, "run", "submit", one, "-c", "run.seed=5", "--title", "reversed")
        assert told == {"number": 1, "title": "reversed", "before": 0, "begins": True}
        federation.until("run_begun")
        federation.until("run_done")
        federation.check_clients()
        status = federation.status()
        assert [c["state"] for c in status["clients"]] == ["ready", "ready"]
        assert status["queue"] == []
        assert warnings(federation, "config_kept") == []
        assert command(federation, "run", "queue") == {"queue": []}
    first, second = runs(federation)
    assert (first.status, second.status) == (RunStatus.DONE, RunStatus.DONE)
    assert (first.seed, second.seed) == (1993, 5)
    assert second.environment["submitted"]["title"] == "reversed"
    with open_ledger(federation) as ledger:
        assert [c.name for c in ledger.classes.all(second.run_id)] == ["3", "2"]
        assert {
            u.client for u in ledger.updates.of_round(ledger.rounds.all(second.run_id)[0].key)
        } == {c.client_id for c in ledger.clients.all()}


@pytest.mark.full
def test_a_queue_survives_kills_leaves_out_what_cannot_begin_and_ends_with_its_last_run(tmp_path):
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"0" * 100)
    gone = write_toml(
        tmp_path / "gone.toml",
        run={"backbone": "vit_tiny_patch16_224", "weights": "weights.safetensors"},
        method={"name": "fedncm"},
    )
    with LocalFederation(tmp_path / "f") as federation:
        arguments = settings()
        federation.serve("--until-done", *arguments)
        command(federation, "pause")
        for name in "ab":
            federation.join(name, write_client(tmp_path / name, range(4)))
            federation.until("announced", text=f":{name}")
        for n, title in enumerate(("two", "cancelled"), 1):
            told = command(
                federation, "run", "submit", "-c", "run.seed=2", "-c", "round.rounds_per_task=2",
                "--title", title,
            )  # fmt: skip
            assert (told["number"], told["before"], told["begins"]) == (n, n - 1, False)
        command(federation, "run", "submit", gone)
        command(federation, "run", "submit", "-c", "run.seed=4", "--title", "last")
        weights.unlink()
        command(federation, "run", "cancel", "2")
        command(federation, "resume")
        federation.until("next_run")
        federation.until("task_done", text="task 0")  # of the second run
        federation.kill_server()
        federation.serve("--until-done", *arguments)
        assert warnings(federation, "config_kept") == []
        assert federation.server.wait(300) == 0, federation.last_words("server")
    first, second, last = runs(federation)
    assert {r.status for r in (first, second, last)} == {RunStatus.DONE}
    assert [r.seed for r in (first, second, last)] == [1993, 2, 4]
    with open_ledger(federation) as ledger:
        counts = [
            sum(r.key.kind == "train" for r in ledger.rounds.all(run.run_id))
            for run in (first, second, last)
        ]
    assert counts == [2, 4, 2]
    (left,) = command(federation, "run", "queue")["queue"]
    assert (left["number"], left["title"]) == (3, "gone")
    assert "weights.safetensors" in left["refused"]
    titles = [r["title"] for r in command(federation, "run", "ls")["runs"]]
    assert titles == [None, "two", "last"]


@pytest.mark.full
def test_stopping_a_run_begins_the_next_and_a_stopped_server_takes_submissions(tmp_path):
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve(*settings(tasks__classes=[["0"], ["nobody"]]))
        for name in "ab":
            federation.join(name, write_client(tmp_path / name, range(2)))
        federation.until("no_holder")
        command(federation, "run", "submit", "-c", 'tasks.schedule="listed"', "-c",
                'tasks.classes=[["1"]]')  # fmt: skip
        assert command(federation, "run", "stop")["next"] is True
        federation.until("run_done")
        command(federation, "stop")
        assert federation.server.wait(60) == 0, federation.last_words("server")
        told = command(federation, "run", "submit", "-c", "run.seed=3")
        assert told["begins"] is None
        federation.serve("--until-done", *settings(tasks__classes=[["0"]]))
        assert federation.server.wait(300) == 0, federation.last_words("server")
    stopped, second, third = runs(federation)
    assert [r.status.value for r in (stopped, second, third)] == ["stopped", "done", "done"]
    assert third.seed == 3
