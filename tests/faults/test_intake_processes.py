"""Killed with -9 where three intake processes hold the connections: one of these, or the server.

As in test_crash_walk.py: the run ends with the state of an undisturbed one, whose server has no
intake processes.
"""

import pytest

from faults.kit import Scene
from faults.test_crash_walk import NAMED_KILLS, survive, survive_named

pytestmark = [pytest.mark.processes, pytest.mark.full]

PROCESS = "fcil_server.sessions.intake_pool.process"
PROCESSES = {"federation__intake": 3}
# Of the server, which reads and sends nothing by itself: what it writes.
KILLS = {name: kill for name, kill in NAMED_KILLS.items() if kill[0] not in ("recv", "send")}


@pytest.fixture(scope="module")
def pool_scene(tmp_path_factory):
    return Scene.make(tmp_path_factory.mktemp("pool"))


def test_the_server_killed_where_an_update_could_be_lost_or_counted_twice(pool_scene, tmp_path):
    survive_named(pool_scene, tmp_path, KILLS, **PROCESSES)


def test_an_intake_process_killed_at_every_message(pool_scene, tmp_path):
    """The server starts another one each time, and goes on."""
    kills = survive(pool_scene, tmp_path, PROCESS, (0, 1), extra=PROCESSES)
    for message in ("recv update", "recv chunk", "send ack", "send parts"):
        assert any(f" {message} " in f"{kill} " for kill in kills), (message, kills)
