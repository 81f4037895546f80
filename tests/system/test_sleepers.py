"""Machines that hang, sleep, run out of memory, are killed, and whose clocks jump; real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Answer, Outcome, RunStatus, UpdateStatus
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

ODD = str(Path(__file__).parent / "odd_machine")


def odd(tmp_path, *, learner=None, aggregator=None, clock=None):
    """Return the environment of a machine with troubles."""
    made = {"PYTHONPATH": ODD}
    if learner is not None:
        script = tmp_path / "learner"
        script.write_text("\n".join(learner) + "\n")
        made["FCIL_LEARNER"] = str(script)
    if aggregator is not None:
        script = tmp_path / "aggregator"
        script.write_text("\n".join(aggregator) + "\n")
        made["FCIL_AGGREGATOR"] = str(script)
    if clock is not None:
        made["FCIL_CLOCK"] = str(clock)
    return made


def together(federation, tmp_path, digits, names="ab", *, start=True, **joins):
    """Join clients before any round opens; then let rounds open."""
    control_socket.ask(federation.federation, "pause")
    for k, name in enumerate(names):
        arguments, env = joins.get(name, ((), None))
        folder = write_client(tmp_path / name, digits, offset=12 * k)
        federation.join(name, folder, *arguments, env=env)
        federation.until("announced", text=f":{name}")
    if start:
        control_socket.ask(federation.federation, "resume")


def ends(federation, code=0):
    assert federation.server.wait(120) == code, federation.last_words("server")


def history(federation):
    """Return (kind, round, outcome, {client: counted, or the code that it declined with})."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        names = {c.client_id: c.name.rpartition(":")[2] for c in ledger.clients.all()}
        rows = []
        for row in ledger.rounds.all(run.run_id):
            who = {names[u.client]: u.status.value for u in ledger.updates.of_round(row.key)}
            who |= {
                names[a.client]: a.reason
                for a in ledger.answers.of_round(row.key)
                if a.answer is Answer.DECLINED
            }
            rows.append((row.kind, row.round, row.outcome, who))
        return run.status, rows


@pytest.mark.full
def test_a_learner_may_fail_in_every_way_and_its_daemon_takes_part_in_the_next_round(tmp_path):
    both = {"a": "counted", "b": "counted"}
    rounds = [
        (["hang", "ok"], both),
        (["kill", "ok"], both),
        (["kill", "kill"], {"a": "worker_died", "b": "counted"}),
        (["hang", "hang"], {"a": "worker_stalled", "b": "counted"}),
        (["nan"], {"a": "egress_refused", "b": "counted"}),
        (["shape"], {"a": "egress_refused", "b": "counted"}),
        (["junk"], {"a": "worker_failed", "b": "counted"}),
        (["raise"], {"a": "internal", "b": "counted"}),
        (["memory", "ok"], both),
        (["memory"], {"a": "out_of_memory", "b": "counted"}),  # one at a time by now
        (["ok"], both),
    ]
    script = [word for words, _ in rounds for word in words]
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            tasks__classes=[["0", "1"]], round__rounds_per_task=len(rounds), round__quorum=1
        )
        federation.serve("--until-done", *arguments)
        options = ("--work-timeout", "4", "--micro-batch", "2")
        troubled = (options, odd(tmp_path, learner=script))
        together(federation, tmp_path, range(2), a=troubled)
        ends(federation)
        words = federation.log("a").read_text()
        assert federation.clients["a"].poll() is None, "the daemon lives"
    status, rows = history(federation)
    assert status is RunStatus.DONE
    assert [who for kind, _, _, who in rows if kind == "train"] == [who for _, who in rounds]
    for sentence in (
        "made no progress for 4 s, and was ended", "Trying once more", "killed (signal 9)",
        "Trying again with one image in one pass", "even with one image at a time",
        "must not leave the device", "ZeroDivisionError: planted", "(2 times)",
    ):  # fmt: skip
        assert sentence in words, sentence
    assert "Traceback" not in words


@pytest.mark.full
def test_a_servers_worker_that_dies_or_hangs_at_any_operation_changes_nothing(tmp_path):
    """Once each, in aggregation even three times running: nobody is blamed for it."""
    troubles = [
        "init kill -", "open_task hang -", "broadcast kill -", "aggregate kill -",
        "aggregate hang -", "aggregate kill -",
    ]  # fmt: skip
    env = odd(tmp_path, aggregator=troubles)
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], run__work_timeout_s=4.0)
        federation.serve("--until-done", *arguments, env=env)
        together(federation, tmp_path, range(2))
        ends(federation)
    assert (tmp_path / "aggregator").read_text() == "", "every one of them struck"
    status, rows = history(federation)
    assert status is RunStatus.DONE
    assert [who for _, _, _, who in rows] == [{"a": "counted", "b": "counted"}] * 2


@pytest.mark.full
def test_an_update_at_which_the_servers_worker_hangs_is_left_out_and_named(tmp_path):
    env = odd(tmp_path, aggregator=[])
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], run__work_timeout_s=4.0)
        federation.serve("--until-done", *arguments, env=env)
        control_socket.ask(federation.federation, "pause")
        together(federation, tmp_path, range(2), start=False)
        with open_ledger(federation) as ledger:
            (culprit,) = [c.client_id for c in ledger.clients.all() if c.name.endswith(":b")]
        (tmp_path / "aggregator").write_text(f"always aggregate hang {culprit}")
        control_socket.ask(federation.federation, "resume")
        note = federation.until("excluded")
        ends(federation)
    assert "made no progress for 4 s" in note["text"]
    status, rows = history(federation)
    assert status is RunStatus.DONE
    assert rows[0][3] == {"a": "counted", "b": "excluded"}


@pytest.mark.full
def test_a_machine_that_slept_comes_back_by_itself_and_goes_on(tmp_path):
    """Daemon and worker are stopped for longer than heartbeat and grace, as in a suspend."""
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            tasks__classes=[["0", "1"], ["2", "3"]], round__quorum=1, round__min_clients=1,
            round__grace_s=0.5, federation__heartbeat_s=0.3,
        )  # fmt: skip
        federation.serve("--until-done", *arguments)
        control_socket.ask(federation.federation, "pause")
        sleepy = (("--work-timeout", "2"), None)
        together(federation, tmp_path, range(4), a=sleepy)
        control_socket.ask(federation.federation, "pause")
        processes = family(federation.clients["a"].pid)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        federation.until("left", text=":a")
        control_socket.ask(federation.federation, "resume")
        federation.until("task_done", text="task 0")
        control_socket.ask(federation.federation, "pause")
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        federation.until("announced", text=":a")
        control_socket.ask(federation.federation, "resume")
        ends(federation)
        assert "Traceback" not in federation.log("a").read_text()
    status, rows = history(federation)
    assert status is RunStatus.DONE
    assert rows[-1][3] == {"a": "counted", "b": "counted"}


def family(pid):
    """Return a daemon's process and its worker's."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


@pytest.mark.full
def test_a_second_daemon_on_one_folder_is_refused_in_words(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.join("a", write_client(tmp_path / "a", range(2)))
        federation.until("announced", text=":a")
        federation.join("twin", tmp_path / "a")
        assert federation.clients["twin"].wait(60) == 2
        assert "error [locked]" in federation.last_words("twin")
        assert federation.clients["a"].poll() is None


@pytest.mark.parametrize("who", ["server", pytest.param("client", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_clock_that_jumps_back_and_forth_loses_nothing_and_locks_nobody_out(tmp_path, who):
    """By hours, while it runs and over a kill, with a verdict due."""
    clock = tmp_path / "clock"

    def jump(seconds):
        """Set the clock; whoever reads it meanwhile finds the old file or the new one."""
        new = clock.with_name("new")
        new.write_text(str(seconds))
        new.replace(clock)

    jump(0)
    env = odd(tmp_path, clock=clock)
    with LocalFederation(tmp_path) as federation:
        arguments = ["--until-done", *settings(round__rounds_per_task=3)]
        serving = env if who == "server" else None
        federation.serve(*arguments, env=serving)
        joining = env if who == "client" else None
        together(federation, tmp_path, range(4), a=((), joining))
        federation.until("update")
        jump(-7 * 3600)
        federation.until("task_done", text="task 0")
        jump(11 * 3600)
        federation.kill_server()
        federation.kill_client("a")
        federation.serve(*arguments, env=serving)
        federation.join("a", tmp_path / "a", env=joining)
        federation.until("update")
        jump(-20 * 3600)
        ends(federation)
        for name in ("a", "b", "server"):
            assert "refused" not in federation.log(name).read_text()
    status, rows = history(federation)
    assert status is RunStatus.DONE
    assert len(rows) == 8
    assert {outcome for _, _, outcome, _ in rows} == {Outcome.DONE}
    with open_ledger(federation) as ledger:
        times = [row.closed_at for row in ledger.rounds.all(ledger.runs.newest().run_id)]
    assert (times == sorted(times)) == (who == "client"), "the clock did jump"
    for _, _, _, who_sent in rows:
        assert who_sent == {"a": UpdateStatus.COUNTED.value, "b": UpdateStatus.COUNTED.value}


@pytest.mark.full
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_client_comes_back_when_its_own_address_or_the_servers_changes(tmp_path, who):
    """A host that moves to another address; a name that leads to another one from then on."""
    inside = ["unshare", "-rmn"]
    probe = subprocess.run([*inside, "ip", "link", "add", "v0", "type", "veth"], check=False)
    if probe.returncode:
        pytest.skip("no namespaces or no veth devices here")
    script = Path(__file__).parent / "hosts" / "moving.py"
    done = subprocess.run(
        [*inside, sys.executable, str(script), str(tmp_path), who],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["back_s"] > 0
