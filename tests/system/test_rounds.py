"""Rounds that do not go to plan, and the operator's hand on them; real processes."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Answer, Outcome, RunStatus, UpdateStatus
from fcil_server.reports.results.run_data import collect, round_rows
from system.kit import open_ledger, settings, write_client

pytestmark = pytest.mark.processes

PATIENT = {"federation__heartbeat_s": 10.0}  # a stopped process keeps its connection


def command(federation, *arguments):
    """Run `fcil-server` with --json and return its data."""
    done = subprocess.run(
        [sys.executable, "-m", "fcil_server", *arguments, "--json", "--dir", str(federation.federation)],
        env=federation.environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)["data"]


def operate(federation, op, **fields):
    return control_socket.ask(federation.federation, op, **fields)


def together(federation, tmp_path, held):
    """Join one client for each name, with these digits, before any round opens."""
    operate(federation, "pause")
    for k, (name, digits) in enumerate(held.items()):
        federation.join(name, write_client(tmp_path / name, digits, offset=12 * k))
        federation.until("announced", text=f":{name}")


def stop_process(process):
    os.kill(process.pid, signal.SIGSTOP)


def go_on(process):
    os.kill(process.pid, signal.SIGCONT)


def ends(federation, code=0):
    assert federation.server.wait(120) == code, federation.last_words("server")


def table(federation):
    """Return the rows of `fcil-server rounds`, with clients by the letter they joined as."""
    with open_ledger(federation) as ledger:
        rows = round_rows(ledger, ledger.runs.newest().run_id)
    for row in rows:
        row["silent"] = {a["name"].rpartition(":")[2]: a["answer"] for a in row["answers"]}
    return rows


@pytest.mark.full
def test_the_first_to_come_are_taken_and_the_others_told_that_they_were_not_needed(tmp_path):
    with LocalFederation(tmp_path) as federation:
        tasks = [["0", "1"], ["5"]]
        federation.serve("--until-done", *settings(tasks__classes=tasks, round__take=2, **PATIENT))
        together(federation, tmp_path, {"a": (0, 1), "b": (0, 1), "c": (0, 1, 5)})
        stop_process(federation.clients["c"])
        operate(federation, "resume")
        federation.until("update")
        federation.until("update")
        go_on(federation.clients["c"])
        federation.until("task_done", text="task 0")
        ends(federation)  # the second task is only c's
        told = federation.log("c").read_text()
    first, *_, last = table(federation)
    assert (first["asked"], first["counted"], first["silent"]) == (3, 2, {"c": "surplus"})
    assert (first["outcome"], first["closed_by"]) == ("done", "taken")
    assert "task 0 train round 0: closed while this client was at work" in told
    assert last["outcome"] == "done"


@pytest.mark.full
def test_stragglers_are_told_and_a_round_without_quorum_is_reopened_then_closed_short(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            round__quorum=3, round__min_clients=3, round__deadline_s=2.0, round__max_reopens=1,
            **PATIENT,
        )  # fmt: skip
        federation.serve("--until-done", *arguments)
        together(federation, tmp_path, dict.fromkeys("abc", range(4)))
        stop_process(federation.clients["c"])
        operate(federation, "resume")
        assert ":c" in federation.until("reopened")["text"]
        federation.until("task_done", text="task 0")  # also its evaluation is short
        go_on(federation.clients["c"])
        ends(federation)
        told = federation.log("c").read_text()
    rows = table(federation)
    assert [(r["outcome"], r["reopened"], r["silent"]) for r in rows[:2]] == [
        ("short", 1, {"c": "straggler"})
    ] * 2
    assert {r["closed_by"] for r in rows[:2]} == {"deadline"}
    assert [(r["outcome"], r["counted"]) for r in rows[2:]] == [("done", 3)] * 2
    assert "task 0 train round 0: closed at its deadline" in told
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        assert ledger.answers.of_round(ledger.rounds.all(run)[0].key)[0].answer is Answer.STRAGGLER


@pytest.mark.full
def test_folders_removed_under_a_running_client_cost_no_round(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(round__min_clients=1))
        operate(federation, "pause")
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")
        (home,) = {p.parent for p in tmp_path.rglob("client.json")}
        for name in ("outbox", "parts", "incoming", "provisional"):
            (home / name).rmdir()
        operate(federation, "resume")
        assert federation.server.wait(60) == 0, federation.last_words("server")
    rows = table(federation)
    assert {(r["outcome"], r["counted"]) for r in rows} == {("done", 1)}


@pytest.mark.full
def test_a_connected_client_was_last_seen_now_and_one_that_is_gone_when_it_went(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings())
        federation.join("a", write_client(tmp_path / "a", range(4)))
        federation.until("announced")
        (before,) = operate(federation, "status")["clients"]
        (after,) = operate(federation, "status")["clients"]
        assert after["last_seen"] > before["last_seen"]
        (here,) = command(federation, "clients")["clients"]
        assert datetime.fromisoformat(here["last_seen"]).timestamp() > after["last_seen"] - 1
        federation.clients["a"].send_signal(signal.SIGTERM)
        assert federation.clients.pop("a").wait(120) == 0
        while (gone := operate(federation, "status")["clients"][0])["state"] != "away":
            pass
        assert gone["last_seen"] > after["last_seen"]
        assert operate(federation, "status")["clients"][0]["last_seen"] == gone["last_seen"]


@pytest.mark.full
def test_a_task_whose_classes_are_all_hidden_says_so_and_how_to_undo_it(tmp_path):
    with LocalFederation(tmp_path) as federation:
        tasks = [["0", "1"]]
        federation.serve("--until-done", *settings(tasks__classes=tasks))
        command(federation, "classes", "hide", "0", "1")
        federation.join("a", write_client(tmp_path / "a", (0, 1)))
        federation.join("b", write_client(tmp_path / "b", (0, 1), offset=12))
        note = federation.until("no_holder")["text"]
        show = "fcil-server classes show 0 1"
        assert note.startswith(f"task 0: all its classes are hidden, undone by {show}; it waits")
        assert show in operate(federation, "status")["now"]["waiting_for"]
        command(federation, "classes", "show", "0", "1")
        assert federation.server.wait(60) == 0, federation.last_words("server")


@pytest.mark.full
def test_a_task_that_nobody_has_images_for_waits_and_goes_on_when_somebody_comes(tmp_path):
    with LocalFederation(tmp_path) as federation:
        tasks = [["0"], ["5"], ["6"], ["1"]]
        federation.serve("--until-done", *settings(tasks__classes=tasks))
        federation.join("a", write_client(tmp_path / "a", (0, 1)))
        federation.join("b", write_client(tmp_path / "b", (0, 1), offset=12))
        note = federation.until("no_holder")["text"]
        assert note.startswith(
            "task 1: no connected client holds images of 5; it waits; fcil-server close"
        )
        assert operate(federation, "status")["now"]["waiting_for"].endswith("holds images of 5")
        federation.join("c", write_client(tmp_path / "c", (5,)))
        federation.until("task_done", text="task 1")
        federation.until("no_holder", text="images of 6")
        operate(federation, "close_round", rest_of_task=True)
        ends(federation)
    rows = [r for r in table(federation) if r["kind"] == "train"]
    assert [(r["outcome"], r["closed_by"], r["asked"]) for r in rows] == [
        ("done", "answered", 2), ("done", "answered", 1), ("skipped", "rest_of_task", 0),
        ("done", "answered", 2),
    ]  # fmt: skip


@pytest.mark.full
def test_a_task_whose_holders_left_is_skipped_where_the_operator_wants_that(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            tasks__classes=[["0", "5"], ["1"]], round__rounds_per_task=3, round__on_no_holder="skip",
            round__no_holder_s=1.0, round__grace_s=0.5, round__deadline_s=3.0,
            round__on_short="close",
        )  # fmt: skip
        federation.serve("--until-done", *arguments)
        together(federation, tmp_path, {"a": (1,), "b": (1,), "c": (0, 5)})
        stop_process(federation.clients["c"])
        operate(federation, "resume")
        federation.until("round_opened")
        federation.kill_client("c")  # the only holder, in the middle of the first round
        note = federation.until("no_holder")["text"]
        assert "images of 0, 5; in 1 s its rounds are skipped" in note
        ends(federation)
    rows = [r for r in table(federation) if r["kind"] == "train"]
    assert [(r["task"], r["outcome"], r["closed_by"]) for r in rows] == [
        (0, "skipped", "deadline"), (0, "skipped", "no_holder"), (0, "skipped", "no_holder"),
        (1, "done", "answered"), (1, "done", "answered"), (1, "done", "answered"),
    ]  # fmt: skip


@pytest.mark.full
def test_a_drained_server_ends_after_the_open_round_and_goes_on_when_started_again(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(tasks__classes=[["0", "1"]], round__rounds_per_task=3, **PATIENT)
        federation.serve("--drain-on-term", *arguments)
        together(federation, tmp_path, dict.fromkeys("ab", (0, 1)))
        assert operate(federation, "status")["now"]["mode"] == "paused"
        stop_process(federation.clients["b"])
        operate(federation, "resume")
        federation.until("update")
        federation.server.terminate()
        federation.until("draining")
        now = operate(federation, "status")["now"]
        assert (now["mode"], now["phase"]) == ("draining", "collecting")
        go_on(federation.clients["b"])
        ends(federation)
        assert [(r["outcome"], r["counted"]) for r in table(federation)] == [("done", 2)]
        federation.serve("--until-done", *arguments)
        ends(federation)
    assert [r["kind"] for r in table(federation)] == ["train"] * 3 + ["evaluate"]
    assert "Traceback" not in federation.log("server").read_text()


@pytest.mark.full
def test_a_drained_server_ends_at_once_where_nobody_was_asked_and_pause_ends_with_it(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(tasks__classes=[["0", "1"]]))
        together(federation, tmp_path, dict.fromkeys("ab", (0, 1)))
        operate(federation, "drain")
        ends(federation)
        assert table(federation) == []
        federation.serve("--until-done", *settings(tasks__classes=[["0", "1"]]))
        ends(federation)
    with open_ledger(federation) as ledger:
        assert ledger.runs.newest().status is RunStatus.DONE
        actions = [a.action for a in ledger.audit.newest()]
    assert [a for a in actions if a in ("pause", "resume", "drain")] == ["pause", "drain"]


@pytest.mark.full
def test_names_wait_for_a_word_and_a_latecomer_is_told_what_was_learned_before(tmp_path):
    """Two clients bring one name in different letters, a third comes after its task."""
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            tasks__schedule="discovered", tasks__classes=[], tasks__settle_s=0.2,
            tasks__admit="confirm", run__evaluate=False,
        )  # fmt: skip
        federation.serve(*arguments)
        a = write_client(tmp_path / "a", [0], names={0: "Stra\u00dfe"})
        federation.join("a", a)
        federation.join("b", write_client(tmp_path / "b", [0], offset=12, names={0: "STRASSE"}))
        federation.until("announced")
        federation.until("announced")
        [row] = command(federation, "classes", "ls")["classes"]
        assert (row["task"], row["admitted"]) == (None, False)
        assert "1 to be admitted" in operate(federation, "status")["now"]["waiting_for"]
        assert command(federation, "classes", "admit")["names"] == [row["name"]]
        federation.until("task_done", text="task 0")
        command(federation, "classes", "alias", "rue", "strasse")
        third = write_client(tmp_path / "c", [0, 1], offset=24, names={0: "rue", 1: "pont"})
        federation.join("c", third)
        text = federation.until("learned_before")["text"]
        assert ":c brings images of " in text
        assert "(task 0): learned before, not trained again" in text
        command(federation, "classes", "admit", "pont")
        federation.until("task_done", text="task 1")
        client = next(
            c for c in operate(federation, "status")["clients"] if c["name"].endswith(":c")
        )
        assert client["learned_before"] == [row["name"]]
        assert client["missed_tasks"] == [0]
        assert "rue: learned in an earlier task" in federation.log("c").read_text()
        with open_ledger(federation) as ledger:
            last = ledger.rounds.all(ledger.runs.newest().run_id)[-1]
            [update] = ledger.updates.of_round(last.key)
            assert (update.client, update.status) == (client["id"], UpdateStatus.COUNTED)
            # Twelve images of each class; how many of them are for testing is chance.
            assert update.samples <= 12, "images of the learned class were not trained"


@pytest.mark.full
def test_one_name_for_two_things_is_a_warning_that_names_both_clients(tmp_path):
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            tasks__classes=[["crane", "heron"]], run__evaluate=False, round__min_clients=3
        )
        federation.serve("--until-done", *arguments)
        for name, meant, offset in (("a", 0, 0), ("b", 0, 80), ("c", 3, 0)):
            folder = tmp_path / name
            names = {meant: "crane", 1: "heron"}
            # Of 80 images, 56 are for training; the warning needs 30 and the draw is a client's.
            write_client(folder, (meant, 1), per_class=80, offset=offset, names=names)
            federation.join(name, folder)
        ends(federation)
    with open_ledger(federation) as ledger:
        (text,) = [e.text for e in ledger.events.newest() if e.code == "far_apart"]
    assert ":c seem to mean different" in text or ":c and " in text
    assert "seem to mean different things by 'crane'" in text
    assert "'heron'" not in federation.log("server").read_text()


TORCH = [pytest.param(name, marks=pytest.mark.full) for name in ("hgp", "pilora")]


@pytest.mark.parametrize("method", ["running_mean", *TORCH])
@pytest.mark.full
def test_a_client_alone_in_a_task_still_yields_a_good_model(method, tmp_path):
    options = {} if method == "running_mean" else {"method__preset": "short"}
    with LocalFederation(tmp_path) as federation:
        arguments = settings(
            method__name=method, **options, round__rounds_per_task=2, round__settle_s=0.2,
            tasks__classes=[["0", "1"], ["2", "3"]],
        )  # fmt: skip
        federation.serve("--until-done", *arguments)
        federation.join("a", write_client(tmp_path / "a", (0, 1), per_class=40), "--threads", "1")
        more = write_client(tmp_path / "b", range(4), per_class=40, offset=40)
        federation.join("b", more, "--threads", "1")
        ends(federation)
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        last = [r for r in ledger.rounds.all(run) if (r.task, r.kind) == (1, "train")]
        assert {(r.outcome, len(r.asked)) for r in last} == {(Outcome.DONE, 1)}
        data = collect(ledger, run)
    assert data.headline[0] > 60, "chance is 25 %"
    totals = {}
    with open_ledger(federation) as ledger:
        for row in ledger.evaluations.all(run):
            if row.task == 1:
                right, n = totals.get(row.class_id > 1, (0, 0))
                totals[row.class_id > 1] = (right + row.correct, n + row.total)
    new, old = totals[True], totals[False]
    assert new[0] / new[1] > 0.5, "the classes that one client taught alone"
    assert old[0] / old[1] > 0.5, "the classes of both"
