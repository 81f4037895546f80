"""Counts of bytes in a ledger, one flow at a time."""

from __future__ import annotations

from typing import Any

from fcil_protocol.ids import RoundKey
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ByteCount

SIZES = ("tensor", "sealed", "application", "wire", "retransmitted", "link")


def add_bytes(
    ledger: Ledger,
    direction: Direction,
    cause: Cause,
    *,
    run: Any = None,
    round_key: RoundKey | None = None,
    client: Any = None,
    source: CountSource = CountSource.PREDICTED,
    **sizes: int,
) -> None:
    """Add to a flow's count; a round's key names its run too, and sizes not given are 0."""
    of_run, task, kind, number = round_key or (run, None, None, None)
    count = ByteCount(
        run=of_run,
        task=task,
        kind=kind,
        round=number,
        client=client,
        direction=direction,
        cause=cause,
        source=source,
        **{**dict.fromkeys(SIZES, 0), **sizes},
    )
    ledger.bytes.add([count])
