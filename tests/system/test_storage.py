"""What the server keeps: damaged files, two servers, backup, restore and rollback, for real."""

import json
import subprocess
import sys

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import OPENING, RunStatus
from system.kit import open_ledger, settings, until_all_hold, write_client

pytestmark = pytest.mark.processes


def start(federation, tmp_path, *serve, joined=True, **extra):
    """Serve two tasks of two digits to two clients."""
    federation.serve(*serve, *settings(**extra))
    if joined:
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.join("b", write_client(tmp_path / "b", range(4), offset=12))


def newest_state(federation):
    """Return the newest run's newest committed state and its file."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        row = ledger.states.newest(run)
    return row, federation.federation / "runs" / run / "states" / f"{row.state:06d}.safetensors"


def damage(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def command(federation, *arguments, code=0):
    """Run `fcil-server` and return its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "fcil_server", *arguments],
        capture_output=True, text=True, check=False, env=federation.environment(),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stderr


@pytest.mark.full
def test_a_damaged_newest_state_is_computed_again_or_else_the_run_is_forked(tmp_path):
    with LocalFederation(tmp_path) as federation:
        start(federation, tmp_path, round__rounds_per_task=2)
        federation.until("task_done", text="task 0")
        federation.kill_server()
        row, path = newest_state(federation)
        whole = path.read_bytes()
        damage(path)
        federation.serve("--until-done", *settings(round__rounds_per_task=2))
        federation.until("state_recomputed", text=path.name)
        assert path.read_bytes() == whole
        for _ in range(3):  # the third belongs to the task's second round
            federation.until("update")
        federation.kill_server()

        row, path = newest_state(federation)
        damage(path)
        for segment in (path.parents[1] / "spool").iterdir():
            segment.unlink()
        federation.serve("--until-done", *settings(round__rounds_per_task=2))
        note = federation.until("state_lost", text=path.name)
        assert federation.server.wait(120) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        old, new = ledger.runs.all()
        assert old.run_id == row.run
        assert new.run_id in note["text"]
        assert (old.status, new.status) == (RunStatus.STOPPED, RunStatus.DONE)
        assert new.parent_run == old.run_id
        assert new.parent_state < row.state
        assert [t.closed_at is not None for t in ledger.tasks.all(new.run_id)] == [True, True]
        kinds = [r.kind for r in ledger.rounds.all(new.run_id)]
        assert kinds == ["train", "train", "evaluate"] * 2


def bring(tmp_path, digit):
    """Let each client have images of one more class, all at once."""
    for k, name in enumerate("ab"):
        made = write_client(tmp_path / f"{name}-{digit}", [digit], offset=12 * k)
        (tmp_path / name).mkdir(exist_ok=True)
        (made / str(digit)).rename(tmp_path / name / str(digit))


def bring_running(federation, tmp_path, digit):
    """Let running clients have one more class, and no round open before both have said so."""
    control_socket.ask(federation.federation, "pause")
    bring(tmp_path, digit)
    until_all_hold(federation, "ab", digit + 1)
    control_socket.ask(federation.federation, "resume")


@pytest.mark.full
def test_clients_go_on_with_a_restored_and_with_a_rolled_back_federation(tmp_path):
    # A client that is slow is waited for: without one, the numbers would be others.
    three = settings(tasks__classes=[["0"], ["1"], ["2"]], round__grace_s=60.0)
    passphrase, file = tmp_path / "passphrase", tmp_path / "backup.tar"
    passphrase.write_text("correct horse battery staple\n")
    with LocalFederation(tmp_path) as federation:
        place = ["--dir", str(federation.federation)]
        sealed = ["--passphrase-file", str(passphrase)]
        federation.serve(*three)
        bring(tmp_path, 0)
        for name in "ab":
            federation.join(name, tmp_path / name)
        federation.until("task_done", text="task 0")  # the next one waits for its images
        command(federation, "backup", str(file), *place, *sealed)
        # One server, one directory; what changes it waits until the server is stopped.
        for refused in (["serve"], ["run", "rollback", "--to-task", "0"]):
            said = command(federation, *refused, *place, code=2)
            assert f"in use by process {federation.server.pid}" in said
        bring_running(federation, tmp_path, 1)
        federation.until("task_done", text="task 1")
        assert command(federation, "check", *place, "--json")["data"]["count"]["failure"] == 0
        federation.kill_server()

        seen = newest_state(federation)[0].state
        federation.federation.rename(tmp_path / "lost")
        answer = command(federation, "restore", str(file), *place, *sealed, "--json")["data"]
        assert answer["parent"]["state"] < seen
        federation.serve("--until-done", *three)
        bring_running(federation, tmp_path, 2)
        assert federation.server.wait(120) == 0, federation.last_words("server")
        restored = newest_state(federation)[0]

        back = command(federation, "run", "rollback", *place, "--to-task", "0", "--json")["data"]
        federation.serve("--until-done", *three)
        shown = federation.status()["run"]
        assert (shown["id"], shown["parent"]) == (back["run"], back["parent"])
        assert federation.server.wait(120) == 0, federation.last_words("server")
        rolled_back = newest_state(federation)[0]
        federation.check_clients()  # the daemons are still those of the beginning
        assert command(federation, "check", *place, "--json")["data"]["count"]["failure"] == 0
    assert rolled_back.run == back["run"] != restored.run == answer["run"]
    with open_ledger(federation) as ledger:
        assert [r.status for r in ledger.runs.all()] == [
            RunStatus.STOPPED, RunStatus.DONE, RunStatus.DONE,
        ]  # fmt: skip
        for run in (restored.run, rolled_back.run):
            assert [r.kind for r in ledger.rounds.all(run)] == ["train", "evaluate"] * 3
            assert all(len(ledger.updates.of_round(r.key)) == 2 for r in ledger.rounds.all(run))
        actions = [a.action for a in ledger.audit.newest()]
        assert [actions.count(a) for a in ("restore", "restore_fork", "rollback")] == [1, 1, 1]
        kinds = {s.kind for s in ledger.states.all(rolled_back.run)}
        assert kinds == {OPENING, "train"}
    # The same images, and all clients in every round: the same to the byte.
    assert (rolled_back.state, rolled_back.digest) == (restored.state, restored.digest)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["pilora", "plora", "hgp", "fed_talora", "hepco"])
def test_a_fork_learns_the_same_again_with_a_published_method(method, tmp_path):
    """A method keeps what it learned in the state: its clients need nothing of the old run."""
    options = settings(
        method__name=method, method__preset="short", round__rounds_per_task=2, run__threads=1
    )
    with LocalFederation(tmp_path) as federation:
        place = ["--dir", str(federation.federation)]
        federation.serve("--until-done", *options)
        for k, name in enumerate("ab"):
            folder = write_client(tmp_path / name, range(4), offset=12 * k)
            federation.join(name, folder, "--threads", "1")
        assert federation.server.wait(300) == 0, federation.last_words("server")
        first = newest_state(federation)[0]
        command(federation, "run", "rollback", *place, "--to-task", "0")
        federation.serve("--until-done", *options)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        federation.check_clients()
        again = newest_state(federation)[0]
    assert again.run != first.run
    assert (again.state, again.digest) == (first.state, first.digest)


@pytest.mark.full
def test_a_damaged_log_is_told_and_a_ledger_that_is_removed_ends_the_server(tmp_path):
    with LocalFederation(tmp_path) as federation:
        start(federation, tmp_path, joined=False)
        federation.until("serving")
        federation.kill_server()
        ledger = federation.federation / "ledger.sqlite"
        log = ledger.with_name("ledger.sqlite-wal")
        data = bytearray(log.read_bytes())
        frames = (len(data) - 32) // (24 + 4096)
        data[32 + (frames // 2) * (24 + 4096) + 100] ^= 4
        log.write_bytes(data)
        federation.serve(*settings())
        federation.until("corrupt_file", text="after a damaged one are lost")
        ledger.unlink()
        assert federation.server.wait(60) != 0
        words = federation.last_words("server")
        assert "ledger.sqlite was removed or replaced" in words
        assert "Traceback" not in federation.log("server").read_text()
