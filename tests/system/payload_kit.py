"""A federation that learns nothing: updates and parts of a given size (scripts/bench)."""

import os
from dataclasses import dataclass
from pathlib import Path

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from system.bad_link import DOWN, UP, BadLink
from system.kit import open_ledger, settings, write_client
from system.test_wire import free_port

_METHOD = Path(__file__).parents[2] / "scripts" / "bench" / "payload_method"
ENV = {"PYTHONPATH": os.pathsep.join([str(_METHOD), os.environ.get("PYTHONPATH", "")])}


def one_round(kilobytes, **extra):
    """Return `-c` arguments: one client, one round, a part and an update of this size each."""
    given = {
        "method__name": "payload",
        "method__kilobytes": kilobytes,
        "tasks__classes": [["0", "1"]],
        "round__min_clients": 1,
        "round__settle_s": 0.0,
        "round__grace_s": 300.0,
        "run__evaluate": False,
        "federation__heartbeat_s": 10.0,
    }
    return settings(**given | extra)


@dataclass(frozen=True)
class Course:
    """What a round behind a bad link took.

    Attributes:
        up, down: bytes that the link carried, over those of the tensors.
        cuts, connections: of the link.
        growth_mb: of the server's memory at its highest, from before the client came.
        updates: accepted, all of them counted.
    """

    up: float
    down: float
    cuts: int
    connections: int
    growth_mb: float
    updates: int


def peak_mb(pid):
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM"))


def course(tmp_path, kilobytes, link, *, during=None, **extra):
    """Let one client learn one round behind a link.

    ``during(federation, bad)`` kills both in the middle; they are started again then.
    """
    port = free_port()
    with BadLink(port, link) as bad, LocalFederation(tmp_path, port=port) as federation:
        told = [f"127.0.0.1:{bad.port}"]
        arguments = one_round(kilobytes, federation__advertise=told, **extra)
        federation.serve(*arguments, env=ENV)
        before = peak_mb(federation.server.pid)
        folder = write_client(tmp_path / "data", (0, 1))
        federation.join("a", folder, env=ENV)
        if during is not None:
            during(federation, bad)
            federation.serve(*arguments, env=ENV)
            federation.join("a", folder, env=ENV)
        federation.until("run_done", timeout_s=280)
        federation.check_clients()
        growth = peak_mb(federation.server.pid) - before
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        (row,) = ledger.rounds.all(run.run_id)
        updates = ledger.updates.of_round(row.key)
        assert all(u.status is UpdateStatus.COUNTED for u in updates)
    ratio = {side: count / (kilobytes * 1000) for side, count in bad.carried.items()}
    return Course(ratio[UP], ratio[DOWN], bad.cuts, bad.connections, growth, len(updates))
