"""Unlabelled images as processes: they count once, and only after a good enough evaluation."""

import signal

import numpy as np
import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.reports.results.run_data import collect
from system.analytic_kit import ENGINE, options
from system.kit import newest_state, open_ledger, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(600)]

TASKS = [["0", "1"], ["2", "3"]]


def offer(folder, classes, per_class, offset):
    """Write images into one folder that says nothing of their classes."""
    write_client(folder / "sorted", classes, per_class=per_class, offset=offset)
    for number, path in enumerate(sorted((folder / "sorted").rglob("*.png"))):
        path.rename(folder / f"{number}.png")
    return folder


def rounds(federation):
    """Return (task, kind, names of the counted clients, reason of the end) of each round."""
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
        names = {k: c.name.rpartition(":")[2] for k, c in data.clients.items()}
        return [
            (r.round.task, r.round.kind, "".join(sorted(names[c] for c in r.counted)), r.round.why)
            for r in data.rounds
        ]


def test_they_count_once_and_a_killed_client_counts_none_twice(tmp_path):
    """a offers 60 images and b none; a is killed with its update of them on disk."""
    a = write_client(tmp_path / "a", range(4), per_class=40)
    b = write_client(tmp_path / "b", range(4), per_class=40, offset=40)
    camera = offer(tmp_path / "camera", range(4), 15, 80)
    more = {
        "method__pseudo": "margin",
        "method__pseudo_accuracy": 0.1,
        "method__pseudo_margin": 0.05,
    }
    with LocalFederation(tmp_path) as federation:
        federation.serve(*options(TASKS, 2, **more))
        control_socket.ask(federation.federation, "pause")
        federation.join("a", a, *ENGINE, "--unlabelled", str(camera))
        federation.join("b", b, *ENGINE)
        for _ in "ab":
            federation.until("announced", timeout_s=300)
        control_socket.ask(federation.federation, "resume")
        federation.until("round_opened", text="pseudo round 0", timeout_s=300)
        federation.clients["a"].send_signal(signal.SIGKILL)
        federation.clients["a"].wait()
        federation.join("a", a, *ENGINE, "--unlabelled", str(camera))
        federation.until("task_done", text="task 1", timeout_s=300)
        wanted = [("train", "ab"), ("evaluate", ""), ("pseudo", "a"), ("evaluate", "")]
        assert [
            (kind, who if kind != "evaluate" else "") for _, kind, who, _ in rounds(federation)
        ] == 2 * wanted
        counted = newest_state(federation).f32("pseudo.count")
        assert 0 < counted.sum() <= 60
        state = newest_state(federation)
        assert (
            np.array_equal(state.f32("total.count"), [56.0] * 4)
            or state.f32("total.count").sum() > 0
        )
        assert "offers no unlabelled images" in federation.log("b").read_text()
        federation.check_clients()


def test_a_poor_evaluation_shuts_the_door(tmp_path):
    """Fewer test images than are needed to be sure: no client is asked, and it is said why."""
    a = write_client(tmp_path / "a", range(4), per_class=20)
    camera = offer(tmp_path / "camera", range(4), 5, 80)
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *options(TASKS, 1, method__pseudo="margin"))
        federation.join("a", a, *ENGINE, "--unlabelled", str(camera))
        assert federation.server.wait(300) == 0, federation.last_words("server")
        found = rounds(federation)
        assert [(kind, why) for _, kind, _, why in found[2:4]] == [
            ("pseudo", "unsure"), ("evaluate", "unchanged"),
        ]  # fmt: skip
        assert "unlabelled images are not used" in federation.log("server").read_text()
        assert not any(n.startswith("pseudo") for n in newest_state(federation).tensors)
