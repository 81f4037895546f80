"""Killed with -9 at every point where something reaches the disk or a peer; restarted; equal.

Before it, after it, and in the middle of every write. A process that is started again kills
itself at the next point that nobody was killed at yet, so one federation survives many kills
in a row; the walk ends when there is none left.
"""

import contextlib
import json
import subprocess

import pytest

from faults.kit import (
    CLIENT,
    CLIENT_WORKER,
    SERVER,
    SERVER_WORKER,
    Keeper,
    keeps_its_promises,
    planted,
    rule,
    walk_plan,
)
from fcil_protocol.errors import LinkError
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings

pytestmark = [pytest.mark.processes, pytest.mark.full]

PARTS = {SERVER: 24, CLIENT: 12}  # of the walk, a test each

# Two deaths on one call are not an accident any more: a worker does one whole call in between.
REST = {SERVER_WORKER: 8, CLIENT_WORKER: 8}

# operation, path or message, place, when
NAMED_KILLS = {
    "after_receive": ("recv", "^chunk", "", "before"),
    "before_fsync": ("sync", "spool/.*seg", "spool.Spool.sync", "before"),
    "after_fsync": ("sync", "spool/.*seg", "spool.Spool.sync", "after"),
    "after_the_ledger_before_ack": ("commit", "ledger", "intake.Intake._commit_few", "after"),
    "after_ack": ("send", "^ack", "intake.Intake._commit", "after"),
    "half_a_state": ("write", "states/.*safetensors", "", "half"),
    "after_the_state_before_commit": ("replace", "states/.*json", "", "after"),
    "after_commit_before_publish": ("commit", "ledger", "closing.Closing._aggregate", "after"),
    "half_a_part": ("write", "parts/", "", "half"),
}


# Five rounds, and so five states, instead of one.
MASKED_SAMPLE = {SERVER: 24, CLIENT: 16}
MASKED_STATES = {1: "mask_keys", 2: "mask_shares", 3: "train", 4: "mask_vote", 5: "unmask"}


def survive(scene, tmp_path, program, part, clients="ab", *, extra=None, **more):
    """Run one federation through a part of the walk; return where somebody was killed.

    Args:
        extra: settings of the disturbed run alone, which change no state.
    """
    rounds = {"round__rounds_per_task": 4} if program in REST else {}
    more |= {"rest": REST.get(program, 0)}
    expected = scene.undisturbed(**rounds)
    extra = rounds | (extra or {})
    with scene.copy() as federation:
        done = tmp_path / "done"
        env = planted(tmp_path, walk_plan(federation, program, done, part, **more))
        side = "server_env" if program.startswith(SERVER) else "client_env"
        Keeper(federation, scene, **{side: env}, planted_clients=clients, extra=extra).run()
        keeps_its_promises(federation, expected)
    return done.read_text().splitlines() if done.exists() else []


def survive_named(scene, tmp_path, kills, **settings):
    """Run one federation whose server is killed at each of these points, in their order.

    Args:
        settings: of the disturbed run alone, which change no state.
    """
    extra = {"round__rounds_per_task": 3}
    hits, expected = tmp_path / "hits", scene.undisturbed(**extra)
    with scene.copy() as federation:
        rules = [
            rule(op, where, place=place, when=when, name=name, depth=8 if "_commit" in place else 3)
            for name, (op, where, place, when) in kills.items()
        ]
        plan = {"program": SERVER, "root": str(federation.directory), "turns": 1}
        env = planted(tmp_path, plan | {"hits": str(hits), "rules": rules})
        Keeper(federation, scene, server_env=env, extra=extra | settings).run()
        assert hits.read_text().split() == list(kills)
        keeps_its_promises(federation, expected)


def test_kill_9_where_an_update_could_be_lost_or_counted_twice(scene, tmp_path):
    survive_named(scene, tmp_path, NAMED_KILLS)


@pytest.mark.parametrize("program", REST)
def test_every_point_of_a_worker(scene, tmp_path, program):
    kills = survive(scene, tmp_path, program, (0, 1))
    assert len(kills) >= 2, "a worker has fewer points than one can believe"


@pytest.mark.parametrize("program", MASKED_SAMPLE)
def test_a_sample_of_kills_behind_masks(masked_scene, tmp_path, program):
    kills = survive(masked_scene, tmp_path, program, (0, MASKED_SAMPLE[program]))
    assert len(kills) >= 2, "the sample has become too small"


@pytest.mark.timeout(600)
def test_a_client_killed_at_each_write_of_its_secrets_of_masks(masked_scene, tmp_path):
    """In the middle of it, and before and after the new file is in the place of the old one."""
    points = r"(half write|(before|after) (replace|unlink)) \S+ \S*mask_secrets"
    kills = survive(masked_scene, tmp_path, CLIENT, (0, 1), "a", only=points, depth=5)
    places = (
        "begin", "settle_members", "settle_delivered", "settle_masked", "settle_survivors", "erase"
    )  # fmt: skip
    for place in places:
        assert any(f"MaskFile.{place}" in key for key in kills), place
    for what in ("half write", "after replace", "before unlink"):
        assert any(key.startswith(what) and "masked.safetensors" in key for key in kills), what
    place = masked_scene.directory / f"copy{masked_scene.copies}"
    kept = [json.loads(path.read_text())["newest"] for path in place.rglob("masks.json")]
    assert [notes["mask"] for notes in kept] == [""] * 3, "the secrets are erased"
    assert list(place.rglob("masked.safetensors")) == [], "and so is what they hide"


@pytest.mark.timeout(600)
def test_a_server_killed_at_the_state_of_each_round_of_a_masked_one(masked_scene, tmp_path):
    """And its worker, once, while it removes the masks."""
    hits, opened = tmp_path / "hits", tmp_path / "opened"
    expected = masked_scene.undisturbed()
    with masked_scene.copy() as federation:
        rules = [
            rule(op, where.format(number), place=place, when=when, name=f"{name}_{kind}", depth=8)
            for number, kind in MASKED_STATES.items()
            for name, (op, where, place, when) in {
                "half": ("write", "states/.*{:06d}.*safetensors", "", "half"),
                "written": ("replace", "states/.*{:06d}.*json", "", "after"),
                "committed": ("commit", "ledger", "closing.Closing._aggregate", "after"),
            }.items()
        ]
        plan = {"program": SERVER, "root": str(federation.directory), "turns": 1}
        opening = rule("send", "progress", place="_remove_masks", name="opening")
        env = planted(
            tmp_path,
            plan | {"hits": str(hits), "rules": rules},
            plan | {"program": SERVER_WORKER, "hits": str(opened), "rules": [opening]},
        )
        Keeper(federation, masked_scene, server_env=env).run()
        assert hits.read_text().split() == [r["name"] for r in rules]
        assert opened.read_text().split() == ["opening"]
        keeps_its_promises(federation, expected)
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest().run_id
            made = {r.new_state: r.kind for r in ledger.rounds.all(run) if r.new_state}
        assert made == MASKED_STATES, "the kills were where their names say"


@pytest.mark.parametrize("part", range(PARTS[SERVER]))
def test_every_point_of_the_server(scene, tmp_path, part):
    survive(scene, tmp_path, SERVER, (part, PARTS[SERVER]))


@pytest.mark.parametrize("part", range(PARTS[CLIENT]))
def test_every_point_of_the_clients(scene, tmp_path, part):
    survive(scene, tmp_path, CLIENT, (part, PARTS[CLIENT]))


@pytest.mark.parametrize("program", [SERVER, CLIENT])
def test_points_at_their_later_occurrences(scene, tmp_path, program):
    survive(scene, tmp_path, program, (1, 4), chance=0.3, seed=7)


@pytest.mark.parametrize("part", range(8))
def test_a_server_killed_at_each_point_of_its_first_start(tmp_path, part):
    assert first_start(tmp_path, (part, 8)) >= 2, "a start has fewer points than one can believe"


def first_start(tmp_path, part):
    done, kills = tmp_path / "done", 0
    with LocalFederation(tmp_path / "new") as federation:
        env = planted(tmp_path, walk_plan(federation, SERVER, done, part))
        while True:
            try:
                federation.serve(*settings(), env=env)
                until_it_waits(federation)
            except LinkError:
                assert federation.server.wait() == -9, federation.last_words("server", 20)
                kills += 1
            else:
                break
        assert "Traceback" not in federation.log("server").read_text()
        if kills:
            assert kills == len(done.read_text().splitlines())
    return kills


def until_it_waits(federation):
    """Wait until its first round waits for clients; a task may have been opened by an earlier life."""
    while not (federation.status() or {"now": {"waiting_for": ""}})["now"]["waiting_for"]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise LinkError(f"the server ended with code {federation.server.wait(0.05)}.")
