"""What the page's tests look at is what a server could have written."""

from __future__ import annotations

from pathlib import Path

import pytest

import page_kit
from fcil_server.federation.roster import check_name
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.results.run_data import collect


def long(path: Path) -> Ledger:
    return page_kit.long(path, rounds=80, tasks=8)


@pytest.mark.parametrize("build", [page_kit.small, page_kit.crowd, long])
def test_a_ledger_of_the_kit_has_no_faults_and_can_be_read(build, tmp_path: Path) -> None:
    with build(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.database.faults() == []
        run = ledger.runs.newest()
        assert run is not None
        data = collect(ledger, run.run_id)
        assert all(view.up.true_wire > 0 for view in data.rounds)


def test_every_hostile_name_can_be_enrolled() -> None:
    assert [check_name(name) for name in page_kit.HOSTILE_NAMES] == list(page_kit.HOSTILE_NAMES)
