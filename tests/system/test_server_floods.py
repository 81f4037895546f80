"""A server, or a relay, floods a client: what it costs the client's memory, and what comes after.

PROTOCOL.md 2.4 says what may lie unread. Only bytes and what was counted are looked at, never time.
"""

import sys

import pytest

from attack_kit.lying_server import LyingServer
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.lab.local.federation import LocalFederation
from system.kit import settings, write_client
from system.test_memory_floods import LARGEST, MOST_MB, memory_mb

pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what has come"),
]

FLOODS = {
    "one-message": [(bytes(LARGEST), 190)],
    "small-frames": [(bytes(34), 400_000)],
}
TIMES = 4
ONE_TASK = {"tasks__classes": [["0", "1"]]}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_costs_a_client_little_memory_and_no_round(tmp_path, flood):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(**ONE_TASK))
        federation.join("ann", write_client(tmp_path / "ann", range(2)))
        federation.until("announced")
        keys = PrivateKeys.load(federation.federation / "keys" / "server.json")
        federation.kill_server()
        before = memory_mb(federation.clients["ann"].pid)

        liar = LyingServer(federation.port, keys)
        for _ in range(TIMES):
            liar.flood(flood)
        liar.close()
        assert memory_mb(federation.clients["ann"].pid) - before < MOST_MB
        log = federation.log("ann").read_text()
        assert "sent more than was asked for" in log
        assert "Traceback" not in log

        federation.serve(*settings(**ONE_TASK))
        federation.join("bob", write_client(tmp_path / "bob", range(2), offset=12))
        federation.until("run_done")
        assert "Traceback" not in federation.log("ann").read_text()
