"""A swarm of processes: members fail alone, a kill loses nothing, and it equals separate joins."""

import json
import shutil

import pytest

from fcil_client.cli.show_status import all_status, one_status
from fcil_client.state.home import Home
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

NAMES = ("a", "b", "c")


def write_folders(folder, names=NAMES):
    for number, name in enumerate(names):
        write_client(folder / name, range(4), per_class=4, offset=4 * number)
    return folder


def lines(federation, event):
    """Return what the swarm printed, of one kind."""
    text = federation.log("lab").read_text()
    return [x for x in (json.loads(t) for t in text.splitlines() if t[:1] == "{")
            if x["event"] == event]  # fmt: skip


@pytest.mark.full
def test_a_lying_folder_goes_alone_and_a_swarm_that_is_killed_goes_on_where_it_was(
    tmp_path, monkeypatch
):
    data = write_folders(tmp_path / "data")
    (data / "0-liar" / "0").mkdir(parents=True)
    (data / "0-liar" / "0" / "1.png").write_text("no image")
    given = settings(round__min_clients=3, round__grace_s=60.0, run__evaluate=False)
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve(*given)
        swarm = ("--until-done", "--format", "jsonl")
        federation.swarm("lab", data, None, *swarm)
        federation.until("announced")
        monkeypatch.setenv("XDG_STATE_HOME", str(federation.directory / "state"))
        (row,), clients = all_status(members=False)
        assert (row["members"], row["answers"], clients) == (4, True, [])
        (home,) = Home.known(data / "a")
        assert one_status(home)["name"].endswith("lab-a")
        assert one_status(home)["answers"]
        federation.until("update", text="lab-")  # one member's work is on the server's disk
        federation.kill_client("lab")
        federation.swarm("lab", data, None, *swarm)
        assert federation.clients["lab"].wait(60) == 1, "a member failed"
        federation.swarm("lab", data, None, *swarm)  # who comes when all is over hears it too
        federation.clients["lab"].wait(60)
    first, late = lines(federation, "end")
    assert first["done"]
    assert list(first["failed"]) == ["lab-0-liar"]
    assert "none of the 1 images" in first["failed"]["lab-0-liar"]
    assert late["done"]
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status == "done"
        rounds = ledger.rounds.all(run.run_id)
        assert [len(ledger.updates.of_round(r.key)) for r in rounds] == [3] * 2
        names = {row.name.rpartition(":")[2] for row in ledger.clients.all()}
    assert names == {"lab-a", "lab-b", "lab-c", "lab-0-liar"}


@pytest.mark.full
def test_where_all_go_together_one_lying_folder_ends_the_swarm(tmp_path):
    data = write_folders(tmp_path / "data")
    (data / "0-liar" / "0").mkdir(parents=True)
    (data / "0-liar" / "0" / "1.png").write_text("no image")
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve(*settings(round__min_clients=4))
        federation.swarm("lab", data, None, "--together", "--format", "jsonl")
        assert federation.clients["lab"].wait(60) == 1
    (end,) = lines(federation, "end")
    assert list(end["failed"]) == ["lab-0-liar"]
    assert "--together" in federation.log("lab").read_text()


def final_state(directory, arguments, start):
    """Let a copy of a federation run to its end; return its last state's bytes."""
    with LocalFederation(directory) as federation:
        federation.serve("--until-done", *arguments)
        start(federation)
        assert federation.server.wait(90) == 0
    states = sorted(federation.federation.glob("runs/*/states/*.safetensors"))
    return states[-1].name, states[-1].read_bytes()


@pytest.mark.full
def test_a_swarm_ends_in_the_very_state_in_which_separate_clients_end(tmp_path):
    data = write_folders(tmp_path / "data", NAMES[:2])
    tasks = {"tasks__classes": [["0", "1"]], "run__evaluate": False}
    with LocalFederation(tmp_path / "first") as federation:
        federation.serve(*settings(round__min_clients=3, **tasks))
        federation.swarm("lab", data, None)  # keys, ids and salts are drawn, and no round opens
        federation.until("announced")
        federation.until("announced")
        (directory,) = (federation.directory / "state/fcil/swarms").iterdir()
        status = control_socket.ask(directory, "status")
        assert status["members"] == 2
    for name in ("swarm", "joins"):
        shutil.copytree(tmp_path / "first", tmp_path / name, symlinks=True)
    arguments = settings(round__min_clients=2, **tasks)
    together = final_state(
        tmp_path / "swarm", arguments, lambda f: f.swarm("lab", data, None, "--threads", "1")
    )
    apart = final_state(
        tmp_path / "joins",
        arguments,
        lambda f: [f.join(n, data / n, "--threads", "1") for n in NAMES[:2]],
    )
    assert together == apart


@pytest.mark.full
def test_a_thousand_clients_in_one_swarm_finish_their_rounds(tmp_path):
    data = tmp_path / "data"
    for number in range(1000):
        write_client(data / f"{number:03d}", range(2), per_class=2, offset=number % 80)
    given = settings(round__min_clients=1000, tasks__classes=[["0", "1"]], run__evaluate=False)
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve("--until-done", *given)
        federation.swarm("lab", data, None, "--until-done", "--format", "jsonl")
        assert federation.clients["lab"].wait(1500) == 0
        assert federation.server.wait(60) == 0
    (end,) = lines(federation, "end")
    assert (end["done"], end["failed"], end["counted"]) == (True, {}, 1000)
