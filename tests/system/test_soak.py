"""A short soak: random kills on both sides, and nothing is lost, doubled or left over."""

import importlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME

pytestmark = pytest.mark.processes

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("soak_checks")


def soak(directory, *, minutes, clients):
    """Run the script; return what it said."""
    command = [sys.executable, BENCH / "soak.py", "--keep", directory, "--pause", "1.5"]
    command += ["--minutes", str(minutes), "--clients", str(clients), "--tasks", "2"]
    done = subprocess.run(
        [*command, "--rounds", "3"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest(federation):
    with sqlite3.connect(federation.federation / LEDGER_NAME) as ledger:
        return ledger.execute("SELECT run_id FROM runs ORDER BY created_at").fetchall()[-1][0]


def change(federation, statement):
    ledger = sqlite3.connect(federation.federation / LEDGER_NAME)
    with ledger:
        ledger.execute(statement)
    ledger.close()


@pytest.mark.full  # tests/faults/test_crash_walk.py kills at chosen points in the ordinary run
def test_after_random_kills_everything_acknowledged_is_counted_once_and_nothing_is_left(
    tmp_path, checks
):
    said = soak(tmp_path, minutes=0.2, clients=4)
    assert "faults: 0" in said
    assert "kill server" in said or "kill client" in said

    # The same files, broken on purpose: each check sees what it is for.
    federation = LocalFederation(tmp_path)
    run = newest(federation)
    assert checks.run_faults(federation, run, 4) == []
    where = f"run = '{run}' AND kind = 'train' AND task = 0 AND round = 0"
    one = f"WHERE rowid = (SELECT min(rowid) FROM updates WHERE {where})"
    change(federation, f"UPDATE updates SET status = 'excluded' {one}")
    assert any("asked 4, counted 3" in f for f in checks.run_faults(federation, run, 4))
    change(federation, f"DELETE FROM updates {one}")
    faults = checks.run_faults(federation, run, 4)
    assert any("was acknowledged and is not counted" in f for f in faults)
    [home, *_] = (tmp_path / "state" / "fcil").glob("*/*/outbox")
    (home / "half.update").touch()
    assert any("half.update" in f for f in checks.leftover_faults(federation))


def test_a_worker_without_its_daemon_is_noticed(tmp_path, checks, monkeypatch):
    monkeypatch.setattr(checks, "ORPHAN_S", 0.0)
    federation = LocalFederation(tmp_path)
    assert checks.orphan_faults(federation) == []
    environment = {**os.environ, "XDG_STATE_HOME": str(federation.directory / "state")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], env=environment, **pipes) as orphan:
        orphan.stdin.write(b"I run\n")  # its environment is there a moment after its start
        orphan.stdin.flush()
        assert orphan.stdout.readline() == b"I run\n"
        assert checks.orphan_faults(federation) == [f"process {orphan.pid} outlived its daemon"]
        orphan.stdin.close()


def test_memory_that_grows_is_noticed(checks):
    life = [checks.Sample(at=float(n), mb=60 + n / 10, fds=20) for n in range(300)]
    [fault] = checks.memory_faults("server", life, [])
    assert "grew from" in fault
    flat = [checks.Sample(at=float(n), mb=60 + n % 3, fds=20) for n in range(300)]
    assert checks.memory_faults("server", flat, []) == []
    assert checks.descriptor_faults("server", [20, 21, 30], []) != []
    assert checks.descriptor_faults("server", [20, 22, 19], []) == []
