"""A federation directory with something missing is never taken for a new one."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from fcil_protocol.errors import (
    ConfigError,
    CorruptFile,
    FcilError,
    KeyFileError,
    StorageError,
)
from fcil_server.federation.directory import CONFIG, Federation
from fcil_server.ledger.databases.schema import SCHEMA_VERSION
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from server.storage_kit import Built, build, tree


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "fed")


def opened(directory: Path, config: Path | None = None) -> str:
    federation = Federation.open(directory, config, ())
    try:
        return str(federation.id)
    finally:
        federation.close()


@pytest.mark.parametrize(
    ("gone", "error", "said", "action"),
    [
        ([LEDGER_NAME], CorruptFile, "is missing, though there are runs", "fcil-server restore"),
        (["federation.toml"], CorruptFile, "is missing, though there is a ledger", "--config FILE"),
        (["keys/server.json"], KeyFileError, "server.json is missing", "fcil-server restore"),
        (
            ["keys/root.json", "keys/certificate"],
            KeyFileError,
            "certificate is missing",
            "fcil-server restore",
        ),
    ],
)
def test_what_is_missing_is_named_and_not_made_anew(
    built: Built, gone: list[str], error: type[FcilError], said: str, action: str
) -> None:
    whole = {n: d for n, d in tree(built.directory).items() if n not in gone and n != "lock"}
    for name in gone:
        (built.directory / name).unlink()
    with pytest.raises(error, match=said) as caught:
        opened(built.directory)
    assert action in caught.value.action
    after = tree(built.directory)
    assert {
        n: d for n, d in after.items() if n != "lock" and not n.endswith(("wal", "shm"))
    } == whole


def test_an_emptied_ledger_is_not_a_new_one(built: Built) -> None:
    (built.directory / LEDGER_NAME).write_bytes(b"")
    with pytest.raises(CorruptFile, match="is empty, though there are runs"):
        opened(built.directory)


def test_a_lost_configuration_may_be_given_again(built: Built, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    shutil.move(built.directory / "federation.toml", config)
    opened(built.directory, config)
    opened(built.directory)  # it was kept


def test_a_lost_certificate_is_made_again_with_the_root_key(built: Built) -> None:
    before = opened(built.directory)
    (built.directory / "keys" / "certificate").unlink()
    assert opened(built.directory) == before


@pytest.mark.parametrize("kept", [[], ["root.json"], ["root.json", "server.json"]])
def test_a_first_start_that_was_killed_goes_on(
    built: Built, kept: list[str], tmp_path: Path
) -> None:
    """Before the first member and run, keys may be made."""
    new = tmp_path / "new"
    opened(new)
    for path in (new / "keys").iterdir():
        if path.name not in kept:
            path.unlink()
    opened(new)
    opened(new)


def test_a_damaged_ledger_is_refused_before_anything_is_added_to_it(built: Built) -> None:
    path = built.directory / LEDGER_NAME
    data = bytearray(path.read_bytes())
    data[4096 * 5 : 4096 * 12] = b"\x55" * (4096 * 7)
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=r"ledger.sqlite is damaged") as caught:
        Ledger(path)
    assert "fcil-server restore" in caught.value.action
    assert path.read_bytes() == bytes(data)


def test_a_file_with_unknown_keys_beside_a_newer_ledger_is_of_a_newer_fcil(built: Built) -> None:
    config = built.directory / CONFIG
    config.write_text(config.read_text() + "\n[later]\nkey = 1\n")
    with pytest.raises(ConfigError, match="later"):
        opened(built.directory)
    with contextlib.closing(sqlite3.connect(built.directory / LEDGER_NAME)) as ledger:
        ledger.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StorageError, match="was written by a newer fcil"):
        opened(built.directory)
