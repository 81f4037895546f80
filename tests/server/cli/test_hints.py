"""Commands that the server's commands print name the directory that they were given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sample_run
from fcil_server.cli.main import app
from fcil_server.cli.options import DEFAULT_DIRECTORY, with_dir
from fcil_server.federation.directory import CONFIG


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it waits: fcil-server resume.", "it waits: fcil-server resume --dir fed."),
        ("(fcil-server close-round), stop", "(fcil-server close-round --dir fed), stop"),
        ("fcil-server run rollback r1 --to-state 2", "fcil-server run rollback --dir fed r1 --to-state 2"),
        ("`fcil-server classes admit`", "`fcil-server classes admit --dir fed`"),
        ("fcil-server status. Stop it: fcil-server stop.",
         "fcil-server status --dir fed. Stop it: fcil-server stop --dir fed."),
        ("fcil-server serve --dir OTHER", "fcil-server serve --dir OTHER"),
        ("fcil-server run cancel --dir OTHER 3", "fcil-server run cancel --dir OTHER 3"),
        ("fcil-server restore FILE --dir NEW", "fcil-server restore FILE --dir NEW"),
        ("fcil-server methods NAME; fcil-server relay", "fcil-server methods NAME; fcil-server relay"),
        ("fcil-client join --data FOLDER", "fcil-client join --data FOLDER"),
    ],
)  # fmt: skip
def test_commands_name_the_directory(text: str, expected: str) -> None:
    assert with_dir(text, Path("fed")) == expected
    assert with_dir(text, DEFAULT_DIRECTORY) == text


def test_a_directory_with_spaces_is_one_word_for_a_shell() -> None:
    assert with_dir("fcil-server page", Path("my fed")) == "fcil-server page --dir 'my fed'"


COMMANDS = [
    "status", "rounds", "report", "clients", "rotate-keys", "enrol x", "erase x", "forget x",
    "page", "export --onnx x", "backup x", "run ls", "run stop", "run queue", "run cancel 1",
    "run promote best", "run rollback", "classes ls", "classes admit", "token ls",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_advice_of_an_error_names_the_directory(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--dir", str(tmp_path), "--json"])
    action = json.loads(done.stdout)["data"]["action"]
    assert f"fcil-server serve --dir {tmp_path}" in action, done.output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run queue", "fcil-server run submit --dir"),
        ("token ls", "fcil-server token new --dir"),
        ("status", "fcil-server serve --dir"),
    ],
)
def test_a_commands_own_advice_names_the_directory(
    tmp_path: Path, command: str, expected: str
) -> None:
    sample_run.build(tmp_path / "ledger.sqlite").close()
    (tmp_path / CONFIG).touch()
    done = CliRunner().invoke(app, [*command.split(), "--dir", str(tmp_path)])
    assert expected in " ".join(done.output.split()), done.output
