"""Unlabelled images as processes: they count once, and only after a good enough evaluation."""

import signal

import pytest

from fcil_adapters.contract.local_images import counted_digests
from fcil_client.state.home import Home, data_digest
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.reports.results.run_data import collect
from system.analytic_kit import ENGINE, newest_state, options
from system.kit import open_ledger, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(600)]

TASKS = [["0", "1"], ["2", "3"]]
OFFERED = 60
PSEUDO = {"method__pseudo": "margin"}


def member(folder, offset, tests):
    """Write 20 training images and some test images of each of four digits."""
    write_client(folder / "train", range(4), per_class=20, offset=offset)
    write_client(folder / "test", range(4), per_class=tests, offset=offset + 20)
    return folder


@pytest.fixture
def camera(tmp_path):
    """Return a folder of images of the first task's digits that says nothing of their classes."""
    folder = tmp_path / "camera"
    folder.mkdir()
    take_pictures(folder, TASKS[0])
    return folder


def take_pictures(camera, digits):
    """Put half of the images into the folder; their names do not tell the digit."""
    sorted_ = camera.with_name(f"sorted-{digits[0]}")
    each = OFFERED // 2 // len(digits)
    write_client(sorted_, map(int, digits), per_class=each, offset=160)
    for number, path in enumerate(sorted(sorted_.rglob("*.png"))):
        path.rename(camera / f"{digits[0]}-{number}.png")


def rounds(federation):
    """Return (task, kind, names of the counted clients, reason of the end) of each round."""
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
        names = {k: c.name.rpartition(":")[2] for k, c in data.clients.items()}
        return [
            (r.round.task, r.round.kind, "".join(sorted(names[c] for c in r.counted)), r.round.why)
            for r in data.rounds
        ]


def test_they_count_once_also_where_a_client_is_killed(tmp_path, camera):
    """a offers images and b none; a is killed while its first round of them is open."""
    folders = {"a": member(tmp_path / "a", 0, 60), "b": member(tmp_path / "b", 80, 60)}
    more = {"a": ("--unlabelled", str(camera)), "b": ()}
    with LocalFederation(tmp_path) as federation:
        federation.serve(*options(TASKS, 2, **PSEUDO))
        assert (
            "counted under the classes that the model gives" in federation.log("server").read_text()
        )
        control_socket.ask(federation.federation, "pause")
        for name, folder in folders.items():
            federation.join(name, folder, *ENGINE, *more[name])
        for _ in folders:
            federation.until("announced", timeout_s=300)
        control_socket.ask(federation.federation, "resume")
        federation.until("round_opened", text="pseudo round 0", timeout_s=300)
        federation.clients["a"].send_signal(signal.SIGKILL)
        federation.clients["a"].wait()
        federation.join("a", folders["a"], *ENGINE, *more["a"])
        # Earlier, they would count as the digits that the federation knows then.
        federation.until("round_opened", text="evaluate round 0", timeout_s=300)
        take_pictures(camera, TASKS[1])
        federation.until("task_done", text="task 1", timeout_s=300)
        found = [(kind, who) for _, kind, who, _ in rounds(federation)]
        one = [("train", "ab"), ("evaluate", "ab"), ("pseudo", "a"), ("evaluate", "ab")]
        assert found == 2 * one
        counts = newest_state(federation).f32("pseudo.count")
        (home,) = (federation.directory / "state").rglob(data_digest(folders["a"]))
        assert counts.sum() == len(counted_digests(Home(home).state())) <= OFFERED
        assert (counts > 0).all()
        assert "offers no unlabelled images" in federation.log("b").read_text()
        federation.check_clients()


def test_too_few_test_images_leave_them_unused(tmp_path, camera):
    """No client is asked, the reason is given, and the same model is not evaluated twice."""
    folder = member(tmp_path / "a", 0, 30)
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *options(TASKS, 1, **PSEUDO))
        federation.join("a", folder, *ENGINE, "--unlabelled", str(camera))
        assert federation.server.wait(300) == 0, federation.last_words("server")
        found = [(kind, why) for _, kind, _, why in rounds(federation)]
        assert found[2:4] == [("pseudo", "unsure"), ("evaluate", "unchanged")]
        assert "unlabelled images are not used" in federation.log("server").read_text()
        assert not any(n.startswith("pseudo") for n in newest_state(federation).tensors)
