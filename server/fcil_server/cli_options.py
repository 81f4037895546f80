"""Options that several of the server's commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DIRECTORY = Path("federation")
DirOption = Annotated[Path, typer.Option("--dir", help="The federation's directory.")]
RunOption = Annotated[str | None, typer.Option("--run", help="A run's id or its beginning.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("-c", "--set", help="Override a setting for this start: section.key=value."),
]
