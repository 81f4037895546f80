"""Asynchronous rounds as processes: a slow client continues, and counts in a later round."""

import re
import signal

import pytest

from fcil_protocol.errors import LinkError
from fcil_protocol.process import control_socket
from fcil_server.aggregation.store import StateStore
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import UpdateStatus
from system.kit import open_ledger, settings, signal_workers, until_log, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROUNDS = 5


def asynchronous(**extra):
    given = {
        "method__name": "fedavg_lora", "method__preset": "short", "method__augment": "jitter",
        "tasks__classes": [["0", "1"]], "round__mode": "async", "round__take": 2,
        "round__rounds_per_task": ROUNDS, "round__settle_s": 0.2,
    }  # fmt: skip
    return settings(**given | extra)


def begin(federation, tmp_path, **extra):
    """Join a, b and c, ready and asked for nothing yet; the worker of c is asleep."""
    federation.serve("--until-done", *asynchronous(**extra))
    control_socket.ask(federation.federation, "pause")
    for k, name in enumerate("abc"):
        folder = write_client(tmp_path / name, (0, 1), per_class=6, offset=6 * k)
        federation.join(name, folder, "--threads", "1")
        federation.until("announced", text=f":{name}")
    signal_workers(federation, "c", signal.SIGSTOP)
    control_socket.ask(federation.federation, "resume")


def counted(federation):
    """Return, for each training round, the counted clients and how old their starts were."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        names = {c.client_id: c.name.rpartition(":")[2] for c in ledger.clients.all()}
        found = []
        for row in ledger.rounds.all(run):
            updates = ledger.updates.of_round(row.key)
            if row.kind == "train":
                found.append({
                    names[u.client]: 0 if u.base_state is None else row.base_state - u.base_state
                    for u in updates if u.status is UpdateStatus.COUNTED
                })  # fmt: skip
        sent = [u.update_id for c in names for u in ledger.updates.of_client(run, c)]
        assert len(set(sent)) == len(sent)
    return found


@pytest.mark.full
def test_a_slow_client_continues_and_counts_in_a_later_round(tmp_path):
    with LocalFederation(tmp_path) as federation:
        begin(federation, tmp_path)
        federation.until("round_opened", text="round 2", timeout_s=300)
        signal_workers(federation, "b", signal.SIGSTOP)  # two rounds on need c's update
        signal_workers(federation, "c", signal.SIGCONT)
        federation.until("round_opened", text="round 4", timeout_s=300)
        signal_workers(federation, "b", signal.SIGCONT)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        said = federation.log("c").read_text()
    rounds = counted(federation)
    assert [len(one) for one in rounds] == [2] * ROUNDS
    assert set(rounds[0]) == set(rounds[1]) == {"a", "b"}
    first = next(one["c"] for one in rounds if "c" in one)
    assert first >= 2
    # Only the last round closes for good while somebody is at work.
    assert not re.findall(rf"train round [^{ROUNDS - 1}]: work stopped", said)
    assert "train round 0 done" in said


@pytest.mark.full
def test_its_update_counts_once_though_the_server_and_the_client_are_killed(tmp_path):
    """The server is killed while c works, and c once it has an update that finds no round."""
    with LocalFederation(tmp_path) as federation:
        begin(federation, tmp_path)
        federation.until("round_opened", text="round 1", timeout_s=300)
        federation.kill_server()
        federation.serve("--until-done", *asynchronous())
        federation.until("round_opened", text="round 2", timeout_s=300)
        control_socket.ask(federation.federation, "pause")
        signal_workers(federation, "c", signal.SIGCONT)
        until_log(federation, "c", "train round 0 done", timeout_s=300)
        federation.kill_client("c")
        federation.join("c", tmp_path / "c", "--threads", "1")
        federation.until("announced", text=":c", timeout_s=300)
        control_socket.ask(federation.federation, "resume")
        assert federation.server.wait(300) == 0, federation.last_words("server")
    starts = [number - one["c"] for number, one in enumerate(counted(federation)) if "c" in one]
    assert starts.count(0) == 1, "counted once, from the state of round 0"


@pytest.mark.full
def test_a_client_beyond_the_bound_begins_again_from_the_newest_state(tmp_path):
    with LocalFederation(tmp_path) as federation:
        begin(federation, tmp_path, round__max_staleness=1)
        until_log(federation, "c", "train round 0: work stopped", timeout_s=300)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        assert "train round 0 done" not in federation.log("c").read_text()
    assert all(age <= 1 for one in counted(federation) for age in one.values())


@pytest.mark.full
def test_a_method_whose_server_does_more_than_average_does_not_start(tmp_path):
    with LocalFederation(tmp_path) as federation, pytest.raises(LinkError) as caught:
        federation.serve(*asynchronous(method__name="hepco"))
    assert "does more with updates than average them" in str(caught.value)
    assert "docs/asynchronous-rounds.md" in str(caught.value)


@pytest.mark.full
def test_a_damaged_state_of_stale_updates_is_computed_again_to_the_same_bytes(tmp_path):
    with LocalFederation(tmp_path) as federation:
        begin(federation, tmp_path)
        federation.until("round_opened", text="round 2", timeout_s=300)
        signal_workers(federation, "b", signal.SIGSTOP)
        signal_workers(federation, "c", signal.SIGCONT)
        federation.until("round_opened", text="round 3", timeout_s=300)
        signal_workers(federation, "c", signal.SIGSTOP)  # the round stays open
        federation.kill_server()
        assert counted(federation)[2]["c"] == 2
        with open_ledger(federation) as ledger:
            newest = ledger.states.newest(ledger.runs.newest().run_id)
        folder = federation.federation / "runs" / newest.run / "states"
        path = StateStore(folder).path(newest.state)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        federation.serve("--until-done", *asynchronous())
        federation.until("state_recomputed", text="identical to the byte", timeout_s=300)
        for name in "bc":
            signal_workers(federation, name, signal.SIGCONT)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        with open_ledger(federation) as ledger:
            assert ledger.runs.newest().run_id == newest.run, "no fork"
