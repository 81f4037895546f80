"""A device on battery, with its owner's rules, in a federation of real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Answer
from system.kit import open_ledger, settings, until_log, write_client

pytestmark = pytest.mark.processes

LAPTOP = str(Path(__file__).parent / "laptop")


@pytest.mark.full
def test_a_laptop_on_battery_is_not_waited_for_and_takes_part_again_on_mains(tmp_path):
    power = tmp_path / "power"
    power.write_text("mains")
    path = os.pathsep.join(filter(None, (LAPTOP, os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "FCIL_TEST_POWER": str(power)}
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve("--until-done", *settings(round__deadline_s=3600))
        federation.join(
            "laptop", write_client(tmp_path / "laptop", range(4), offset=12), "--only-on-mains",
            env=env,
        )  # fmt: skip
        federation.until("announced", text=":laptop")
        power.write_text("battery")
        until_log(federation, "laptop", "paused: on battery")
        federation.join("desk", write_client(tmp_path / "desk", range(4)))
        assert "not_now" in federation.until("declined", text=":laptop")["text"]
        federation.until("update", text=":desk")
        while (status := federation.status())["now"]["phase"] != "gathering":
            pass
        states = {c["name"].rpartition(":")[2]: c["state"] for c in status["clients"]}
        assert states == {"desk": "ready", "laptop": "resting"}
        said = subprocess.run(
            [sys.executable, "-m", "fcil_client", "status", "--data", tmp_path / "laptop", "--json"],
            env=federation.environment(), capture_output=True, check=True,
        )  # fmt: skip
        [row] = json.loads(said.stdout)["data"]["clients"]
        assert (row["manners"]["why"], row["manners"]["rules"]) == ("on battery", ["only on mains"])
        power.write_text("mains")
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        names = {c.client_id: c.name.rpartition(":")[2] for c in ledger.clients.all()}
        train = [row for row in ledger.rounds.all(run) if row.kind == "train"]
        took = [sorted(names[u.client] for u in ledger.updates.of_round(row.key)) for row in train]
        silent = [
            (names[a.client], a.answer, a.reason) for a in ledger.answers.of_round(train[0].key)
        ]
    assert took == [["desk"], ["desk", "laptop"]]
    assert silent == [("laptop", Answer.DECLINED, "not_now")]
