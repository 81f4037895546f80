"""Clients whose processes cannot import torch take full part in a federation beside torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fcil_adapters.export.backbone_file import export_backbone
from fcil_server.lab.local.federation import LocalFederation
from system.analytic_kit import TOLERANCE, learn
from system.kit import settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TASKS = [["0", "1"], ["2", "3"], ["4"]]
ANY = ("--threads", "1")  # the engine that there is


@pytest.fixture
def torch_free(tmp_path):
    """Return the environment of such a process; the file of its notes is under FCIL_TEST_REFUSALS."""
    folder = Path(__file__).parent / "without_torch"
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    notes = tmp_path / "refusals.txt"
    notes.touch()
    return {"PYTHONPATH": path, "FCIL_TEST_REFUSALS": str(notes)}


def notes_of(env) -> str:
    return Path(env["FCIL_TEST_REFUSALS"]).read_text()


def test_the_environment_keeps_torch_out(torch_free):
    """Otherwise the tests below would prove nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **torch_free},
    )  # fmt: skip
    assert "ModuleNotFoundError: refused: torch" in done.stderr


@pytest.mark.full
def test_clients_with_and_without_torch_give_the_classifier_of_torch_alone(tmp_path, torch_free):
    folders = [write_client(tmp_path / name, range(5), per_class=12, offset=12 * i)
               for i, name in enumerate(("free-a", "free-b", "full"))]  # fmt: skip
    env = {"free-a": torch_free, "free-b": torch_free}
    with LocalFederation(tmp_path) as federation:
        weight, expected, accuracy = learn(federation, folders, TASKS, env=env, engine=ANY)
        log = federation.log("server").read_text()
        clients = {name: federation.log(name).read_text() for name in ("free-a", "free-b", "full")}
    apart = np.linalg.norm(weight - expected) / np.linalg.norm(expected)
    assert apart < TOLERANCE
    assert accuracy > 60
    for name, words in clients.items():
        assert ("onnxruntime" in words, "torch 2" in words) == (name != "full", name == "full")
    assert log.count("CPUExecutionProvider") >= 2, "the server's log shows what computes"
    assert log.count("computes the same features") >= 3
    notes = notes_of(torch_free)
    assert notes.count("-m fcil_client.rounds.worker") == 2, "their workers were such processes too"
    assert "refused torch" in notes, "they looked for it"


@pytest.mark.full
def test_images_of_another_size_than_the_backbones_own(tmp_path, torch_free):
    """The server says the size; a client with torch resamples, one without has its own graph."""
    folders = [write_client(tmp_path / name, (0, 1, 2), per_class=80, offset=80 * i)
               for i, name in enumerate(("free", "full"))]  # fmt: skip
    exported = export_backbone("embedded", None, tmp_path / "backbone", 16)
    with LocalFederation(tmp_path) as federation:
        options = {"tasks__classes": [["0", "1"], ["2"]], "round__min_clients": 2}
        federation.serve(
            "--until-done", *settings(method__name="fedncm", run__image_size=16, **options)
        )
        graph = ("--weights", str(exported.graph))
        federation.join("free", folders[0], *ANY, *graph, env=torch_free)
        federation.join("full", folders[1], *ANY)
        assert federation.server.wait(200) == 0, federation.last_words("server")
        run = next((federation.federation / "runs").iterdir())
        summary = json.loads((run / "summary.json").read_text())["data"]
    about = summary["backbone"]
    assert summary["faa"] > 60, "chance is 33, and each client keeps other images to test on"
    assert about["preprocessing"]["size"] == 16
    assert about["digest"] == exported.info.digest


@pytest.mark.full
def test_a_client_without_torch_describes_classes_by_gaussians(tmp_path, torch_free):
    """And evaluates the head that the server trained on draws from them, with torch."""
    folder = write_client(tmp_path / "free", (0, 1), per_class=80)
    with LocalFederation(tmp_path) as federation:
        tasks = {"tasks__classes": [["0", "1"]], "round__min_clients": 1}
        chosen = {"method__name": "gaussian_head", "method__samples_per_class": 64}
        federation.serve("--until-done", *settings(**tasks, **chosen))
        federation.join("free", folder, "--threads", "1", env=torch_free)
        assert federation.server.wait(200) == 0, federation.last_words("server")
        run = next((federation.federation / "runs").iterdir())
        summary = json.loads((run / "summary.json").read_text())["data"]
    assert summary["faa"] > 75
    assert "-m fcil_client.rounds.worker" in notes_of(torch_free)


@pytest.mark.full
def test_a_method_that_needs_torch_ends_such_a_client_with_one_sentence(tmp_path, torch_free):
    folder = write_client(tmp_path / "free", (0, 1), per_class=3)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(method__name="pilora", round__min_clients=1))
        federation.join("free", folder, env=torch_free)
        heard = federation.until("method_mismatch", text="pilora")
        code = federation.clients["free"].wait(60)
        said = federation.log("free").read_text()
    sentence = (
        "method 'pilora' trains with gradients, which needs torch, and torch is not installed"
    )
    assert sentence in heard["text"]
    assert sentence in said
    assert "pip install 'fcil[client]'" in said
    assert "Traceback" not in said
    assert code == 1
