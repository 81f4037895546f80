"""What left, as the clients wrote it down, is what came, as the server counted it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, Direction, UpdateStatus
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes


def ask(federation, *command):
    done = subprocess.run(
        [sys.executable, "-m", "fcil_client", *command, "--json"],
        env=federation.environment(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)["data"]


@pytest.mark.full
def test_a_dry_run_foretells_what_the_journal_and_the_ledger_then_say(tmp_path):
    folders = {n: write_client(tmp_path / n, range(4), offset=12 * i) for i, n in enumerate("ab")}
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings())
        foretold = ask(federation, "join", "--data", str(folders["a"]), "--dry-run")
        with open_ledger(federation) as ledger:
            assert ledger.clients.all() == [], "nobody was enrolled"
        for name, folder in folders.items():
            federation.join(name, folder)
        assert federation.server.wait(120) == 0, federation.last_words("server")
        journals = ask(federation, "journal")["journals"]

    assert foretold["source"] == "control"
    sizes = {
        (t["task"], e["kind"]): (e["tensor_bytes"], e["sealed_bytes"], e["at_most"])
        for t in foretold["tasks"]
        for e in t["exchanges"]
    }
    assert set(sizes) == {(t, k) for t in (0, 1) for k in ("train", "evaluate")}
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        rounds = ledger.rounds.all(run)
        counts = ledger.bytes.all(run)
        updates = [u for row in rounds for u in ledger.updates.of_round(row.key)]
    assert {u.status for u in updates} == {UpdateStatus.COUNTED}

    assert len(journals) == 2
    for journal in journals:
        sent = {row["digest"]: row for row in journal["envelopes"]}
        assert all(len(row["sent_at"]) == 1 and row["answer"] == "acked" for row in sent.values())
        theirs = {u.update_id: u for u in updates if u.client == journal["client"]}
        announced = [row for row in sent.values() if row["kind"] == "inventory"]
        assert {row["sealed_bytes"] for row in announced} == {
            foretold["announcement"]["sealed_bytes"]
        }
        assert set(theirs) == set(sent) - {row["digest"] for row in announced}
        for digest, update in theirs.items():
            row = sent[digest]
            mine = (row["tensor_bytes"], row["sealed_bytes"])
            assert mine == (update.tensor_bytes, update.sealed_bytes)
            *largest, at_most = sizes[row["task"], row["kind"]]
            assert all(got <= most for got, most in zip(mine, largest, strict=True))
            assert at_most or mine == tuple(largest)
        # No other sealed byte came from this client.
        came = sum(
            c.sealed
            for c in counts
            if (c.client, c.direction, c.cause) == (journal["client"], Direction.UP, Cause.UPDATE)
        )
        assert came == sum(row["sealed_bytes"] for row in sent.values())
        text = "".join(Path(path).read_text() for path in journal["files"])
        assert not any(f'"{name}"' in text for name in "0123"), "no class is named"
