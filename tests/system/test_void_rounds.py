"""A server whose method fails: void rounds pause the run, and a search outlives a kill."""

import os
import shutil
import threading

import pytest
from watchfiles import watch

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, UpdateStatus
from system.kit import open_ledger, settings, write_client
from system.third_party_kit import change, install

# Process after process: the machine and the coordinator have their quick tests (test_culprits).
pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(600)]

METHOD = {"method__name": "thumbnail_lda", "round__min_clients": 4, "run__evaluate": False}
AGGREGATE = """tensors, t = dict(state.tensors), ctx.task.index
        if ctx.kind == "prepare":"""
# Each try leaves a line: how many images stand behind each of its updates.
NOTED = """import os, pathlib
        folder = pathlib.Path(os.environ["TRIES"])
        with (folder / "tries").open("a") as tries:
            tries.write(" ".join(map(str, sorted(updates.samples))) + "\\n")
"""
HELD = """        if (folder / "hold").exists() and len(updates.samples) < 4:
            (folder / "hold").read_bytes()
"""
FAILS = """        if {condition}:
            raise ArithmeticError("these numbers have no inverse")
        """
PER_CLASS = {"a": 5, "b": 6, "c": 40, "d": 7}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return install(tmp_path_factory.mktemp("right"))


def broken(right, folder, condition, *, held=False):
    """Install the method so that it cannot combine updates on this condition."""
    site = shutil.copytree(right, folder / "site")
    code = NOTED + HELD * held + FAILS.format(condition=condition)
    change(site / "thumbnail_lda", "aggregator.py", (AGGREGATE, code + AGGREGATE))
    return {"PYTHONPATH": str(site), "TRIES": str(folder)}


def join(federation, env):
    for offset, (name, per_class) in enumerate(PER_CLASS.items()):
        if not (federation.directory / name).exists():
            folder = federation.directory / name
            write_client(folder, range(6), per_class=per_class, offset=40 * offset)
        federation.join(name, federation.directory / name, env=env)


def rounds_of(federation):
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        return [(row, ledger.updates.of_round(row.key)) for row in ledger.rounds.all(run)]


def test_a_method_that_cannot_combine_anything_pauses_the_run_until_it_is_mended(tmp_path, right):
    env = broken(right, tmp_path, "True")
    tasks = [[str(digit)] for digit in range(6)]  # each has a round that describes its class
    arguments = settings(**METHOD, tasks__classes=tasks)
    with LocalFederation(tmp_path) as federation:
        federation.serve(*arguments, env=env)
        join(federation, {"PYTHONPATH": str(right)})
        federation.until("void")
        federation.until("task_done", text="nothing was learned in it")
        for _ in range(2):
            federation.until("void")
        federation.until("paused", text="the last 3 rounds are void")
        assert federation.status()["now"]["mode"] == "paused"
        federation.kill_server()
        # Started again it tries one round: the pause ended with the server.
        federation.serve(*arguments, env=env)
        federation.until("void")
        federation.until("paused", text="the last 4 rounds are void")
        for row, updates in rounds_of(federation):
            assert row.outcome is Outcome.SKIPPED
            assert {u.status for u in updates} == {UpdateStatus.EXCLUDED}
            if row.kind == "prepare":
                assert all("no update is to blame" in u.reason for u in updates)
        # Mended, the same run learns with the same clients.
        federation.kill_server()
        federation.serve(*arguments, env={"PYTHONPATH": str(right)})
        federation.until("run_done")
        federation.check_clients()
    last, updates = rounds_of(federation)[-1]
    assert last.outcome is Outcome.DONE
    assert len(updates) == 4
    assert {u.status for u in updates} == {UpdateStatus.COUNTED}


def test_a_server_killed_while_it_looks_for_the_culprit_names_it_afterwards(tmp_path, right):
    env = broken(right, tmp_path, "max(updates.samples) > 20", held=True)  # c's alone are
    tries, hold = tmp_path / "tries", tmp_path / "hold"
    tries.touch()
    os.mkfifo(hold)  # nobody ever writes into it: who reads it waits
    arguments = settings(**METHOD, tasks__classes=[["0", "1"]])
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *arguments, env=env)
        join(federation, {"PYTHONPATH": str(right)})
        until_lines(tries, 3)  # all, all once more, and the first of those with some
        federation.kill_server()
        before = tries.read_text().splitlines()
        hold.unlink()
        federation.serve("--until-done", *arguments, env=env)
        federation.until("excluded", text=":c")
        federation.until("run_done")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        names = {c.client_id: c.name.rpartition(":")[2] for c in ledger.clients.all()}
    for row, updates in rounds_of(federation):
        assert row.outcome is Outcome.DONE
        excluded = [names[u.client] for u in updates if u.status is UpdateStatus.EXCLUDED]
        assert excluded == ["c"]
    # The try that was under way is made again, and none of those before it.
    after = tries.read_text().splitlines()[len(before) :]
    everybody = before[0]
    assert before == [everybody, everybody, after[0]]
    assert after.count(everybody) == 2, "those of the next round"


def until_lines(path, count):
    for _ in watch(path, rust_timeout=500, yield_on_timeout=True, stop_event=threading.Event()):
        if len(path.read_text().splitlines()) >= count:
            return
