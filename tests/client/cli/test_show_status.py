"""What is told of clients that are well, damaged, away, or have left."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_client.cli import main as cli
from fcil_client.cli.show_status import one_journal, one_status
from fcil_client.membership.leave import clear
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.storage.atomic_files import DirectoryLock

FED = FederationId("0123456789abcdef" * 2)
LINE = {
    "event": "sealed", "time": "2026-01-02T03:04:05Z", "digest": "1" * 64, "kind": "train",
    "task": 0, "round": 0, "run": "r", "tensors": [], "tensor_bytes": 8, "sealed_bytes": 100,
}  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Two enrolled folders, each with something in its journal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    homes = {}
    for name in ("well", "other"):
        data = tmp_path / name
        data.mkdir()
        homes[name] = home = Home.of(FED, data)
        home.save_enrolment(Enrolment(ClientId("a" * 26), name, FED, "", ("a:1",), str(data)))
        (home.directory / "egress.jsonl").write_text(json.dumps(LINE) + "\n")
    return homes


def run(*arguments):
    done = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["data"]


def test_a_damaged_file_of_one_client_hides_no_other(made):
    (made["other"].directory / "client.json").write_bytes(b"{")
    rows = {row["name"]: row for row in run("status")["clients"]}
    assert rows["well"]["damaged"] == ""
    assert "the journal of what left the device stays" in rows["unknown"]["damaged"]
    assert rows["unknown"]["directory"] == str(made["other"].directory)
    words = CliRunner().invoke(cli.app, ["status"])
    assert words.exit_code == 0
    assert "well" in words.output
    assert "client.json is damaged" in words.output


def test_the_journal_of_a_damaged_client_is_shown(made):
    (made["other"].directory / "client.json").write_bytes(b"{")
    row = one_journal(made["other"], None)
    assert len(row["envelopes"]) == 1
    assert "damaged" in row["damaged"]
    assert not row["left"]
    assert len(run("journal")["journals"]) == 2


def test_a_client_that_left_is_still_known_by_its_journal(made):
    clear(made["other"])
    assert made["other"].enrolment() is None
    row = one_journal(made["other"], None)
    assert (row["name"], row["left"], len(row["envelopes"])) == ("other", True, 1)
    data = row["data"]
    (found,) = run("journal", "--data", data)["journals"]
    assert found == row
    assert [r["name"] for r in run("status")["clients"]] == ["well"]
    words = CliRunner().invoke(cli.app, ["journal", "--data", data])
    assert "has left its federation" in words.output


def test_who_left_and_came_back_is_a_member_again(made):
    home = made["other"]
    enrolment = home.enrolment()
    clear(home)
    home.make()
    home.save_enrolment(replace(enrolment, name="again"))
    assert one_journal(home, None)["name"] == "again"
    assert not one_journal(home, None)["left"]
    assert one_status(home)["damaged"] == ""


@pytest.mark.parametrize(
    "arguments", [("join",), ("--nope",), ("nope",), ("join", "--threads", "-1")]
)
@pytest.mark.parametrize("module", ["fcil_client", "fcil_server"])
def test_arguments_that_are_refused_end_with_the_code_of_the_documents(module, arguments):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=False, capture_output=True
    )
    assert done.returncode == 4
    assert b"Traceback" not in done.stderr


def test_a_folder_whose_name_is_no_text_is_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    data.mkdir()
    home = Home.of(FED, data)
    home.save_enrolment(Enrolment(ClientId("a" * 26), "c", FED, "", ("a:1",), str(data)))
    assert home.enrolment().data == str(data)
    for command in ("status", "journal"):
        assert CliRunner().invoke(cli.app, [command]).exit_code == 0
        assert run(command, "--data", str(data))


def test_a_client_that_does_not_run_can_be_dropped_and_status_says_how(made):
    words = CliRunner().invoke(cli.app, ["status"]).output
    assert words.count("fcil-client leave --data FOLDER --without-server") == 1
    (made["other"].directory / "client.json").unlink()
    words = CliRunner().invoke(cli.app, ["status"]).output
    assert f"fcil-client leave --data {made['well'].enrolment().data} --without-server" in words


def test_to_leave_is_confirmed(made, tmp_path):
    arguments = ["leave", "--data", str(tmp_path / "well"), "--without-server"]
    asked = CliRunner().invoke(cli.app, arguments)
    assert asked.exit_code == 4
    assert "well would leave its federation permanently" in asked.output
    assert "Give --yes." in asked.output
    assert made["well"].enrolment() is not None
    done = CliRunner().invoke(cli.app, [*arguments, "--yes"])
    assert done.exit_code == 0, done.output
    assert made["well"].enrolment() is None


def test_a_client_that_starts_is_not_said_to_hang(made, monkeypatch):
    monkeypatch.setattr("fcil_client.cli.show_status.STATUS_S", 0)
    with DirectoryLock.acquire(made["well"].directory, "client"):
        rows = {row["name"]: row for row in run("status")["clients"]}
        assert rows["well"]["starting"] is True
        assert "starting or stopping" in CliRunner().invoke(cli.app, ["status"]).output
