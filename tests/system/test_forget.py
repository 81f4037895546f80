"""Forget and erase as processes: a run goes on as if one of three clients had never been there."""

import numpy as np
import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from system.analytic_kit import ENGINE, TOLERANCE, options, outcome
from system.kit import command, member, open_ledger, settings, until_all_hold, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TASKS = [["0", "1"], ["2"], ["3"]]


def stop(federation):
    control_socket.ask(federation.federation, "stop")
    assert federation.server.wait(60) == 0, federation.last_words("server")


def naming(federation, name):
    return [
        path.name
        for path in federation.federation.rglob("*")
        if path.is_file() and name.encode() in path.read_bytes()
    ]


def assert_exact(federation, folders):
    weight, expected, accuracy = outcome(federation, folders)
    assert np.linalg.norm(weight - expected) < TOLERANCE * np.linalg.norm(expected)
    assert accuracy > 60


# Too long for every run; server/test_forget forgets from real ledgers and states, without clients.
@pytest.mark.full
def test_a_run_goes_on_as_if_a_client_had_never_been_there(tmp_path):
    folders = [
        write_client(tmp_path / name, (0, 1, 2), per_class=12, offset=12 * i)
        for i, name in enumerate("abc")
    ]
    a, b, c = folders
    given = [*options(TASKS, 3), *settings(run__keep_updates=True)[-2:]]
    with LocalFederation(tmp_path) as federation:
        federation.serve(*given)
        for folder in folders:
            federation.join(folder.name, folder, *ENGINE)
        federation.until("task_done", text="task 1", timeout_s=300)
        stop(federation)  # the third task has no images yet
        name = member(federation, c)
        done = command(federation, "forget", name, "--json")
        assert (done["updates"], done["tasks"], done["vanished"]) == (2, [0, 1], [])
        assert_exact(federation, [a, b])
        federation.serve(*given)
        control_socket.ask(federation.federation, "pause")  # until both have said what they bring
        for i, folder in enumerate((a, b)):
            write_client(folder, (3,), per_class=12, offset=12 * i)
        until_all_hold(federation, "ab", 4)
        control_socket.ask(federation.federation, "resume")
        federation.until("task_done", text="task 2", timeout_s=300)
        assert_exact(federation, [a, b])
        federation.check_clients()
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest().run_id
            tested = {(e.task, e.client) for e in ledger.evaluations.all(run)}
        assert {t for t, who in tested if who == done["client"]} == {2}, "it is still a member"
        erased = command(federation, "erase", name, "--yes", "--json")
        federation.until("left", text=erased["pseudonym"])
        shown = command(federation, "clients", "--json")["clients"]
        assert sorted(m["state"] for m in shown) == ["erased", "ready", "ready"]
        assert naming(federation, name) == []
        assert command(federation, "check", "--json")["count"]["failure"] == 0
