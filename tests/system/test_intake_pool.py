"""A server with intake processes: killed, they cost connections, and no update."""

import contextlib
import os
import select
import signal
import time

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from fcil_server.web.metrics.source import MetricsSource
from system.kit import open_ledger, settings, until_all_hold, write_client
from system.test_rounds import operate

pytestmark = pytest.mark.processes
CLIENTS, ROUNDS = "abcd", 3


def processes(federation):
    """Return what the server's status says of its intake processes."""
    return control_socket.ask(federation.federation, "status")["federation"]["intake"]


def intake_pids(federation):
    return [one["pid"] for one in processes(federation) if one["pid"]]


def join_all(federation, tmp_path, extra=()):
    operate(federation, "pause")
    for k, name in enumerate(CLIENTS):
        federation.join(name, write_client(tmp_path / name, (0, 1), offset=12 * k), *extra)
    until_all_hold(federation, CLIENTS, 2)
    operate(federation, "resume")


def check_rounds(federation):
    """Check that each round has counted one update of each client."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rows = ledger.rounds.all(run.run_id)
        assert len(rows) >= ROUNDS
        for row in rows:
            updates = ledger.updates.of_round(row.key)
            assert len(updates) == len(CLIENTS), row.key
            assert all(u.status is UpdateStatus.COUNTED for u in updates)
        assert not ledger.refusals.counts()


ARGUMENTS = {
    "federation__intake": 3,
    "tasks__classes": [["0", "1"]],
    "round__rounds_per_task": ROUNDS,
    "round__min_clients": len(CLIENTS),
    "round__grace_s": 120.0,
}


def test_a_run_goes_through_intake_processes_that_end_with_the_server(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(**ARGUMENTS))
        pids = intake_pids(federation)
        assert len(pids) == 3
        metrics = MetricsSource(federation.federation)
        shown = metrics.snapshot(metrics.totals(), metrics.ask(), time.monotonic())
        metrics.close()
        assert {f"intake {number}" for number in (1, 2, 3)} < set(shown.usage)
        join_all(federation, tmp_path)
        federation.until("run_done")
        # Each update of each round has gone through a process.
        assert sum(one["updates"] for one in processes(federation)) >= ROUNDS * len(CLIENTS)
        federation.server.kill()
        federation.server.wait()
        for pid in pids:
            until_gone(pid)
    check_rounds(federation)


def until_gone(pid):
    """Wait for the end of a process that is no child of this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 30)[0], f"process {pid} outlives its server"
    os.close(handle)


@pytest.mark.full
def test_no_update_is_lost_or_counted_twice_while_intake_processes_are_killed(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(**ARGUMENTS | {"round__rounds_per_task": 12}))
        join_all(federation, tmp_path)
        for blow in range(16):
            federation.until("update")
            pids = intake_pids(federation)
            with contextlib.suppress(ProcessLookupError):  # the one before it has just ended
                if pids:  # else all of them are just starting
                    os.kill(pids[blow % len(pids)], signal.SIGKILL)
        federation.until("run_done")
    check_rounds(federation)
