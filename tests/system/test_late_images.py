"""Late images as processes: they count once, and the classifier is that of no delay."""

import numpy as np
import pytest

from fcil_adapters.contract.local_images import COUNTED, digests_of
from fcil_client.state.home import Home
from fcil_protocol.payloads.payload import unpack
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import UpdateStatus
from system.analytic_kit import ENGINE, TOLERANCE, newest_state, options, outcome
from system.kit import open_ledger, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

COUNT = {"method__late": "count"}


def rounds(federation):
    """Return (task, kind, counted clients) of each closed round, and images by client."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        names = {c.client_id: c.name.rpartition(":")[2] for c in ledger.clients.all()}
        found = [
            (
                row.task,
                row.kind,
                "".join(
                    sorted(
                        names[u.client]
                        for u in ledger.updates.of_round(row.key)
                        if u.status is UpdateStatus.COUNTED
                    )
                ),
            )
            for row in ledger.rounds.all(run)
            if row.closed_at is not None
        ]
        images = {
            name: sum(u.samples for u in ledger.updates.of_client(run, c) if counts(u))
            for c, name in names.items()
        }
    return found, images


def counts(update):
    """Return True if an update is in a state."""
    return update.status is UpdateStatus.COUNTED and update.kind in ("train", "late")


def homes(federation):
    """Return the clients' directories."""
    return [path.parent for path in (federation.directory / "state").rglob("state.safetensors")]


def counted(home):
    """Return the digests of the images that a client knows to be counted.

    It may have ended before the last verdict came: then that update's state waits for it.
    """
    waiting = list((home / "provisional").glob("*.safetensors"))
    state = unpack(waiting[0].read_bytes()) if waiting else Home(home).state()
    return digests_of(state, COUNTED)


def late_notes(federation):
    """Return the notes about late images that were counted, oldest first."""
    with open_ledger(federation) as ledger:
        return [e.text for e in ledger.events.after(0, limit=1000) if e.code == "late_counted"]


@pytest.mark.full
def test_who_sleeps_through_two_tasks_is_counted_when_it_wakes(tmp_path):
    """b joins first after task 1; in task 2 the classifier is that of everybody's images."""
    tasks = [["0", "1"], ["2"], ["3"]]
    folders = [write_client(tmp_path / n, range(4), per_class=9, offset=40 * k)
               for k, n in enumerate("ab")]  # fmt: skip
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *options(tasks, 1, **COUNT))
        federation.join("a", folders[0], *ENGINE)
        federation.until("task_done", text="task 1", timeout_s=300)
        control_socket.ask(federation.federation, "pause")
        federation.join("b", folders[1], *ENGINE)
        federation.until("announced", text=":b", timeout_s=300)
        federation.until("learned_before", text="counted between rounds")
        control_socket.ask(federation.federation, "resume")
        assert federation.server.wait(300) == 0, federation.last_words("server")
        found, _ = rounds(federation)
        assert [one for one in found if one[1] == "late"] == [(2, "late", "b")]
        (note,) = late_notes(federation)
        assert ":b (" in note
        assert ":a" not in note
        got, exact, _ = outcome(federation, folders)
        for name in list(federation.clients):
            federation.kill_client(name)
    assert np.abs(got - exact).max() <= TOLERANCE * np.abs(exact).max()


@pytest.mark.full
def test_images_that_come_while_the_run_waits_count_once_through_kills_of_both_sides(tmp_path):
    """Classes are discovered. b comes after their task, and its folder grows later."""
    a = write_client(tmp_path / "a", range(2), per_class=9)
    b = write_client(tmp_path / "b", range(2), per_class=9, offset=40)
    given = options([], 1, tasks__schedule="discovered", tasks__settle_s=0.5,
                    round__late_every_s=0, **COUNT)  # fmt: skip
    with LocalFederation(tmp_path) as federation:
        federation.serve(*given)
        federation.join("a", a, *ENGINE)
        federation.until("task_done", timeout_s=300)
        federation.join("b", b, *ENGINE)
        federation.until("round_opened", text="late round 0", timeout_s=300)
        federation.kill_server()
        federation.kill_client("b")
        federation.serve(*given)
        federation.join("b", b, *ENGINE)
        federation.until("late_counted", text=":b", timeout_s=300)
        before = newest_state(federation).f32("total.count").sum()
        # A copy, an image in another class's folder, and new ones.
        (one, other, *_) = sorted((b / "0").iterdir())
        (b / "0" / "copy.png").write_bytes(one.read_bytes())
        (b / "1" / other.name).write_bytes(other.read_bytes())
        other.unlink()
        write_client(tmp_path / "more", (0,), per_class=20, offset=60)
        for path in sorted((tmp_path / "more" / "0").iterdir()):
            path.rename(b / "0" / path.name)
        federation.until("round_opened", text="late round", timeout_s=300)
        federation.kill_client("b")
        federation.join("b", b, *ENGINE)
        federation.until("late_counted", text=":b", timeout_s=300)
        federation.stop()
        state = newest_state(federation)
        found, images = rounds(federation)
        digests = {home.name: counted(home) for home in homes(federation)}
    # After a restart of the server a is asked too, once, and has nothing.
    counted_by = [who for _, kind, who in found if kind == "late" and who]
    assert counted_by == ["b", "b"]
    assert state.f32("total.count").sum() == sum(images.values()) > before
    assert sorted(map(len, digests.values())) == sorted(images.values())
    assert all(len(set(some)) == len(some) for some in digests.values())
