"""A ledger may lie anywhere: under names that are no UTF-8, and those that a URL would read."""

import os
from pathlib import Path

import pytest

from fcil_server.ledger.ledger import Ledger

pytestmark = pytest.mark.ledger_file


@pytest.mark.parametrize("name", [b"n\xff\xfen", b"a b?mode=ro#c%20", "größe".encode()])
def test_a_ledger_opens_under_any_name(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.audit.add("me", "wrote", "")
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.audit.newest()[-1].actor == "me"
    assert (folder / "ledger.sqlite").exists()
