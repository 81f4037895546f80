"""`scripts/vectors` adds what is missing and never writes a frozen vector again."""

from __future__ import annotations

from pathlib import Path

import pytest
from freezing import files, wire
from freezing.common import Folder

from fcil_protocol import PROTOCOL_VERSION
from frozen import ROOT


def test_what_is_frozen_is_left_alone():
    folder = Folder(ROOT / str(PROTOCOL_VERSION))
    before = {path.name: path.stat().st_mtime_ns for path in folder.directory.iterdir()}
    wire.freeze(folder)
    files.freeze(folder)
    assert folder.written == []
    after = {path.name: path.stat().st_mtime_ns for path in folder.directory.iterdir()}
    assert after == before


def test_a_file_without_its_description_is_not_overwritten(tmp_path: Path):
    (tmp_path / "ticket.txt").write_text("an older one")
    with pytest.raises(FileExistsError):
        wire.tickets(Folder(tmp_path))
    assert (tmp_path / "ticket.txt").read_text() == "an older one"
