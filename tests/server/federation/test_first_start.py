"""A federation's first start: what is wrong is told whole, and leaves nothing; what is chosen stays."""

from __future__ import annotations

import contextlib
import socket
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_protocol.errors import ConfigError, PortInUse
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server.cli import main as cli
from fcil_server.federation.directory import Federation
from fcil_server.federation.first_start import load_first, removed_if_refused


def refused(*settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load_first(None, settings)
    return error.value


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("round.min_client=3", "method.name=pilor"),
            (
                "'round.min_client'",
                "did you mean 'round.min_clients'",
                "method 'pilor'",
                "'pilora'",
            ),
        ),
        (
            ("round.min_client=3", "tasks.schedule=listed", "method.rang=4"),
            ("'round.min_client'", "tasks.classes is empty", "rang"),
        ),
        (("method.preset=shor",), ("no preset 'shor'",)),
        (("method=4",), ("method",)),
    ],
)
def test_all_faults_are_named_at_once(settings: tuple[str, ...], said: tuple[str, ...]) -> None:
    text = str(refused(*settings))
    for words in said:
        assert words in text


def test_the_defaults_have_no_fault() -> None:
    assert load_first(None, ()).method.name == "pilora"


def test_a_start_that_is_refused_for_its_settings_makes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "federation"
    arguments = ["serve", "--dir", str(directory), "-c", "method.name=pilor"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("port", [(), ("--port", "0")])
def test_a_first_start_names_all_faults_with_a_port_too(
    port: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCIL_METHOD_RANG", "4")
    arguments = ["serve", "--dir", str(tmp_path / "new"), *port, "-c", "round.min_client=3"]
    refusal = CliRunner().invoke(cli.app, arguments)
    assert refusal.exit_code == 4
    for words in ("'round.min_client'", "'rang'", "FCIL_METHOD_RANG"):
        assert words in refusal.output


def start(directory: Path, *, listens: bool) -> None:
    """Start a server as far as to its port, which is taken, or is so when it listened before."""

    def begin() -> None:
        with removed_if_refused(directory) as told:
            with contextlib.closing(Federation.open(directory, None, ())):
                told.opened, told.listens = True, listens
            raise PortInUse("port 1 is in use.")

    with pytest.raises(PortInUse):
        begin()


@pytest.mark.parametrize("was_there", [False, True])
def test_a_first_start_whose_port_is_taken_leaves_nothing(was_there: bool, tmp_path: Path) -> None:
    directory = tmp_path / "federation"
    if was_there:
        directory.mkdir()
    start(directory, listens=False)
    assert directory.exists() is was_there
    assert not was_there or not list(directory.iterdir())


def test_a_federation_that_was_there_or_that_listened_stays(tmp_path: Path) -> None:
    directory = tmp_path / "federation"
    start(directory, listens=True)
    assert (directory / "keys").exists()
    start(directory, listens=False)
    assert (directory / "keys").exists()


def test_the_command_leaves_nothing_where_its_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        directory = tmp_path / "federation"
        arguments = ["serve", "--dir", str(directory), "--port", str(port)]
        done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2, done.output
    assert not directory.exists()


def test_what_is_set_at_the_first_start_is_kept_with_its_meaning(tmp_path: Path) -> None:
    kept = ("method.name=fedncm", 'federation.advertise=["lab.example:7710"]')
    overrides = (*kept, 'federation.listen="127.0.0.1:7999"')
    Federation.open(tmp_path, None, overrides, kept).close()
    text = (tmp_path / "federation.toml").read_text()
    fields = tomllib.loads(text)
    assert fields["method"]["name"] == "fedncm"
    assert fields["federation"]["advertise"] == ["lab.example:7710"]
    assert fields["federation"]["listen"] != "127.0.0.1:7999"
    (line,) = [x for x in text.splitlines() if x.startswith("advertise")]
    assert "  # " in line
    Federation.open(tmp_path, None, ("round.min_clients=7",), ("round.min_clients=7",)).close()
    assert (tmp_path / "federation.toml").read_text() == text, "a later start is for itself"


def test_what_another_process_works_in_is_not_removed(tmp_path: Path) -> None:
    def begin() -> None:
        with removed_if_refused(tmp_path) as told:
            Federation.open(tmp_path, None, ()).close()
            told.opened = True
            held.enter_context(DirectoryLock.acquire(tmp_path, "federation"))
            raise PortInUse("port 1 is in use.")

    with contextlib.ExitStack() as held, pytest.raises(PortInUse):
        begin()
    assert (tmp_path / "keys").exists()
