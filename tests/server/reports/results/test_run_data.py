"""A run as reports show it: one moment of it, though its server goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import sample_run
from byte_counts import add_bytes
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ByteCount, RoundRow
from fcil_server.reports.results.round_views import Bytes, RoundReader, RoundView, by_direction
from fcil_server.reports.results.run_data import RunData, collect
from sample_run import ALICE, CLIENTS, RUN


def flows_agree(data: RunData, counts: Sequence[ByteCount]) -> bool:
    """Say whether a run's flows, one by one, have the bytes of its sums."""
    mine = [[f for f in counts if f.direction is d] for d in Direction]
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
        assert flows_agree(collect(ledger, RUN), ledger.bytes.all(RUN))


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
            with ledger.database.moment():
                during, counts = collect(ledger, RUN), ledger.bytes.all(RUN)
            after = collect(ledger, RUN)
    assert flows_agree(during, counts)
    assert after.bytes_of(Direction.UP).wire > during.bytes_of(Direction.UP).wire


def test_the_kernels_count_of_a_connection_is_no_bytes_beside_those_of_its_messages() -> None:
    def count(cause: Cause, source: CountSource, wire: int) -> ByteCount:
        up = Direction.UP
        return ByteCount(RUN, 0, "train", 0, ALICE, up, cause, source, 0, 0, 0, wire)

    predicted, kernel = CountSource.PREDICTED, CountSource.KERNEL
    found = by_direction([
        count(Cause.UPDATE, predicted, 1000), count(Cause.CONTROL, predicted, 100),
        count(Cause.CONNECTION, kernel, 1120),
    ])  # fmt: skip
    whole = found[Direction.UP, None]
    assert (whole.true_wire, whole.rest) == (1120, 20)
    parts = {
        cause: (b.true_wire, b.rest, b.wire_kernel) for (_, cause), b in found.items() if cause
    }
    assert parts == {
        Cause.UPDATE: (1000, 0, 0), Cause.CONTROL: (100, 0, 0), Cause.CONNECTION: (0, 0, 1120),
    }  # fmt: skip


def test_a_warning_is_shown_however_much_was_noted_since(tmp_path: Path) -> None:
    with sample_run.build(tmp_path / "ledger.sqlite") as ledger:
        ledger.events.add("error", "state_lost", "a state is damaged", run=RUN)
        with ledger.transaction():
            for number in range(1_100):
                ledger.events.add("info", "update", f"update {number}", run=RUN)
        newest, *_ = collect(ledger, RUN).events
    assert (newest.level, newest.code) == ("error", "state_lost")
