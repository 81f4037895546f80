"""Noise in a federation of processes: charged, shown on both sides, ended by a budget."""

import json
import subprocess
import sys

import pytest

from fcil_client.state.privacy_budget import gaussian_epsilon
from fcil_protocol.errors import LinkError
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

NOISE = {"privacy__noise_multiplier": 2.0, "privacy__clip": 4.0, "privacy__min_count": 4}


def ask(federation, module, *command):
    done = subprocess.run(
        [sys.executable, "-m", module, *command, "--json"],
        env=federation.environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)["data"]


@pytest.mark.full
def test_noise_is_charged_and_shown_on_both_sides_and_a_clients_own_budget_ends_its_rounds(
    tmp_path,
):
    folders = {n: write_client(tmp_path / n, range(4), offset=12 * i) for i, n in enumerate("ab")}
    write_client(tmp_path / "a", [7], per_class=2)  # too few to be announced
    once, twice = (gaussian_epsilon([2.0] * n, 1e-5) for n in (1, 2))
    with LocalFederation(tmp_path) as federation:
        rounds = settings(round__rounds_per_task=2, round__quorum=1, round__retry_s=0.0, **NOISE)
        federation.serve("--until-done", *rounds)
        shown = federation.status()["run"]["privacy"]  # before the server can have ended
        assert (shown["noise_multiplier"], shown["clip"], shown["min_count"]) == (2.0, 4.0, 4)
        federation.join("a", folders["a"])
        federation.join("b", folders["b"], "--max-epsilon", str((once + twice) / 2))
        federation.until("announced", text="4 classes")
        assert federation.server.wait(120) == 0, federation.last_words("server")
        rows = {r["data"]: r for r in ask(federation, "fcil_client", "privacy")["clients"]}
        states = {r["data"]: r for r in ask(federation, "fcil_client", "status")["clients"]}
    a, b = (rows[str(folders[n])] for n in "ab")
    assert a["all"]["epsilon"] == pytest.approx(twice, abs=1e-5)
    assert b["all"]["epsilon"] == pytest.approx(once, abs=1e-5)
    assert (a["all"]["rounds"], b["all"]["rounds"]) == (4, 2), "each task has classes of its own"
    assert a["terms"]["noise_multiplier"] == 2.0
    assert b["remains"] == pytest.approx((twice - once) / 2, abs=1e-5)
    assert states[str(folders["b"])]["privacy"]["own"]["max_epsilon"] > 0

    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        names = {c.name for c in ledger.classes.all(run)}
        trained = [r for r in ledger.rounds.all(run) if r.kind == "train"]
        reasons = [a.reason for r in ledger.rounds.all(run) for a in ledger.answers.of_round(r.key)]
    assert names == {"0", "1", "2", "3"}
    assert reasons.count("privacy_refused") == 2
    ends = [(r.outcome, r.why, r.new_state is None) for r in trained]
    assert ends == [("done", "answered", False), ("skipped", "too_few", True)] * 2, (
        "what a sends alone goes to nobody"
    )


@pytest.mark.full
def test_a_server_does_not_begin_a_run_whose_method_noise_cannot_cover(tmp_path):
    with LocalFederation(tmp_path) as federation:
        with pytest.raises(LinkError, match="hgp also sends trained tensors"):
            federation.serve(*settings(method__name="hgp", **NOISE))
        assert not federation.federation.exists(), "nothing is left of it"
