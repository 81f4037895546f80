"""Erasing a member: nothing that the server holds names it any more, and the rest still works."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fcil_adapters.contract import State
from fcil_adapters.masks.record import MaskList, MaskRecord
from fcil_protocol.errors import DiskFull, UsageError
from fcil_protocol.ids import ClientId
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import StateStore
from fcil_server.cli.main import app
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.directory import Federation
from fcil_server.federation.roster import Roster, ever_named
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from fcil_server.reports import plots, run_directory
from fcil_server.runs import erase as erasing
from fcil_server.runs.erase import erase, finish_erasures
from fcil_server.runs.fork import fork
from fcil_server.storage.check import check
from fcil_server.storage.findings import Severity
from server.runs.test_forget import killed_at
from server.storage_kit import ALICE, BOB, Built, build

NAME, PSEUDONYM = "zaphod-7", "erased-aaaaaaaa"


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Return a federation in which the member has left its name wherever it can."""
    monkeypatch.setattr(plots, "draw", lambda _: {})  # of rounds that took no time
    built = build(tmp_path / "fed")
    with built.ledger() as ledger:
        ledger.database.execute(
            "UPDATE clients SET name = ?, device = ? WHERE client_id = ?",
            (NAME, f"a Jetson of {NAME}", ALICE),
        )
        ledger.tickets.add(NAME, curve=b"g" * 32, signing=b"h" * 32, expires_at=ledger.now + 99)
        ledger.tickets.use(b"g" * 32, ALICE)
        ledger.tickets.add(NAME, curve=b"k" * 32, signing=b"l" * 32, expires_at=ledger.now - 1)
        for number in range(300):  # some pages of them
            ledger.events.add("info", "connected", f"{NAME} connected {number}", client=ALICE)
        ledger.events.add("warning", "far_apart", f"{NAME} and {NAME}-2 mean different things")
        ledger.refusals.add(ALICE, "malformed", f"{NAME} sent nothing")
        key = ledger.rounds.current(built.run).key
        ledger.answers.set(key, BOB, "declined", f"no images like those of {NAME}")
        ids = [u.update_id for u in ledger.updates.of_client(built.run, ALICE)]
        ledger.database.execute("UPDATE updates SET train_loss = 0.5, train_accuracy = 0.5")
        folder = built.directory / "runs" / built.run
        run_directory.write(ledger, built.run, folder, states=StateStore(folder / "states"))
    KeptUpdates(kept_folder(built.directory, built.run)).put([(ids[0], b"sums"), ("f" * 64, b"")])
    return built


def run(built: Built, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--dir", str(built.directory)])


def naming(directory: Path, word: str = NAME) -> list[str]:
    return sorted(
        p.name for p in directory.rglob("*") if p.is_file() and word.encode() in p.read_bytes()
    )


@pytest.mark.ledger_file
def test_no_file_of_the_server_names_it_any_more(built: Built) -> None:
    before = built.directory / "ledger.version-9.sqlite"  # as an upgrade has kept it
    before.write_bytes((built.directory / "ledger.sqlite").read_bytes())
    log = built.directory / "ledger.version-before-move.sqlite-wal"  # of a move that was killed
    log.write_bytes(NAME.encode())
    assert [f.text for f in check(built.directory) if f.about == "leftovers"] == []
    named = {"ledger.sqlite", before.name, log.name, "summary.json", "report.html"}
    assert named <= set(naming(built.directory))
    done = run(built, "erase", NAME, "--yes", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)["data"]
    assert data["pseudonym"] == PSEUDONYM
    places = naming(built.directory)
    with built.ledger() as ledger:
        texts = [e.text for e in ledger.events.newest()]
        assert texts == [f"{PSEUDONYM} and {NAME}-2 mean different things"], "another's name stays"
        ledger.database.execute("DELETE FROM events")
        ledger.database.empty_log()
        ledger.clients.mark_seen(ALICE, device="cpu")  # its connection ends a moment later
        row = ledger.clients.get(ALICE)
        told = ledger.database.rows(
            "SELECT DISTINCT client FROM updates WHERE coalesce(train_loss, train_accuracy) > 0"
        )
    assert ALICE not in {line["client"] for line in told}
    assert told
    assert places == ["ledger.sqlite"]
    assert naming(built.directory) == []
    assert (row.name, row.curve, row.device, row.last_seen) == (PSEUDONYM, b"", "", None)
    assert "1 sealed updates and 1 kept ones" in data["gone"]
    assert any("4 of its updates are averaged into the states" in line for line in data["stays"])
    assert any("no other client can be forgotten exactly" in line for line in data["stays"])


def test_its_sealed_update_leaves_the_disk_and_the_round(built: Built) -> None:
    with built.ledger() as ledger:
        sealed = Spool(built.spool)
        needle = sealed.get(built.update)[-200:]
        sealed.close()
        assert needle in b"".join(p.read_bytes() for p in built.spool.glob("*.seg"))
    assert run(built, "erase", NAME, "--yes").exit_code == 0
    assert needle not in b"".join(p.read_bytes() for p in built.spool.rglob("*") if p.is_file())
    with built.ledger() as ledger:
        (update,) = ledger.updates.of_round(ledger.rounds.current(built.run).key)
    assert update.status is UpdateStatus.EXCLUDED


def test_all_that_shows_members_still_works_and_check_finds_nothing(built: Built) -> None:
    KeptUpdates(kept_folder(built.directory, built.run)).remove(["f" * 64])
    before = {(f.level, f.about) for f in check(built.directory)}
    assert run(built, "erase", NAME, "--yes").exit_code == 0
    after = [f for f in check(built.directory) if f.level is not Severity.OK]
    assert not [f for f in after if (f.level, f.about) not in before], after
    for command in ("clients", "rounds", "report", "status"):
        shown = run(built, command, "--json")
        assert shown.exit_code == 0, shown.output
        assert NAME not in shown.stdout
    assert PSEUDONYM in run(built, "clients", "--json").stdout


def test_its_key_is_never_a_members_again_and_its_name_is_free(built: Built) -> None:
    assert run(built, "erase", NAME, "--yes").exit_code == 0
    old, new = built.clients[ALICE].public, PrivateKeys.generate().public
    federation = Federation.open(built.directory, None, ())
    try:
        roster = Roster(federation, AllowList())
        roster.open()
        assert not roster.allow_list(old.curve), "it hears no explanation either"
        with pytest.raises(
            UsageError, match="belonged to an erased member and is not accepted again"
        ):
            roster.enrol_local(NAME, old, "me")
        assert roster.enrol_local(NAME, new, "me")
    finally:
        federation.close()


@pytest.mark.parametrize(("members", "said"), [((ALICE, BOB), True), ((BOB,), False), ((), False)])
def test_stored_states_that_hold_its_key_are_named_and_no_others(
    built: Built, monkeypatch: pytest.MonkeyPatch, members: tuple[ClientId, ...], said: bool
) -> None:
    """The states of a masked round that later ones have replaced hold no key any more."""
    monkeypatch.setattr(erasing, "MASKING", {"train"})
    store = StateStore(built.directory / "runs" / built.run / "states")
    number = store.numbers()[-1] + 1
    state = State({"w": np.ones(1, np.float32)})
    if members:
        rows = (np.zeros((len(members), width), np.uint8) for width in (8, 32, 64))
        state = MaskRecord.new(MaskList(0, members, *rows), built.run).into(state)
    store.save(number, state, None, 0)
    done = run(built, "erase", NAME, "--yes", "--json")
    assert done.exit_code == 0, done.output
    named = f"in stored state {number} of run {built.run}"
    stays = json.loads(done.stdout)["data"]["stays"]
    assert [named in line for line in stays if "signing key" in line] == [True] * said


def test_a_state_that_cannot_be_read_may_hold_its_key(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasing, "MASKING", {"train"})
    store = StateStore(built.directory / "runs" / built.run / "states")
    number = store.numbers()[0]
    store.path(number).write_bytes(b"torn")
    done = run(built, "erase", NAME, "--yes")
    assert f"in stored state {number} of run {built.run}" in done.output


def test_the_audit_log_stays_and_says_it_by_id_alone(built: Built) -> None:
    with built.ledger() as ledger:
        ledger.audit.add("uid 0", "revoke", f"{NAME}: lost")
        ledger.audit.add("uid 0", "revoke", f"{NAME}-2: lost")
    done = run(built, "erase", NAME, "--yes")
    assert "stays: its name in 1 lines of the audit log" in done.output
    with built.ledger() as ledger:
        assert ledger.audit.newest()[-1].detail == ALICE


def test_a_log_that_names_it_is_named(built: Built) -> None:
    (built.directory / "serve.log").write_text(f"12:00 {NAME} connected\n")
    (built.directory / "worker.log").write_text(f"{NAME}-2\n")
    done = run(built, "erase", NAME, "--yes")
    assert "stays: its name in log files: serve.log\n" in done.output


def test_without_a_terminal_it_must_be_said_and_it_says_what_can_be_done_before(
    built: Built,
) -> None:
    done = run(built, "erase", NAME)
    assert done.exit_code == 4
    text = " ".join(done.output.split())
    assert f"fcil-server forget --dir {built.directory} {NAME} --run {built.run}" in text
    assert "Give --yes." in text
    with built.ledger() as ledger:
        assert ledger.clients.by_name(NAME) is not None


def test_once_more_finishes_what_a_kill_interrupted(built: Built) -> None:
    federation = Federation.open(built.directory, None, ())
    try:
        roster = Roster(federation, AllowList())
        roster.erase(ever_named(federation.ledger, NAME), "me")  # and killed
        done = erase(roster, built.directory, ever_named(federation.ledger, PSEUDONYM), "me")
    finally:
        federation.close()
    assert (done.pseudonym, done.gone[-1]) == (PSEUDONYM, "1 sealed updates and 1 kept ones")


def test_the_next_start_finishes_it_as_well(built: Built) -> None:
    federation = Federation.open(built.directory, None, ())
    try:
        roster = Roster(federation, AllowList())
        roster.erase(ever_named(federation.ledger, NAME), "me")  # and killed
        texts = [f.text for f in check(built.directory) if f.level is Severity.FAILURE]
        assert texts == ["1 kept updates of erased members are still here"]
        federation.ledger.runs.set_status(built.run, RunStatus.STOPPED)
        finish_erasures(federation.ledger, built.directory)
        texts = [f.text for f in check(built.directory)]
        assert "4 kept updates of erased members: removed, as they must be" in texts
        assert not any("aaaa is missing" in text for text in texts)
    finally:
        federation.close()
    assert KeptUpdates(kept_folder(built.directory, built.run)).names() == ["f" * 64]
    spool = Spool(built.spool)
    assert built.update not in spool.keys()  # noqa: SIM118
    spool.close()


def test_a_fault_of_the_disk_names_what_to_repeat(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise DiskFull("no room.")

    with monkeypatch.context() as patched:
        patched.setattr(KeptUpdates, "remove", full)
        done = run(built, "erase", NAME, "--yes")
    text = " ".join(done.output.split())
    assert done.exit_code != 0
    assert f"The client is {PSEUDONYM} in the ledger" in text
    assert f"fcil-server erase --dir {built.directory} {PSEUDONYM}" in text
    assert run(built, "erase", PSEUDONYM, "--yes").exit_code == 0


def test_a_fork_that_no_server_opened_holds_none_of_it(built: Built) -> None:
    with built.ledger() as ledger:
        ids = [str(u) for u in sorted(ledger.updates.counted_ids(built.run))]
        kept = KeptUpdates(kept_folder(built.directory, built.run))
        kept.put((update, b"sums") for update in ids)
        row = fork(ledger, built.directory, built.run, 2, actor="me", action="rollback")
        theirs = KeptUpdates(kept_folder(built.directory, row.run_id))
        counted = ledger.updates.counted_ids(row.run_id)
        assert set(theirs.names()) == counted
        assert counted < set(ids), "the parent has more"
        theirs.put((update, b"sums") for update in ids)  # as forks of earlier versions
    assert run(built, "erase", NAME, "--yes").exit_code == 0
    assert set(theirs.names()) <= counted


@pytest.mark.parametrize(
    "point", [n if n % 9 == 4 else pytest.param(n, marks=pytest.mark.full) for n in range(30)]
)
def test_killed_at_any_moment_others_updates_stay_and_once_more_finishes_it(
    built: Built, point: int
) -> None:
    spool = Spool(built.spool)
    sealed = spool.get(built.update)
    spool.remove([built.update])
    for key, body in (("1" * 64, b"of another"), (built.update, sealed), ("2" * 64, b"too")):
        spool.append(key, body)
    spool.close()
    assert len(list(built.spool.glob("*.seg"))) == 1

    def work(name: str) -> None:
        federation = Federation.open(built.directory, None, ())
        roster = Roster(federation, AllowList())
        erase(roster, built.directory, ever_named(federation.ledger, name), "me")
        federation.close()

    killed_at(point, lambda: work(NAME), commits=False)
    with built.ledger() as ledger:
        left = ledger.clients.get(ALICE).name
    work(left)
    assert [p.suffix for p in built.spool.iterdir()] == [".seg"]
    assert sealed[-200:] not in b"".join(p.read_bytes() for p in built.spool.iterdir())
    again = Spool(built.spool)
    assert (again.get("1" * 64), again.get("2" * 64)) == (b"of another", b"too")
    assert (again.recovered, len(again.keys())) == ([], 2)
    again.close()
