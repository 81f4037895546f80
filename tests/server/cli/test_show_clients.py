"""Clients as ``status`` and ``clients`` show them: whole names, who is gone, what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sample_run
from fcil_protocol.formats import percent
from fcil_protocol.process.terminal import count_of
from fcil_server.cli.show_members import show_members
from fcil_server.cli.show_status import show_status
from fcil_server.daemon.status import stopped_status
from fcil_server.federation.eligibility import LEFT_BY_ITSELF
from fcil_server.federation.members import member_rows
from fcil_server.ledger.labels import name_with_relay, short_device
from fcil_server.ledger.ledger import Ledger
from fcil_server.web.page.reader import HistoryReader
from sample_run import ALICE, BOB, GONE, RUN

LONG = "laboratory-machine:camera-of-the-third-floor-north-7"


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with sample_run.build(tmp_path / "ledger.sqlite") as opened:
        yield opened


def state_of(rows: list[dict[str, Any]], client: str) -> str:
    return next(str(row["state"]) for row in rows if row["id"] == client)


def test_who_left_is_not_called_revoked(ledger: Ledger, tmp_path: Path) -> None:
    ledger.clients.revoke(ALICE, LEFT_BY_ITSELF)
    ledger.clients.revoke(BOB, "")
    rows = member_rows(ledger, {})
    stopped = stopped_status(ledger, "x")["clients"]
    for told in (rows, stopped):
        assert (state_of(told, ALICE), state_of(told, BOB)) == ("left", "revoked")
        assert state_of(told, GONE) == "away"
    with HistoryReader(tmp_path / "ledger.sqlite") as reader:
        standing = {m.client: m.standing for m in reader.read(None).members}
    assert (standing[ALICE], standing[BOB]) == ("left", "revoked")


def test_status_counts_those_who_are_gone_and_lists_the_others(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.clients.revoke(ALICE, LEFT_BY_ITSELF)
    ledger.clients.revoke(BOB, LEFT_BY_ITSELF)
    show_status(stopped_status(ledger, "x"))
    out = capsys.readouterr().out
    assert "former      2 left: fcil-server clients" in out
    assert sum(line.startswith(("alice", "bob", "gone")) for line in out.splitlines()) == 1


def test_status_names_the_best_state_and_the_promoted_one(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    best = ledger.evaluations.best(RUN)
    assert best is not None
    ledger.runs.promote(RUN, 4)
    show_status(stopped_status(ledger, "x"))
    lines = capsys.readouterr().out.splitlines()
    wanted = f"best        state {best.state} of task {best.task}, {percent(best.accuracy)} of all images"
    assert wanted in lines
    assert "promoted    state 4: clients use its model" in lines


def test_names_and_states_are_whole_and_refusals_have_their_own_lines(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.database.execute("UPDATE clients SET name = ? WHERE client_id = ?", (LONG, ALICE))
    ledger.refusals.add(ALICE, "schema_mismatch", "expected (10, 192), got (9, 192).")
    show_members(member_rows(ledger, {ALICE: "preparing"}), [])
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith(f"{LONG} ")]
    assert " preparing " in row
    (why,) = [line for line in lines if line.startswith(f"{LONG}: ")]
    assert why.startswith(f"{LONG}: expected (10, 192), got (9, 192). (")


def test_relays_and_those_behind_them_are_named_alike_in_both(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.database.execute("UPDATE clients SET role = 'relay' WHERE client_id = ?", (ALICE,))
    ledger.database.execute("UPDATE clients SET via = ? WHERE client_id = ?", (ALICE, BOB))
    show_members(member_rows(ledger, {}), [])
    show_status(stopped_status(ledger, "x"))
    lines = capsys.readouterr().out.splitlines()
    for named in ("alice (relay) ", "bob via alice ", "gone "):
        assert sum(line.startswith(named) for line in lines) == 2


@pytest.mark.parametrize("code", ["not_yet", "already_have"])
def test_a_refusal_after_which_all_went_well_is_not_told(
    code: str, ledger: Ledger, tmp_path: Path
) -> None:
    ledger.refusals.add(ALICE, code, "task 2 train round 1 resumes shortly.")
    (row,) = [r for r in member_rows(ledger, {}) if r["id"] == ALICE]
    assert row["refusals"] == []
    with HistoryReader(tmp_path / "ledger.sqlite") as reader:
        (member,) = [m for m in reader.read(None).members if m.client == ALICE]
    assert (member.refused, member.refusal) == (0, "")


def test_who_is_connected_is_noted_for_the_time_after_a_kill(ledger: Ledger) -> None:
    clock = ledger.database.clock
    ledger.clients.mark_seen(GONE)
    came = clock.now
    clock.now += 300
    ledger.clients.touch_all([ALICE, BOB])
    seen = {c["id"]: c["last_seen"] for c in stopped_status(ledger, "x")["clients"]}
    assert (seen[ALICE], seen[BOB], seen[GONE]) == (came + 300, came + 300, came)


@pytest.mark.parametrize(
    ("device", "short"),
    [
        ("cpu (x86_64, 2 threads, torch 2.13.0+cpu)", "cpu, 2 threads"),
        ("cpu (x86_64, 1 threads, torch 2.13.0+cpu)", "cpu, 1 thread"),
        ("cpu (x86_64, 1 thread, torch 2.13.0+cpu)", "cpu, 1 thread"),
        ("cuda:0 (NVIDIA H100 80GB HBM3, torch 2.13.0, trains in bf16)",
         "cuda:0, NVIDIA H100 80GB HBM3, trains in bf16"),
        ("Linux x86_64", "Linux x86_64"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_device_is_told_in_a_few_words(device: str, short: str) -> None:
    assert short_device(device) == short


def test_one_is_one_and_more_are_more() -> None:
    assert [count_of(n, "round") for n in (0, 1, 2, 1000)] == [
        "0 rounds", "1 round", "2 rounds", "1,000 rounds",
    ]  # fmt: skip
    assert [count_of(n, "class") for n in (1, 2)] == ["1 class", "2 classes"]


RELAY = {
    "running": True, "relay": "depot", "federation": "f", "server": "127.0.0.1:1",
    "address": "127.0.0.1:2", "up": True, "clients": 2, "cached_chunks": 0,
    "cached_bytes": 0, "sums": 3, "added": 50,
}  # fmt: skip


@pytest.mark.parametrize("adds", [True, False])
def test_a_relay_says_what_it_has_added_up(capsys, adds):
    show_status({**RELAY, **({"adds_up": True} if adds else {})})
    assert ("added up    50 updates in 3 sums" in capsys.readouterr().out) is adds


@pytest.mark.parametrize(("behind", "what"), [(True, "outer relay"), (False, "server     ")])
def test_a_relay_names_what_it_connects_to(capsys, behind, what):
    show_status({**RELAY, "behind_relay": behind})
    assert f"{what} 127.0.0.1:1 (connected)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("role", "via", "name"),
    [
        ("client", None, "a"),
        ("client", "depot", "a via depot"),
        ("relay", None, "a (relay)"),
        ("relay", "region", "a (relay) via region"),
    ],
)
def test_a_member_is_named_with_its_relay(role, via, name):
    assert name_with_relay({"name": "a", "role": role, "via": via}) == name
