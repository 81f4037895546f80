"""What ``fcil-server methods --new`` writes trains in a federation of processes, uninstalled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]


def write(kind, folder):
    """Write a package; return the environment in which it is found."""
    command = [sys.executable, "-m", "fcil_server", "methods", "--new", "new_idea"]
    subprocess.run([*command, "--kind", kind, "--dir", str(folder)], check=True)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("kind", "options", "least"),
    [("frozen", {}, 75), ("lora", {"method__preset": "short", "method__augment": "jitter"}, 45)],
)
def test_a_federation_learns_two_tasks_with_it(kind, options, least, tmp_path):
    env = write(kind, tmp_path / "new_idea")
    tasks = [["0", "1"], ["2", "3", "4"]]
    with LocalFederation(tmp_path) as federation:
        given = settings(method__name="new_idea", **options, tasks__classes=tasks)
        federation.serve("--until-done", *given, env=env)
        for k, name in enumerate("ab"):
            images = write_client(tmp_path / name, range(5), per_class=40, offset=40 * k)
            federation.join(name, images, env=env)
        assert federation.server.wait(200) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert {row.outcome for row in ledger.rounds.all(run.run_id)} == {Outcome.DONE}
    folder = federation.federation / "runs" / run.run_id
    data = json.loads((folder / "summary.json").read_text())["data"]
    assert data["faa"] > least  # chance is 20


@pytest.mark.parametrize("kind", ["frozen", "lora", "prompt"])
def test_the_contract_of_all_methods_holds_for_it(kind, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/adapters/methods/test_contract_kit.py", "-k", "new_idea"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, **write(kind, tmp_path / "new_idea"), "FCIL_METHODS": "new_idea"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
