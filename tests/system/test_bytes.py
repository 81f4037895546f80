"""The byte ledger of a real federation: what messages take, and what the kernel counted."""

import sys
from collections import defaultdict

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Direction
from fcil_server.reports.results.round_views import Bytes
from fcil_server.reports.results.run_data import collect
from system.kit import open_ledger, settings, write_client

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts for us"),
]

QUIET = {"federation__heartbeat_s": 300.0}  # no heartbeat in so short a run
# Bytes: the last messages of a session, which the kernel need not see confirmed when it is asked.
ON_ITS_WAY = 1000
NO_MESSAGE = 400  # and what the kernel saw beside all messages that are known


def by_client(ledger, run):
    flows = defaultdict(list)
    for flow in ledger.bytes.all(run):
        flows[flow.client, flow.direction].append(flow)
    return {key: Bytes.total(rows) for key, rows in flows.items()}


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.full)])
def test_every_byte_that_the_kernel_counted_has_a_cause(tmp_path, processes):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(federation__intake=processes, **QUIET)
        federation.serve("--until-done", *arguments)
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
        clients = {c.client_id for c in ledger.clients.all()}
        counted = by_client(ledger, data.run.run_id)
    assert set(counted) == {(c, d) for c in clients for d in Direction}
    for total in counted.values():
        assert total.wire > 1000
        assert -ON_ITS_WAY <= total.rest <= NO_MESSAGE
        # Every segment has a header, so frames are more than what they carry.
        assert total.wire_kernel < total.link < 3 * total.wire_kernel
    up, down = (data.bytes_of(d) for d in Direction)
    assert up.tensor < up.sealed < up.application < up.wire
    assert down.tensor < down.sealed < down.application < down.wire


@pytest.mark.full
def test_counts_go_on_over_a_killed_client_and_a_killed_server(tmp_path):
    arguments = settings(round__rounds_per_task=2, tasks__classes=[["0", "1"]], **QUIET)
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *arguments)
        a = write_client(tmp_path / "a", range(2))
        federation.join("a", a)
        federation.until("connected")
        federation.kill_client("a")
        federation.until("left")
        federation.server.terminate()  # what it counted until now is written
        assert federation.server.wait(60) == 0, federation.last_words("server")
        federation.serve("--until-done", *arguments)
        federation.join("a", a)
        federation.join("b", write_client(tmp_path / "b", range(2), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        counted = by_client(ledger, ledger.runs.newest().run_id)
    for total in counted.values():
        assert total.wire > 1000
        assert abs(total.rest) <= 3 * ON_ITS_WAY


@pytest.mark.full
def test_heartbeats_are_the_rest(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(
            "--until-done", *settings(federation__heartbeat_s=0.25, round__min_clients=2)
        )
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
    for direction in Direction:
        assert data.bytes_of(direction).rest > 40  # about one heartbeat; b starts slower than one
