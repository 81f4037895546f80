"""What an operator sees of backup, restore and rollback: one clear line, and codes to act on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import load_method
from fcil_protocol.ids import new_run_id
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server.cli.main import app
from fcil_server.federation.config import Config
from fcil_server.ledger.enums import RunStatus
from fcil_server.runs.run_record import begin_row
from server.storage_kit import OPEN_STATE, Built, build, flip


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phrase").write_text("correct horse battery\n")
    return build(tmp_path / "federation")  # where every command looks by itself


def run(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def test_a_backup_goes_and_comes_back(built: Built) -> None:
    said = run("backup", "b.tar", "--passphrase-file", "phrase").stdout
    assert f"run {built.run} at state {OPEN_STATE}, keys sealed" in said
    said = run("restore", "b.tar", "--dir", "new", "--passphrase-file", "phrase").stdout
    assert f"continues from state {OPEN_STATE} of {built.run}" in said
    assert "members: a, b" in said
    assert "clients revoked after that are members again" in said
    listed = run("run", "ls", "--dir", "new").stdout.splitlines()
    assert listed[0].startswith(f"{built.run}  stopped")
    assert listed[1].endswith(f"forked from {built.run} at state {OPEN_STATE}")
    shown = run("status", "--dir", "new").stdout
    assert f"forked from {built.run} at state {OPEN_STATE}" in shown


def test_a_run_without_a_state_is_said_to_have_none(built: Built) -> None:
    other = new_run_id()
    with built.ledger() as ledger:
        old = ledger.runs.newest()
        ledger.runs.add(
            other, method=old.method, method_version="1", config=old.config, hparams={},
            backbone={}, schema_digest=old.schema_digest, seed=1,
        )  # fmt: skip
    said = run("backup", "b.tar", "--passphrase-file", "phrase").stdout
    assert f"run {other} without a state yet, keys sealed" in said
    said = run("restore", "b.tar", "--dir", "new", "--passphrase-file", "phrase").stdout
    newest = run("run", "ls", "--dir", "new").stdout.splitlines()[-1].split()[0]
    assert f"the run had no state yet; it begins again as run {newest}" in said
    assert newest != other


def test_data_of_both_is_json(built: Built) -> None:
    made = json.loads(run("backup", "b.tar", "--without-keys", "--json").stdout)["data"]
    assert (made["keys"], made["state"]) == (False, OPEN_STATE)
    answer = run("restore", "b.tar", "--dir", "new", "--new-keys", "--json").stdout
    back = json.loads(answer)["data"]
    assert back["parent"] == {"run": built.run, "state": OPEN_STATE}
    assert back["members"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["backup", "b.tar"],
            4,
            "a backup seals the server's keys with a passphrase, and there is no terminal to ask for it",
        ),
        (["backup", "b.tar", "--without-keys", "--passphrase-file", "phrase"], 4, "exclude"),
        (["backup", "phrase", "--without-keys"], 4, "exists already"),
        (["backup", "no/b.tar", "--without-keys"], 1, "there is no folder"),
        (["backup", "b.tar", "--passphrase-file", "no"], 1, "does not exist"),
        (["backup", "b.tar", "--without-keys", "--dir", "new"], 1, "holds no federation"),
        (["restore", "phrase", "--dir", "new"], 1, "not an fcil backup"),
        (["restore", "no", "--dir", "new"], 1, "does not exist"),
        (["check", "--dir", "new"], 1, "holds no federation"),
        (["run", "rollback"], 4, "one of them only"),
        (
            ["run", "rollback", "rx", "--to-task", "0"],
            4,
            "no run's id begins with 'rx'; the newest",
        ),
        (["run", "rollback", "--to-task", "2"], 4, "not learned to its end"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    built: Built, arguments: list[str], code: int, said: str
) -> None:
    done = run(*arguments, code=code)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not list(Path().glob("*.tar"))
    assert not Path("new").exists()
    with built.ledger() as ledger:
        assert len(ledger.runs.all()) == 1


def test_a_rollback_makes_the_new_run_the_newest_and_keeps_the_old(built: Built) -> None:
    answer = run("run", "rollback", built.run[:12], "--to-task", "0", "--json").stdout
    data = json.loads(answer)["data"]
    assert data["parent"] == {"run": built.run, "state": 2}
    assert data["rounds"] == 3
    with built.ledger() as ledger:
        assert ledger.runs.newest().run_id == data["run"]
        assert ledger.audit.newest()[-1].action == "rollback"
    said = run("run", "rollback", built.run, "--to-state", "4").stdout
    assert f"begins with state 4 of {built.run}, 4 rounds" in said


def test_a_directory_in_use_is_not_rolled_back(built: Built) -> None:
    with DirectoryLock.acquire(built.directory, "federation"):
        assert "is in use by process" in run("run", "rollback", "--to-task", "0", code=2).stderr
        run("backup", "b.tar", "--without-keys")  # this one may
        run("check")


def test_a_damaged_ledger_is_one_sentence_in_every_command(built: Built) -> None:
    path = built.directory / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[4096 * 2 :] = b"\x55" * (len(data) - 4096 * 2)
    path.write_bytes(data)
    flip(built.state(0))
    for arguments in (
        ["run", "rollback", "--to-task", "0"],
        ["backup", "b.tar", "--without-keys"],
        ["run", "ls"],
        ["status"],
        ["rounds"],
        ["clients"],
        ["serve", "--port", "0"],
        ["enrol", "c"],
    ):
        done = run(*arguments, code=1)
        assert "error [corrupt_file]" in done.stderr, arguments
        assert "fcil-server restore" in done.stderr, arguments


def test_a_run_that_is_complete_is_not_stopped_again(built: Built) -> None:
    said = run("run", "stop").stderr
    assert "The run is stopped." in said
    with built.ledger() as ledger:
        ledger.runs.set_status(built.run, RunStatus.DONE)
        before = ledger.audit.newest()
    said = run("run", "stop", code=4).stderr
    assert f"run {built.run} is complete already" in said
    with built.ledger() as ledger:
        assert ledger.runs.newest().status is RunStatus.DONE
        assert ledger.audit.newest() == before


@pytest.mark.parametrize(
    ("status", "after", "warned"),
    [
        (RunStatus.RUNNING, RunStatus.STOPPED, True),
        (RunStatus.FAILED, RunStatus.FAILED, False),
        (RunStatus.DONE, RunStatus.DONE, False),
    ],
)
def test_a_new_run_stops_one_that_is_not_complete_and_says_so(
    built: Built, status: RunStatus, after: RunStatus, warned: bool
) -> None:
    notes = []
    method = load_method("running_mean")
    setup = SimpleNamespace(
        config=Config(), method=method, hparams=method.hparams(), info=NO_BACKBONE,
        schema_digest="d" * 64,
    )  # fmt: skip
    with built.ledger() as ledger:
        ledger.runs.set_status(built.run, status)
        begin_row(ledger, setup, {}, lambda *note: notes.append(note))
        [former] = [row for row in ledger.runs.all() if row.run_id == built.run]
    assert former.status is after
    told = ("warning", "set_aside", f"run {built.run} is not complete, and is stopped")
    assert (told in notes) == warned


def test_a_run_that_no_server_could_resume_is_named_by_check_and_not_rolled_back(
    built: Built,
) -> None:
    with built.ledger() as ledger, ledger.transaction():
        ledger.database.execute("UPDATE runs SET schema_digest = ?", ("e" * 64,))
    listed = json.loads(run("check", "--json").stdout)["data"]["findings"]
    [found] = [f for f in listed if "cannot be resumed" in f["text"]]
    assert found["level"] == "warning"
    assert "docs/upgrades.md" in found["action"]
    said = run("run", "rollback", "--to-task", "0", code=1).stderr
    assert "was started with running_mean 1 (schema eeee" in said
    with built.ledger() as ledger:
        assert [row.run_id for row in ledger.runs.all()] == [built.run]
