"""Options that several of the server's commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.formats import read_size
from fcil_server.cli.completion import complete_run, complete_setting

DEFAULT_DIRECTORY = Path("federation")
DirOption = Annotated[Path, typer.Option("--dir", help="The federation's directory.")]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", help="A run's id, or the first characters of it.", autocompletion=complete_run
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--set",
        help="Override a setting for this start: section.key=value.",
        autocompletion=complete_setting,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(help="Byte budget per client and round, up and down together, such as '2 MB'."),
]


def read_budget(text: str) -> int:
    """Read a size such as ``2 MB``, ``500kB`` or ``1.5 MiB``: bytes.

    Raises:
        UsageError: it is none, or none that is above zero.
    """
    return read_size(
        text,
        "a budget",
        "'2 MB' or '500 kB'",
        "Give the bytes that one client may cost in one round, up and down together.",
    )


def with_budget(settings: list[str] | None, budget: str | None) -> tuple[str, ...]:
    """Return overrides with a budget among them, if there is one.

    Raises:
        UsageError: it is no size.
    """
    own = () if budget is None else (f"wire.budget_mb={read_budget(budget) / 1e6!r}",)
    return (*(settings or ()), *own)
