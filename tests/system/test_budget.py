"""A federation with a budget: what is chosen, kept over a restart, spent, and said when exceeded."""

import subprocess
import sys
from collections import Counter

import pytest

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract.registry import load_method
from fcil_server.federation.config import load
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, CountSource
from fcil_server.reports.traffic.budget import choose, known_settings
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

NO_ROUND = (Cause.HANDSHAKE, Cause.CONNECTION)


def largest_round(arguments: list[str]) -> int:
    """Return what the largest round of these settings is said to cost without economies."""
    config = load(None, [a for a in arguments if a != "-c"])
    tasks, basis = known_settings(config, backbone_by_name("embedded"))
    return choose(load_method("running_mean"), config, tasks, basis, 10**9).cost.bytes


@pytest.mark.full
def test_a_budget_is_kept_over_a_restart_and_by_the_bytes_of_every_round(tmp_path):
    arguments = settings(round__rounds_per_task=2)
    limit = largest_round(arguments) - 1
    arguments += ["--budget", f"{limit} B"]
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *arguments)
        said = federation.until("budget")["text"]
        assert "thumbnails of 4 x 4 pixels (gives up detail)" in said
        assert federation.status()["run"]["budget"]["options"] == {"side": 4}
        federation.kill_server()
        federation.serve("--until-done", *arguments)
        for name, offset in (("a", 0), ("b", 12)):
            federation.join(name, write_client(tmp_path / name, range(4), offset=offset))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        codes = Counter(e.code for e in ledger.events.newest())
        spent: Counter[tuple[object, ...]] = Counter()
        for c in ledger.bytes.all(run.run_id):
            if (
                c.client
                and c.task
                and c.cause not in NO_ROUND
                and c.source is CountSource.PREDICTED
            ):
                spent[c.client, c.task, c.kind, c.round] += c.wire
    assert run.hparams["side"] == 4
    assert codes["budget"] == 1
    assert not codes["config_kept"]
    assert not codes["over_budget"]
    said_bytes = run.environment["budget"]["up"] + run.environment["budget"]["down"]
    assert 0.95 * said_bytes < max(spent.values()) <= limit
    report = subprocess.run(
        [sys.executable, "-m", "fcil_server", "report", "--dir", str(federation.federation)],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert said in report


@pytest.mark.full
def test_a_round_that_exceeds_its_budget_is_told(tmp_path):
    """A discovered task has twice the classes that were assumed."""
    data = tmp_path / "a"
    for k in range(20):
        write_client(data, [k % 10], names={k % 10: f"class {k}"}, per_class=2, offset=k)
    arguments = settings(
        tasks__schedule="discovered", tasks__classes=[], round__min_clients=1, method__side=32
    )
    limit = largest_round(arguments)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*arguments, "--budget", f"{limit} B")
        assert "nothing is given up" in federation.until("budget")["text"]
        federation.join("a", data)
        told = federation.until("over_budget")
        assert told["level"] == "warning"
        assert told["text"].startswith("train round 0 of task 0 cost ")
        assert ":a " in told["text"]


def test_a_budget_that_nothing_fits_is_refused_in_a_sentence(tmp_path):
    command = [sys.executable, "-m", "fcil_server", "serve", "--dir", str(tmp_path / "f")]
    arguments = [*settings(), "--port", "0", "--budget", "1 kB"]
    result = subprocess.run(
        [*command, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 4, result.stderr
    assert "a budget of 1.00 kB a round is too small for running_mean" in result.stderr
    assert "Traceback" not in result.stderr
