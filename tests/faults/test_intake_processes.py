"""Killed with -9 where three intake processes hold the connections: one of these, or the server.

As in test_crash_walk.py: the run ends with the state of an undisturbed one, whose server has no
intake processes.
"""

import pytest

from faults.kit import SERVER, Keeper, Scene, keeps_its_promises, planted, rule
from faults.test_crash_walk import NAMED_KILLS, survive

pytestmark = [pytest.mark.processes, pytest.mark.full]

PROCESS = "fcil_server.sessions.intake_pool.process"
PROCESSES = {"federation__intake": 3}
# Of the server, which reads and sends nothing by itself: what it writes.
KILLS = {name: kill for name, kill in NAMED_KILLS.items() if kill[0] not in ("recv", "send")}


@pytest.fixture(scope="module")
def pool_scene(tmp_path_factory):
    return Scene.make(tmp_path_factory.mktemp("pool"))


def test_the_server_killed_where_an_update_could_be_lost_or_counted_twice(pool_scene, tmp_path):
    extra = {"round__rounds_per_task": 3}
    hits, expected = tmp_path / "hits", pool_scene.undisturbed(**extra)
    with pool_scene.copy() as federation:
        rules = [
            rule(op, where, place=place, when=when, name=name, depth=8 if "_commit" in place else 3)
            for name, (op, where, place, when) in KILLS.items()
        ]
        plan = {"program": SERVER, "root": str(federation.directory), "turns": 1}
        env = planted(tmp_path, plan | {"hits": str(hits), "rules": rules})
        Keeper(federation, pool_scene, server_env=env, extra=extra | PROCESSES).run()
        assert hits.read_text().split() == list(KILLS)
        keeps_its_promises(federation, expected)


def test_an_intake_process_killed_at_every_message(pool_scene, tmp_path):
    """The server starts another one each time, and goes on."""
    kills = survive(pool_scene, tmp_path, PROCESS, (0, 1), extra=PROCESSES)
    for message in ("recv update", "recv chunk", "send ack", "send parts"):
        assert any(f" {message} " in f"{kill} " for kill in kills), (message, kills)
