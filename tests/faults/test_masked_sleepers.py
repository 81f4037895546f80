"""Clients that fall asleep within a masked round: the others go on, and wait for the next task.

A client's daemon stops itself at one point of its work (plant/sitecustomize.py); its worker is
stopped with it, as in a suspend.
"""

import os
import signal

import pytest

from faults.kit import final_tensors, is_the_plain_state, planted, rule
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, signal_workers, until_each, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(600)]

CLIENTS = 7  # of whose neighbours one may be missing
# Where a client writes down that it has secrets, and which set of survivors it will sign.
BEFORE_KEYS = rule("open", r"masks\.json", place="MaskFile.begin", do="stop", nth=1)
BEFORE_VOTE = rule("open", r"masks\.json", place="settle_survivors", do="stop", nth=1, depth=5)


def one_sleeps(tmp_path, where):
    """Run two tasks, in the first of which one client falls asleep.

    Returns:
        What was counted (`counts`), and three final states: behind masks with the sleeper, without
        masks and sleep, and without masks and sleeper.
    """
    for k in range(CLIENTS - 1):
        write_client(tmp_path / "lab" / f"{k}", range(4), per_class=4, offset=4 * k)
    folder = write_client(tmp_path / "sleeper", range(4), per_class=4, offset=4 * CLIENTS)
    given = {"round__min_clients": CLIENTS, "round__quorum": CLIENTS - 1,
             "federation__heartbeat_s": 0.3, "round__grace_s": 0.5,
             "run__evaluate": False}  # fmt: skip
    with LocalFederation(tmp_path / "f") as federation:
        arguments = ["--until-done", *settings(privacy__secure="masks", **given)]
        federation.serve(*arguments)
        control_socket.ask(federation.federation, "pause")
        env = planted(tmp_path, {"program": "fcil_client", "rules": [where],
                                 "root": str(federation.directory)})  # fmt: skip
        federation.join("sleeper", folder, "--threads", "1", env=env)
        federation.swarm("lab", tmp_path / "lab", None, "--threads", "1")
        for _ in range(CLIENTS):
            federation.until("announced")
        control_socket.ask(federation.federation, "resume")
        # The next task waits for seven.
        until_each(federation, ("left", ":sleeper"), ("task_opened", "task 1"))
        signal_workers(federation, "sleeper", signal.SIGSTOP)
        signal_workers(federation, "sleeper", signal.SIGCONT)
        os.kill(federation.clients["sleeper"].pid, signal.SIGCONT)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        assert "Traceback" not in federation.log("sleeper").read_text()
        hidden, counted = final_tensors(federation), counts(federation)
        plain = plain_run(federation, **given)
        federation.kill_client("sleeper")
        without = plain_run(federation, **given | {"round__min_clients": CLIENTS - 1})
    return counted, hidden, plain, without


def plain_run(federation, **given):
    federation.serve("--new-run", "--until-done", *settings(privacy__secure="off", **given))
    assert federation.server.wait(300) == 0, federation.last_words("server")
    return final_tensors(federation)


def of_task(number, tensors):
    return {name: array for name, array in tensors.items() if name.startswith(f"task.{number}.")}


def counts(federation):
    """Return {(task, kind): (updates counted, whether the sleeper's is one)}."""
    with open_ledger(federation) as ledger:
        (sleeper,) = [c.client_id for c in ledger.clients.all() if c.name.endswith(":sleeper")]
        found = {}
        for row in ledger.rounds.all(ledger.runs.newest().run_id):
            assert (row.key.task, row.kind) not in found, "a masked round began again"
            sent = [u.client for u in ledger.updates.of_round(row.key) if u.status == "counted"]
            found[row.key.task, row.kind] = (len(sent), sleeper in sent)
    return found


def test_a_client_that_sleeps_between_its_sums_and_its_vote_is_in_the_sum(tmp_path):
    counted, hidden, plain, _ = one_sleeps(tmp_path, BEFORE_VOTE)
    assert counted[0, "train"] == (CLIENTS, True)
    assert not counted[0, "mask_vote"][1]
    assert not counted[0, "unmask"][1]
    assert counted[1, "train"] == (CLIENTS, True), "it is awake"
    is_the_plain_state(hidden, plain)


def test_a_client_that_sleeps_before_its_keys_is_in_the_sum_of_the_next_task(tmp_path):
    counted, hidden, plain, without = one_sleeps(tmp_path, BEFORE_KEYS)
    for kind in ("mask_keys", "mask_shares", "train", "mask_vote", "unmask"):
        assert not counted[0, kind][1], kind
    assert counted[0, "train"] == (CLIENTS - 1, False)
    assert counted[1, "train"] == (CLIENTS, True), "it is awake"
    is_the_plain_state(of_task(0, hidden), of_task(0, without))
    is_the_plain_state(of_task(1, hidden), of_task(1, plain))
