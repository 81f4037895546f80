"""A method from a package of its own: installed, it runs; installed wrongly, that is said."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_protocol.errors import MethodMismatch
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome
from system.kit import open_ledger, settings, write_client
from system.third_party_kit import install

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
METHOD = {"method__name": "thumbnail_lda"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """The package as installed here and there: right, of another version, and tampered with."""
    folder = tmp_path_factory.mktemp("packages")
    found = {
        "right": install(folder / "right"),
        "other version": install(folder / "other", version="2"),
        "missing": folder / "empty",
    }
    for name, old, new in (
        ("other schema", "max_abs=1)", "max_abs=2)"),
        ("other options", "shrinkage: float", "shrink: float"),
        ("broken", "METHOD = Method(", "METHOD = len()("),
    ):
        found[name] = shutil.copytree(found["right"], folder / name)
        manifest = found[name] / "thumbnail_lda" / "__init__.py"
        text = manifest.read_text()
        assert old in text
        manifest.write_text(text.replace(old, new))
    return {name: {"PYTHONPATH": str(site)} for name, site in found.items()}


# Too long for every run; adapters/test_registry_packages tries such a package in one process.
@pytest.mark.full
def test_a_federation_learns_three_tasks_with_it(tmp_path, sites):
    env = sites["right"]
    tasks = [["0", "1"], ["2", "3", "4"], ["5"]]
    with LocalFederation(tmp_path) as federation:
        arguments = settings(**METHOD, method__shrinkage=1e-3, tasks__classes=tasks)
        federation.serve("--until-done", *arguments, env=env)
        for k, (name, digits) in enumerate({"a": range(6), "b": range(5)}.items()):
            images = write_client(tmp_path / name, digits, per_class=40, offset=40 * k)
            federation.join(name, images, env=env)
        assert federation.server.wait(200) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        rounds = ledger.rounds.all(run.run_id)
        updates = [len(ledger.updates.of_round(row.key)) for row in rounds]
    assert [row.kind for row in rounds] == ["prepare", "train", "evaluate"] * 3
    assert {row.outcome for row in rounds} == {Outcome.DONE}
    assert updates == [2, 2, 2, 2, 2, 2, 1, 1, 2]  # b has no image of the class 5
    folder = federation.federation / "runs" / run.run_id
    data = json.loads((folder / "summary.json").read_text())["data"]
    assert data["faa"] > 75  # chance is 17


WRONG = {
    "missing": "the server runs method 'thumbnail_lda' version 1, the client has no such method.",
    "other version": "the server runs method 'thumbnail_lda' version 1, the client has version 2.",
    "other schema": "method 'thumbnail_lda' is version 1 on both sides, but its schemas differ: ",
    "other options": "method 'thumbnail_lda' is version 1 on both sides, but the client's does "
    "not take the server's options: shrinkage: ",
    "broken": "the server runs method 'thumbnail_lda' version 1, the client has no such method.",
}


def test_the_method_guide_quotes_what_is_said():
    guide = (ROOT / "docs" / "method-rules.md").read_text()
    guide = guide.replace("my_head", "thumbnail_lda")
    for how in ("missing", "other version", "other schema"):
        assert WRONG[how] in guide


@pytest.fixture(scope="module")
def federation(tmp_path_factory, sites):
    """A server and a client that fit; classes become tasks as clients bring them."""
    folder = tmp_path_factory.mktemp("federation")
    options = {"round__min_clients": 1, "tasks__schedule": "discovered", "tasks__classes": []}
    with LocalFederation(folder) as running:
        running.serve(*settings(**METHOD, **options, tasks__settle_s=0.2), env=sites["right"])
        running.join("a", write_client(folder / "a", range(2)), env=sites["right"])
        running.until("task_done")
        yield running


def clients_of(federation):
    """Return what the status says of each client, by the name of its folder."""
    return {c["name"].partition(":")[2]: c for c in federation.status()["clients"]}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.full
def test_a_client_with_a_method_that_does_not_fit_hears_why_and_joins_when_it_does(
    federation, sites, how
):
    name, sentence = how.replace(" ", "-"), WRONG[how]
    images = write_client(federation.directory / name, [2], names={2: f"class of {name}"})
    federation.join(name, images, env=sites[how])

    # The client ends, with one sentence and what to do.
    assert federation.clients.pop(name).wait(60) == MethodMismatch.exit_code
    said = federation.log(name).read_text()
    assert said.count("error [method_mismatch]") == 1
    assert sentence in said
    assert "fcil-thumbnail-lda 1.0 on the client and start it again." in said
    broken = "the method 'thumbnail_lda' (thumbnail_lda:METHOD) cannot be imported: TypeError"
    assert (broken in said) == (how == "broken")
    assert "Traceback" not in said

    # The operator reads the same in the log, in the status and in the ledger.
    federation.until(MethodMismatch.code, text=sentence)
    clients = clients_of(federation)
    assert clients[name]["state"] == "refused"
    assert sentence in clients[name]["why"]
    shown = subprocess.run(
        [sys.executable, "-m", "fcil_server", "status", "--dir", str(federation.federation)],
        env=federation.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sentence in shown.stdout
    with open_ledger(federation) as ledger:
        mine = [r for r in ledger.refusals.newest() if r.client == clients[name]["id"]]
    assert [r.code for r in mine] == [MethodMismatch.code]  # it asked once
    assert sentence in mine[0].reason

    # Nobody else was disturbed, and with the right package it takes part as the same client.
    assert (clients["a"]["state"], clients["a"]["why"]) == ("ready", "")
    federation.join(name, images, env=sites["right"])
    federation.until("task_opened", text=f"class of {name}")
    federation.until("task_done")
    federation.check_clients()
    again = clients_of(federation)
    assert again.keys() == clients.keys()
    assert (again[name]["state"], again[name]["why"]) == ("ready", "")
    for word in ("warning", "error", "connection was lost"):
        assert word not in federation.log("a").read_text()


@pytest.mark.full
def test_the_contract_of_all_methods_holds_for_it(sites):
    """As docs/method-rules.md tells authors to check theirs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/adapters/methods/test_contract_kit.py", "-k", "thumbnail_lda"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, **sites["right"], "FCIL_METHODS": "thumbnail_lda"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
