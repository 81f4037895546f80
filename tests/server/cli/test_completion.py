"""What a shell completes after Tab."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sample_run
from fcil_adapters.contract.registry import method_names
from fcil_client.cli import main as client
from fcil_protocol.ids import RunId
from fcil_protocol.process.terminal import run_app
from fcil_server.cli import main as server
from fcil_server.federation.config import load, to_toml
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

Tab = Callable[..., list[str]]
LATER_RUN = RunId("r20250101-000000-zzzz")  # begun later, whatever its name says


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with Ledger(tmp_path / LEDGER_NAME) as ledger:
        sample_run.add_clients(ledger)
        sample_run.add_run(ledger)
        sample_run.add_run(ledger, LATER_RUN)
        ledger.clients.revoke(sample_run.GONE)
    return tmp_path


@pytest.fixture
def tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tab:
    """Completions of the last word of a command line, given as bash splits it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # of details of a defect

    def press(*words: str, name: str = "fcil-server") -> list[str]:
        app = server.app if name == "fcil-server" else client.app
        monkeypatch.setattr(app, "rich_markup_mode", "rich")  # `run_app` changes it in a pipe
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.setenv(f"_{name.upper().replace('-', '_')}_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join((name, *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as end:
            run_app(app, name)
        out, err = capsys.readouterr()
        assert (end.value.code, err) == (0, "")
        assert not (tmp_path / "state").exists()
        return [line for line in out.splitlines() if line]

    return press


def test_names_are_those_of_the_ledger(tab: Tab, directory: Path) -> None:
    where = ("--dir", str(directory))
    assert tab("forget", *where, "") == ["alice", "bob", "gone"]
    assert tab("forget", *where, "a") == ["alice"]
    assert tab("forget", *where, "nothing like it") == []
    assert tab("revoke", *where, "") == ["alice", "bob"]


def test_runs_are_those_of_the_ledger_the_newest_first(tab: Tab, directory: Path) -> None:
    where = ("--dir", "=", str(directory))
    assert tab("report", *where, "--run", "r") == [LATER_RUN, sample_run.RUN]
    assert tab("report", *where, "--run", "=", "r2026") == [sample_run.RUN]


def test_the_home_folder_may_be_abbreviated(
    tab: Tab, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert tab("revoke", "--dir", f"~/{directory.name}", "a") == ["alice"]


def test_without_a_federation_there_is_nothing(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("revoke", "--dir", str(tmp_path), "")
    assert tab(*line) == []
    (tmp_path / LEDGER_NAME).write_bytes(b"no ledger at all" * 100)
    assert tab(*line) == []

    def denied(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    assert tab(*line) == []


def test_methods(tab: Tab) -> None:
    found = tab("methods", "fed_t")
    assert "fed_talora" in found
    assert all(name.startswith("fed_t") for name in found)


def test_settings_and_their_values(tab: Tab, tmp_path: Path) -> None:
    def setting(*words: str) -> list[str]:
        return tab("serve", "--dir", str(tmp_path), "-c", *words)

    assert {"round.quorum=", "round.take="} <= set(setting("round."))
    # The default beside the key keeps bash from ending the word.
    assert setting("round.min_cl") == ["round.min_clients=", "round.min_clients=2"]
    assert setting("round.min_clients", "=") == ["2"]
    assert setting("round.min_clients", "=", "3") == []
    assert setting("method.name", "=") == method_names()
    assert setting("method.name", "=", "hg") == ["hgp"]
    assert setting("tasks.schedule", "=", "l") == ["listed"]
    assert setting("run.weights", "=") == [r"\"\""]


def test_options_are_those_of_the_method_that_counts(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_prompt(*words: str) -> bool:
        return "method.lr_prompt=" in tab("serve", *words, "-c", "method.lr")

    other, file = tmp_path / "other.toml", tmp_path / "federation.toml"
    where = ("--dir", str(tmp_path))
    other.write_text(to_toml(load(None, ["method.name=hgp"])))
    assert not has_prompt(*where)
    assert has_prompt(*where, "-c", "method.name", "=", "hgp")
    assert has_prompt("--config", str(other))
    monkeypatch.setenv("FCIL_METHOD_NAME", "hgp")
    assert has_prompt(*where)
    assert not has_prompt(*where, "-c", "method.name", "=", "fedncm")
    monkeypatch.delenv("FCIL_METHOD_NAME")
    file.write_text(other.read_text())
    assert has_prompt(*where)


@pytest.mark.parametrize("text", ['method = "hgp"', "no TOML", "[method]\nname = 'none of them'\n"])
def test_keys_are_there_without_a_readable_file(tab: Tab, tmp_path: Path, text: str) -> None:
    (tmp_path / "federation.toml").write_text(text)
    where = ("--dir", str(tmp_path))
    assert tab("serve", *where, "-c", "method.")[0] == "method.name="
    assert "round.quorum=" in tab("serve", *where, "-c", "round.")


def test_an_export_takes_the_weights_alone(tab: Tab) -> None:
    assert tab("export", "-c", "") == ["run.weights=", r"run.weights=\"\""]


def test_commands_and_options(tab: Tab) -> None:
    assert "status" in tab("st")
    assert "--until-done" in tab("serve", "--until")
    assert "join" in tab("jo", name="fcil-client")


BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
@pytest.mark.full
def test_a_real_bash(directory: Path, tmp_path: Path) -> None:
    with Ledger(directory / LEDGER_NAME) as ledger:
        for name in ("vm:camera-1", "my camera"):
            key = (name * 8).encode()
            keys = {"curve": key[:32], "signing": key[1:33], "sealing": key[:1] * 1216}
            ledger.clients.add(sample_run.ClientId(name[0] * 26), name, **keys)
    program = tmp_path / "bin" / "fcil-server"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom fcil_server.cli.main import main\nmain()\n")
    program.chmod(0o755)
    where = ["--dir", str(directory)]
    lines = {
        "revoke vm:cam\t": ["vm:camera-1"],
        "revoke my\t": ["my camera"],
        "serve -c method.name=hgp -c method.lr_pr\t9": [
            *("-c", "method.name=hgp", "-c", "method.lr_prompt=9")
        ],
    }
    for line, arguments in lines.items():
        command, _, rest = line.partition(" ")
        found = typed(program.parent, f"fcil-server {command} {' '.join(where)} {rest}")
        assert found == ["fcil-server", command, *where, *arguments]


def typed(path: Path, line: str) -> list[str]:
    """Return the arguments of a line as a person types it into bash."""
    master, slave = pty.openpty()
    env = {
        "PATH": f"{path}:/usr/bin:/bin",
        "TERM": "dumb",
        "INPUTRC": "/dev/null",
        "HOME": str(path),
    }
    bash = subprocess.Popen(
        [str(BASH), "--noprofile", "--norc", "-i"], stdin=slave, stdout=slave, stderr=slave,
        env=env, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    said = b""

    def until(end: bytes) -> None:
        nonlocal said
        while end not in said:
            assert select.select([master], [], [], 120)[0], said
            said += os.read(master, 4096)

    try:
        os.write(
            master, b'eval "$(_FCIL_SERVER_COMPLETE=source_bash fcil-server)"; echo is"there"\n'
        )
        until(b"isthere")
        # To the beginning of the line (Ctrl-A): print its words instead of running it.
        os.write(master, line.encode() + b"\x01printf '<%s>' \x05 END\n")
        until(b"<END>")
    finally:
        bash.kill()
        bash.wait()
        os.close(master)
    printed = said[said.rindex(b"<fcil-server>") :].decode()
    return printed.removeprefix("<").split("<END>")[0].removesuffix(">").split("><")
