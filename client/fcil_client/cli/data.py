"""``fcil-client data``: what ``--data`` would find, and data sets by name."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from functools import partial
from typing import Annotated, Any

import typer

from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.tables import Column, console, show_table
from fcil_protocol.process.terminal import (
    Format,
    chosen,
    count_of,
    emit,
    errors,
    printable,
    say_at_times,
)

_SIDES = ("train", "test", "undivided")  # columns, from left to right


def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", help="cifar10, cifar100, hf:OWNER/NAME@REVISION, or any --data."
        ),
    ],
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a named data set that is not here yet.")
    ] = False,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Show which images --data means: their classes, sides and faults; joins nothing.

    A data set by name is looked for in FCIL_DATASETS, or in the user's cache. No other command
    downloads: with --download this one does, once, and compares the archive with its digest.
    """
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_adapters.images import named_sets
        from fcil_adapters.images.decoding import open_source
        from fcil_client.data.split import untrained_notes

        if download and not named_sets.is_name(name):
            raise UsageError(
                f"--download is for data sets by name, and {name} is none.",
                action="Their names: "
                f"{', '.join(named_sets.ARCHIVES)}, hf:OWNER/NAME@REVISION (docs/data.md).",
            )
        path = named_sets.fetch(
            name, download=download, progress=say_at_times("fetched {:,} of {:,}".format)
        )
        with closing(open_source(path)) as source:
            listing = source.listing()
        counts: dict[str, Counter[str]] = {}
        for entry in listing.entries:
            counts.setdefault(entry.class_name, Counter())[entry.part or "undivided"] += 1
        untrained = sorted(label for label, sides in counts.items() if sides.keys() == {"test"})
        row = {
            "data": name,
            "path": str(path),
            "form": source.form,
            "images": len(listing.entries),
            "classes": {label: dict(sides) for label, sides in sorted(counts.items())},
            "faults": [*listing.faults, *untrained_notes(untrained)],
        }
        emit(row, form, lambda: show(row))


def show(row: dict[str, Any]) -> None:
    """Print a set's size, its classes by side, and one line for each thing that is left out."""
    sides: Counter[str] = sum(map(Counter, row["classes"].values()), Counter())
    typer.echo(f"{printable(row['path'])}, a {row['form']}")
    parts = ", ".join(f"{count:,} {side}" for side, count in sorted(sides.items(), reverse=True))
    images, classes = count_of(row["images"], "image"), count_of(len(row["classes"]), "class")
    typer.echo(f"{images} of {classes}: {parts}")
    by_side = (Column(side, partial(_count, side), right=True) for side in _SIDES if sides[side])
    show_table(console(), row["classes"].items(), (Column("class", 0, wraps=True), *by_side))
    for fault in row["faults"]:
        typer.echo(f"warning: {printable(fault)}", err=True)


def _count(side: str, one: tuple[str, dict[str, int]]) -> str:
    """Return the cell of a class and a side."""
    return f"{one[1].get(side, 0):,}"
