"""Files of arriving envelopes: kept for who comes back, few for each client, swept in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcil_protocol.errors import StorageError
from fcil_protocol.ids import ClientId
from fcil_server.incoming import IncomingFiles

ANN, BOB = ClientId("a" * 26), ClientId("b" * 26)


@pytest.fixture
def files(tmp_path: Path) -> IncomingFiles:
    return IncomingFiles(tmp_path, per_client=2)


def begin(files: IncomingFiles, client: ClientId, *digests: str) -> None:
    for digest in digests:
        files.place(client, digest).write_bytes(b"half")


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir()}


def test_the_oldest_of_a_client_gives_way(files: IncomingFiles, tmp_path: Path) -> None:
    begin(files, ANN, "1", "2", "3")
    assert names(tmp_path) == {"2", "3"}


def test_clients_do_not_take_each_others_place(files: IncomingFiles, tmp_path: Path) -> None:
    begin(files, ANN, "1", "2")
    begin(files, BOB, "3", "4")
    assert names(tmp_path) == {"1", "2", "3", "4"}


def test_who_comes_back_finds_what_had_arrived_and_it_is_the_newest_again(
    files: IncomingFiles, tmp_path: Path
) -> None:
    begin(files, ANN, "1", "2")
    assert files.place(ANN, "1").read_bytes() == b"half"
    begin(files, ANN, "3")
    assert names(tmp_path) == {"1", "3"}


def test_a_file_that_is_gone_leaves_its_place(files: IncomingFiles, tmp_path: Path) -> None:
    begin(files, ANN, "1", "2")
    (tmp_path / "2").unlink()
    files.gone(ANN, "2")
    files.gone(BOB, "2")  # nobody knew of it
    begin(files, ANN, "3")
    assert names(tmp_path) == {"1", "3"}


def test_a_sweep_leaves_what_somebody_goes_on_with(files: IncomingFiles, tmp_path: Path) -> None:
    (tmp_path / "of an earlier process").write_bytes(b"half")
    begin(files, ANN, "1", "2")
    files.sweep({"2"})
    assert names(tmp_path) == {"2"}


def test_a_file_that_was_swept_away_may_still_give_way(
    files: IncomingFiles, tmp_path: Path
) -> None:
    begin(files, ANN, "1", "2")
    files.sweep(())
    begin(files, ANN, "3")
    assert names(tmp_path) == {"3"}


def test_a_directory_that_is_gone_is_said(files: IncomingFiles, tmp_path: Path) -> None:
    tmp_path.rmdir()
    with pytest.raises(StorageError, match="cannot list"):
        files.sweep(())
