"""What users get wrong: one clear sentence on the right side, and the others go on."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest
import safetensors.numpy

import fcil_adapters
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def fails(federation, *command, code):
    """Run a command that must fail with this exit code; return its words."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=federation.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.full
def test_unreadable_images_are_named_and_the_rest_is_used(tmp_path):
    folder = write_client(tmp_path / "a", range(4))
    (folder / "0" / "empty.png").write_bytes(b"")
    (folder / "1" / "torn.png").write_bytes(next((folder / "1").glob("*.png")).read_bytes()[:60])
    (folder / "2" / "note.jpg").write_text("this is no picture")
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        federation.join("a", folder)
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        assert federation.server.wait(120) == 0
    words = federation.log("a").read_text()
    for name in ("empty.png", "torn.png", "note.jpg"):
        assert name in words


@pytest.mark.full
def test_a_class_folder_with_one_image_takes_part(tmp_path):
    folder = write_client(tmp_path / "a", [1, 2, 3])
    write_client(folder, [0], per_class=1)
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        federation.join("a", folder)
        federation.join("b", write_client(tmp_path / "b", [1, 2, 3], offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        assert all(r.outcome.value == "done" for r in ledger.rounds.all(run))


@pytest.mark.full
def test_a_client_without_a_class_of_the_task_is_not_asked_and_the_others_go_on(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", [2, 3], offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        asked = [len(r.asked) for r in ledger.rounds.all(run) if r.kind == "train"]
        assert asked == [1, 2]


@pytest.mark.full
def test_a_task_that_nobody_has_data_for_waits_and_says_so(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(
            *settings(tasks__classes=[["zebra"]], round__min_clients=1, round__settle_s=0.0)
        )
        federation.join("a", write_client(tmp_path / "a", [0]))
        federation.until("announced")
        status = control_socket.ask(federation.federation, "status")
        assert "zebra" in status["now"]["waiting_for"]


def test_a_wrong_key_names_the_nearest_and_what_others_call_it(tmp_path):
    federation = LocalFederation(tmp_path)
    where = ["--dir", str(federation.federation)]
    words = fails(federation, "fcil_server", "serve", *where, "-c", "round.min_client=3", code=4)
    assert "round.min_clients" in words
    words = fails(federation, "fcil_server", "serve", *where, "-c", "round.num_rounds=3", code=4)
    assert "round.rounds_per_task" in words
    assert not (federation.federation / "federation.toml").exists()


@pytest.mark.full
def test_a_port_in_use_is_said_with_exit_code_2(tmp_path):
    with LocalFederation(tmp_path / "one") as one:
        one.serve(*settings())
        where = ["--dir", str(tmp_path / "two"), "--port", str(one.port)]
        words = fails(one, "fcil_server", "serve", *where, code=2)
        assert f"port {one.port}" in words


@pytest.mark.full
def test_two_servers_on_one_directory_are_refused(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        where = ["--dir", str(federation.federation), "--port", "0"]
        words = fails(federation, "fcil_server", "serve", *where, code=2)
        assert "locked" in words


@pytest.mark.full
def test_two_clients_on_one_folder_are_refused(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        folder = write_client(tmp_path / "a", range(2))
        federation.join("a", folder)
        federation.until("announced")
        words = fails(federation, "fcil_client", "join", "--data", str(folder), code=2)
        assert "locked" in words


def test_join_without_a_server_or_a_folder_says_what_to_do(tmp_path):
    federation = LocalFederation(tmp_path)
    folder = write_client(tmp_path / "a", [0])
    words = fails(federation, "fcil_client", "join", "--data", str(folder), "--no-wait", code=2)
    assert "fcil-server serve" in words
    words = fails(federation, "fcil_client", "join", "--data", str(tmp_path / "no"), code=4)
    assert "no folder" in words


@pytest.mark.parametrize("layout", ["empty", "flat"])
@pytest.mark.full
def test_a_folder_without_class_folders_says_how_it_should_look(tmp_path, layout):
    folder = tmp_path / "data"
    if layout == "flat":
        shutil.copytree(write_client(tmp_path / "a", [0]) / "0", folder)
    else:
        folder.mkdir()
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.join("flat", folder)
        assert federation.clients["flat"].wait(60) == 4
    assert "<class>" in federation.log("flat").read_text()


@pytest.mark.full
def test_a_client_whose_server_forgot_it_says_so_and_keeps_trying(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        folder = write_client(tmp_path / "a", [0])
        federation.join("a", folder)
        federation.until("announced")
        os.kill(federation.server.pid, signal.SIGINT)
        assert federation.server.wait(120) == 0
        with sqlite3.connect(federation.federation / LEDGER_NAME) as raw:
            raw.execute("DELETE FROM clients")
        raw.close()
        federation.serve(*settings())
        client = federation.clients["a"]
        with federation.log("a").open() as log:
            while "does not admit this client's key" not in log.read():
                with pytest.raises(subprocess.TimeoutExpired):
                    client.wait(0.2)


@pytest.mark.full
def test_another_backbone_is_refused_with_both_digests(tmp_path):
    weights = next(iter(fcil_adapters.__path__)) + "/data/vit_nano_patch4_32.safetensors"
    other = tmp_path / "other.safetensors"
    with open(weights, "rb") as file:
        tensors = safetensors.numpy.load(file.read())
    tensors["norm.bias"] = tensors["norm.bias"] + 0.5
    safetensors.numpy.save_file(tensors, other)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(method__name="pilora", method__preset="short"))
        folder = write_client(tmp_path / "a", [0])
        federation.join("a", folder, "--weights", str(other))
        assert federation.clients["a"].wait(90) == 1
    words = federation.log("a").read_text()
    assert "backbone_mismatch" in words
    assert "a92a53a1f90b" in words
