"""The processes of a local federation: none outlives the process that has started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fcil_protocol.errors import Unreachable
from fcil_protocol.process import control_socket
from fcil_server.lab.local import federation as local
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from orphans import ends_with_its_parent
from system.kit import settings

SCRIPT = """
import sys
from pathlib import Path
from fcil_server.lab.local.federation import LocalFederation
with LocalFederation(Path({place!r})) as federation:
    federation.serve(*{settings!r})
    print(federation.server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_server_ends_with_an_experiment_or_a_demo_that_is_killed(tmp_path: Path) -> None:
    ends_with_its_parent(SCRIPT.format(place=str(tmp_path), settings=settings()))


def test_the_last_words_are_the_error_without_the_notes_that_say_the_same(tmp_path: Path) -> None:
    federation = LocalFederation(tmp_path)
    log = federation.log("server")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("1 error: why\n2 error: why\n3 done\n")
    assert federation.last_words("server", 2) == "2 error: why | 3 done"
    log.write_text("1 error: why\n2 error: why\nerror [run_failed]: why.\n  Do this.\n")
    assert federation.last_words("server") == "error [run_failed]: why. |   Do this."


class TestUntil:
    """A server that ends right after a note: whoever waited for the note still gets it."""

    @pytest.fixture
    def federation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalFederation:
        """A server that has told its first note of four and has ended."""
        made = LocalFederation(tmp_path)
        made.federation.mkdir()
        with Ledger(made.federation / LEDGER_NAME) as ledger:
            ledger.events.add("info", "opened", "of an earlier start")
        made._last = (time.time(), "", "")
        notes = []
        with Ledger(made.federation / LEDGER_NAME) as ledger:
            for text in ("one", "two", "three", "two"):
                notes.append({"at": time.time(), "level": "info", "code": "opened", "text": text})
                ledger.events.add("info", "opened", text)
        answers = [{"last": 1, "notes": notes[:1]}]

        def ask(*_: object, **__: object) -> dict[str, Any]:
            if answers:
                return answers.pop()
            raise Unreachable("it closed the connection.")

        monkeypatch.setattr(control_socket, "ask", ask)
        made.server = subprocess.Popen([sys.executable, "-c", ""])
        made.server.wait()
        return made

    def test_later_notes_are_in_the_ledger_each_once(self, federation: LocalFederation) -> None:
        assert [federation.until("opened")["text"] for _ in range(4)] == [
            "one",
            "two",
            "three",
            "two",
        ]
        with pytest.raises(Unreachable):
            federation.until("opened")

    def test_a_note_that_was_never_written_is_an_error(self, federation: LocalFederation) -> None:
        assert federation.until("opened", text="one")
        with pytest.raises(Unreachable):
            federation.until("opened", text="earlier")


def test_its_processes_get_no_settings_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("FCIL_")]:
        monkeypatch.delenv(name)  # such as those of `scripts/test --full`
    for name in ("FCIL_ROUND_RETRY_S", "FCIL_METHOD_LR_PROMPT", "FCIL_RUN_SEED", "FCIL_RUN_SEEDS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FCIL_DATA", "/images")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(local, "ChildProcess", lambda _, env, **__: started.append(env))
    federation = LocalFederation(tmp_path)
    federation.join("one", tmp_path, env={"FCIL_RUN_SEED": "2"})
    federation._files.close()
    (given,) = started
    found = {name: value for name, value in given.items() if name.startswith("FCIL_")}
    assert found == {"FCIL_DATA": "/images", "FCIL_RUN_SEED": "2"}
