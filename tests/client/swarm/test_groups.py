"""How slots become groups, what a group's lines mean, and when it is started again."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fcil_client.cli import main as cli
from fcil_client.cli.swarm import watched_groups
from fcil_client.swarm import ray as swarm_ray
from fcil_client.swarm.groups import (
    AGAIN,
    Group,
    GroupShare,
    as_text,
    divide,
    exit_code,
    together,
)
from fcil_client.swarm.seats import Seat, read_slots
from fcil_protocol.errors import ConfigError, UsageError

SUMMARY = {
    "members": 2, "enrolled": 2, "connected": 1, "fetching": 0, "working": 1, "sending": 0,
    "counted": 3, "round": "task 0 train round 1", "run": "r", "bytes_up": 10, "bytes_down": 20,
    "failed": {},
}  # fmt: skip


def line(event, **fields):
    return json.dumps({"event": event, "at": 1.0, **fields}) + "\n"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 30])
def test_every_slot_is_in_one_group_and_groups_are_alike(count):
    slots = [0, 1, 2, 4, 5, 6, 7, 9, 12, 13]
    groups = divide(slots, count)
    assert [slot for group in groups for slot in group] == slots
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == min(count, len(slots))
    for group in groups:
        assert read_slots(as_text(group), 14) == group


class Actor:
    """A group's process somewhere, which hears that it shall end."""

    def __init__(self):
        self.stop = self
        self.stopped = 0

    def remote(self):
        self.stopped += 1


@pytest.mark.parametrize(
    ("words", "code", "stopped"),
    [(["--together"], 1, 1), (["--together"], 0, 0), (["--until-done"], 1, 0)],
)
def test_a_group_that_fails_ends_the_others_only_where_all_go_together(words, code, stopped):
    groups, said = [Group(0, "0-1"), Group(1, "2-3")], []
    all_groups = swarm_ray.RayGroups(
        None, groups, words, GroupShare(), lambda _, text: said.append(text), lambda _: None
    )
    other = Actor()
    all_groups._running["answer"] = swarm_ray.Running(groups[1], other, "answer")
    all_groups._left(swarm_ray.Running(groups[0], None, None), code)
    assert other.stopped == stopped
    assert any(text.startswith("stopping all groups") for text in said) == bool(stopped)


def test_slots_are_written_shortly():
    assert as_text([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"


def test_what_does_not_fit_a_cluster_is_said_with_both_numbers():
    share = GroupShare(cpus=1.5, gpus=0.5)
    assert share.lacking_resources(4, {"CPU": 6.0, "GPU": 2.0}) == ""
    assert (
        share.lacking_resources(5, {"CPU": 8.0, "GPU": 2.0})
        == "2.5 GPUs are needed, the cluster has 2"
    )
    assert "1.5 CPUs are needed, the cluster has 0" in share.lacking_resources(1, {"GPU": 1.0})
    assert (share.threads, GroupShare(0.2).threads, GroupShare(4).threads) == (1, 1, 4)


def test_notes_are_shown_with_group_and_member_and_other_lines_are_kept_as_last_words():
    group = Group(3, "0-1")
    told = group.on_output(line("note", member="swarm-000", level="warning", text="slow"))
    assert told == ("warning", "group 3: swarm-000: slow")
    assert group.on_output(line("summary", **SUMMARY)) is None
    assert group.summary["counted"] == 3
    for odd in ("[1]\n", '"note"\n', "\n", "error: there is no folder\n", "\n"):
        assert group.on_output(odd) is None
    assert group.words == "error: there is no folder"


def test_summaries_add_up_and_the_round_is_that_of_most():
    groups = [Group(i, "0", summary=dict(SUMMARY)) for i in range(3)]
    groups[0].summary |= {"round": None, "failed": {"swarm-000": "gone"}}
    told = together([*groups, Group(3, "1")])
    assert (told["members"], told["counted"], told["bytes_down"]) == (6, 9, 60)
    assert told["round"] == SUMMARY["round"]
    assert told["failed"] == {"swarm-000": "gone"}


@pytest.mark.parametrize("code", [None, -9, 137, 143])
def test_who_was_killed_is_started_again_so_many_times_and_no_more(code):
    group = Group(0, "0-4")
    assert [group.left(code, stopping=False) for _ in range(AGAIN + 1)] == ["again"] * AGAIN + [
        "lost"
    ]
    assert group.code
    assert exit_code([group]) != 0


def test_who_ended_by_itself_or_was_asked_to_is_not_started_again():
    for code, stopping, expected in ((0, False, 0), (1, False, 1), (-9, True, 1), (None, True, 1)):
        group = Group(0, "0")
        assert group.left(code, stopping=stopping) == "over"
        assert group.code == expected
    done = Group(0, "0")
    done.on_output(line("end", **SUMMARY, done=True))
    assert done.left(-6, stopping=False) == "over", "its work was done before it fell"


def test_the_worst_code_of_all_groups_is_the_swarms():
    over = [Group(0, "0", code=0), Group(1, "1", code=0)]
    assert exit_code(over) == 0
    assert exit_code([*over, Group(2, "2", code=1)]) == 1
    assert exit_code([*over, Group(2, "2")]) == 1, "nobody knows what became of it"


def test_a_group_gets_the_words_of_the_command_line_but_those_about_all(tmp_path, monkeypatch):
    seen = []

    def kept(_seats, count, words, share, address, *_):
        seen.append((count, words, share, address))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fcil_client.cli.swarm.watched_groups", kept)
    monkeypatch.setattr("fcil_client.swarm.seats.find_seats", lambda *_: [])
    words = "--data d --partition p.json --until-done --nice 3 --slots 1-4 --engine onnx"
    words += " --no-training-metrics"
    ray = "--spread ray --groups 2 --gpus-per-group 0.5 --ray-address here:1 --format jsonl"
    done = CliRunner().invoke(cli.app, ["swarm", *words.split(), *ray.split()])
    assert done.exit_code == 0, done.output
    ((count, passed, share, address),) = seen
    assert (count, share, address) == (2, GroupShare(1.0, 0.5), "here:1")
    assert passed[passed.index("--data") + 1] == str(tmp_path / "d")
    assert {"--until-done", "--no-training-metrics"} <= set(passed)
    assert "--training-metrics" not in passed
    assert {"--slots", "--spread", "--groups", "--ray-address", "--format"} & set(passed) == set()
    assert passed[passed.index("--nice") + 1] == "3"


def test_without_ray_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(swarm_ray, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package ray") as told:
        swarm_ray.load_ray("local")
    assert "fcil[ray]" in told.value.action


def test_folders_are_not_spread_and_the_sentence_says_what_is(tmp_path):
    with pytest.raises(UsageError, match="divides the slots of a partition"):
        watched_groups([Seat("a", tmp_path)], 2, [], GroupShare(), None, None, None)


# --- the process on a node --------------------------------------------------------------------

HELD = """
import os, signal, sys, threading

assert sys.argv[1:] == ["swarm", "--data", "d"]
signal.signal(signal.SIGINT, lambda *_: (print("in order", flush=True), os._exit(0)))
print("begins", flush=True)
threading.Event().wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize(("asked", "code", "rest"), [(True, 0, ["in order\n"]), (False, 143, [])])
def test_a_group_ends_in_order_when_asked_and_at_once_when_its_starter_is_gone(
    asked, code, rest, tmp_path, monkeypatch
):
    """Also where Ctrl-C's signal is blocked, as in the processes of Ray."""
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    right = swarm_ray.module_command
    monkeypatch.setattr(swarm_ray, "module_command", lambda way, _, *w: right(way, "held", *w))
    actor = swarm_ray.Actor()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        actor.start(["--data", "d"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        assert actor._lines.get(timeout=60) == "begins\n"
        if asked:
            actor.stop()
        else:
            actor._child.ask()
        assert list(iter(lambda: actor._lines.get(timeout=60), None)) == rest
        assert actor._child.returncode == code
    finally:
        actor._child.kill()


def test_rays_workers_do_not_get_the_directory_where_one_stands(tmp_path, monkeypatch):
    """Ray puts that of who connects before all others in which its workers look for modules."""
    monkeypatch.chdir(tmp_path)
    seen = []
    ray = SimpleNamespace(init=lambda **_: seen.append(os.getcwd()))
    swarm_ray.connect(ray, "local")
    assert seen == ["/"]
    assert os.getcwd() == str(tmp_path)
