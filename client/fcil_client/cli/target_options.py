"""Options that name a server, and a client of a partition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.errors import UsageError

ServerOption = Annotated[
    str | None, typer.Option(help="The server's name or address, if there are several.")
]
PartitionOption = Annotated[
    Path | None, typer.Option(help="A file of `fcil-client split` that divides the data.")
]
OwnSlotOption = Annotated[
    int,
    typer.Option(help="With --partition: the number of this client, from 0.", show_default=False),
]
SlotOption = Annotated[
    str | None,
    typer.Option(
        metavar="K",
        help="The client's number, from 0, if a partition divides the data; or its seat, if "
        "several have that number.",
    ),
]


def seat_of(partition: Path | None, slot: int) -> str:
    """Return the name that a slot of a partition gives to its client's home; empty without one.

    Raises:
        UsageError: there is no such slot, or only one of both is given.
        DataError, CorruptFile, StorageError: the partition cannot be read.
    """
    if (partition is None) != (slot < 0):
        raise UsageError(
            "a client of a partition needs both --partition FILE and --slot K.",
            action="Give both, or neither to take all images of --data.",
        )
    if partition is None:
        return ""
    from fcil_client.data import partition_file  # a daemon without one does not carry it along

    return partition_file.seat(partition_file.load(partition), slot)
