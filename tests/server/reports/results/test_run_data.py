"""A run as reports show it: one moment of it, though its server goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import sample_run
from byte_counts import add_bytes
from fcil_server.ledger.enums import Cause, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RoundRow
from fcil_server.reports.results.round_views import Bytes, RoundReader, RoundView
from fcil_server.reports.results.run_data import RunData, collect
from sample_run import ALICE, CLIENTS, RUN


def flows_agree(data: RunData) -> bool:
    """Say whether a run's flows, one by one, have the bytes of its sums."""
    mine = [[f for f in data.flows if f.direction is d] for d in Direction]
    each = {
        (c, d): Bytes.total(f for f in flows if f.client == c).true_wire
        for d, flows in zip(Direction, mine, strict=True)
        for c in CLIENTS
    }
    return each == data.sums.sizes and [Bytes.total(flows) for flows in mine] == [
        data.bytes_of(d) for d in Direction
    ]


def test_sums_are_those_of_the_flows(tmp_path: Path) -> None:
    with sample_run.build(tmp_path / "ledger.sqlite") as ledger:
        assert flows_agree(collect(ledger, RUN))


def test_what_a_server_writes_meanwhile_is_in_no_part_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RoundReader.view
    with sample_run.build(tmp_path / "ledger.sqlite") as server:

        def view(self: RoundReader, row: RoundRow) -> RoundView:
            found = real(self, row)
            add_bytes(server, Direction.UP, Cause.CONTROL, round_key=row.key, client=ALICE, wire=4)
            return found

        monkeypatch.setattr(RoundReader, "view", view)
        with Ledger(server.path, read_only=True) as ledger:
            during, after = collect(ledger, RUN), collect(ledger, RUN)
    assert flows_agree(during)
    assert after.bytes_of(Direction.UP).wire > during.bytes_of(Direction.UP).wire
