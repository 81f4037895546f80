"""What a shell completes after Tab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sample_run
from fcil_server.cli.completion import (
    complete_client,
    complete_method,
    complete_run,
    complete_setting,
)
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger


def typed(**params: Any) -> Any:
    """Return a command line so far."""
    return SimpleNamespace(params=params)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with Ledger(tmp_path / LEDGER_NAME) as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
    return tmp_path


def test_names_and_ids_are_those_of_the_ledger(directory: Path) -> None:
    line = typed(directory=directory)
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        names = [row.name for row in ledger.clients.all()]
        ids = [row.run_id for row in ledger.runs.all()]
    assert names
    assert ids
    assert complete_client(line, "") == names
    assert complete_client(line, names[0]) == names[:1]
    assert complete_client(line, "nothing like it") == []
    assert complete_run(line, ids[0][:3]) == ids


@pytest.mark.parametrize("complete", [complete_client, complete_run])
def test_without_a_federation_there_is_nothing(complete: Any, tmp_path: Path) -> None:
    assert complete(typed(directory=tmp_path), "") == []
    (tmp_path / LEDGER_NAME).write_bytes(b"no ledger at all" * 100)
    assert complete(typed(directory=tmp_path), "") == []


def test_methods_and_settings(tmp_path: Path) -> None:
    assert complete_method("fed_t") == ["fed_talora"]
    line = typed(directory=tmp_path, settings=["method.name=hgp"])
    assert complete_setting(line, "round.min_c") == ["round.min_clients="]
    assert "method.lr_prompt=" in complete_setting(line, "method.")
    assert complete_setting(line, "round.min_clients=3") == []
    wrong = typed(directory=tmp_path, settings=["method.name=none of them"])
    assert complete_setting(wrong, "method.") == ["method.name="]


@pytest.mark.parametrize(
    ("program", "line", "found"),
    [
        ("fcil_server", "fcil-server st", "status"),
        ("fcil_client", "fcil-client jo", "join"),
        ("fcil_server", "fcil-server methods plo", "plora"),
    ],
)
def test_a_shell_asks_the_programs(program: str, line: str, found: str) -> None:
    name = line.split(maxsplit=1)[0]
    start = f"import sys; sys.argv = [{name!r}]; from {program}.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start], check=True, capture_output=True, text=True, timeout=60,
        env={
            f"_{name.upper().replace('-', '_')}_COMPLETE": "complete_bash",
            "COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "PATH": "/usr/bin:/bin",
        },
    )  # fmt: skip
    assert found in done.stdout.split()
