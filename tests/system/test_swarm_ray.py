"""A swarm over a local Ray cluster: it learns, a killed group comes back, and Ctrl-C ends all."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from fcil_client.cli import main as cli
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, until_log, write_client

pytest.importorskip("ray", reason="needs fcil[ray]")
pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(600)]

SPREAD = ("--spread", "ray", "--groups", "2", "--cpus-per-group", "0.5", "--format", "jsonl")


@pytest.fixture
def divided(tmp_path):
    """Digits for four clients, and who holds which."""
    data = write_client(tmp_path / "data", range(4))
    made = ["--data", str(data), "--out", str(tmp_path / "p.json"), "--partition", "iid"]
    done = CliRunner().invoke(cli.app, ["split", *made, "--clients", "4", "--tasks", "2"])
    assert done.exit_code == 0, done.output
    return data, tmp_path / "p.json"


def groups_of(federation):
    """Return the processes of the groups, by their slots."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--slots" in words and str(federation.directory.parent) in " ".join(words):
            found[words[words.index("--slots") + 1]] = process
    return found


def events(federation):
    text = federation.log("lab").read_text()
    return [json.loads(row) for row in text.splitlines() if row.startswith("{")]


def may_enter(cluster, token):
    """Return whether a process with this token may use the cluster of which this is one."""
    name = next(w for w in cluster.cmdline() if w.startswith("--gcs-address"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    code = f"import ray; ray.init(address={name.partition('=')[2]!r}); print('entered')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return "entered" in done.stdout


def test_groups_learn_together_and_one_that_is_killed_goes_on_from_its_homes(tmp_path, divided):
    with LocalFederation(tmp_path / "f") as federation:
        given = settings(round__min_clients=4, round__grace_s=90.0, run__evaluate=False)
        federation.serve("--until-done", *given)
        federation.swarm("lab", *divided, "--until-done", *SPREAD)
        federation.until("announced", timeout_s=200)
        members = groups_of(federation)
        assert sorted(members) == ["0-1", "2-3"]
        members["2-3"].kill()
        assert federation.clients["lab"].wait(200) == 0, federation.last_words("lab")
        assert federation.server.wait(60) == 0
    said = [e["text"] for e in events(federation) if e["event"] == "note"]
    assert "group 1 (slots 2-3) was killed; it is restarted." in said
    assert "all 2 groups have ended, exit code 0" in said
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        assert [len(ledger.updates.of_round(r.key)) for r in ledger.rounds.all(run)] == [4, 4]
        assert len(list(ledger.clients.all())) == 4, "nobody enrolled twice"


def test_ctrl_c_ends_all_groups_and_the_cluster_that_was_made_for_them(tmp_path, divided):
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve(*settings(round__min_clients=5))
        federation.swarm("lab", *divided, *SPREAD)
        for _ in range(4):
            federation.until("announced", timeout_s=200)
        swarm = federation.clients["lab"]
        below = psutil.Process(swarm.pid).children(recursive=True)
        (raylet,) = [p for p in below if p.name() == "raylet"]
        assert may_enter(raylet, raylet.environ()["RAY_AUTH_TOKEN"])
        assert not may_enter(raylet, "0" * 64), "its ports are open, and not to everybody"
        until_log(federation, "lab", '"connected": 4')
        os.kill(swarm.pid, signal.SIGINT)
        assert swarm.wait(100) == 0, federation.last_words("lab")
        _, alive = psutil.wait_procs(below, 30)
        assert alive == []
    ends = [e["text"] for e in events(federation) if e["event"] == "note"]
    assert "group 0 (slots 0-1) has ended." in ends
    assert "group 1 (slots 2-3) has ended." in ends
