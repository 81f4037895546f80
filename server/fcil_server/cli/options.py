"""Options that several of the server's commands have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.errors import FcilError, Unreachable
from fcil_protocol.formats import read_size
from fcil_protocol.process import terminal
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

# A command for a federation's directory; the others have none, or another --dir, or name theirs.
_COMMAND = re.compile(
    r"\bfcil-server (?!(?:demo|methods|relay|restore)\b)"
    r"(?:(?:classes|run|token) )?+[a-z]++(?:-[a-z]++)*+(?! --dir\b)"
)


def with_dir(text: str, directory: Path) -> str:
    """Name the directory in the commands of a sentence, unless it is the default.

    So sentences are written where no directory is known.
    """
    if directory == DEFAULT_DIRECTORY:
        return text
    where = shlex.quote(str(directory))
    return _COMMAND.sub(lambda command: f"{command[0]} --dir {where}", text)


@contextmanager
def errors(directory: Path, form: terminal.Format = terminal.Format.TEXT) -> Iterator[None]:
    """Do as `terminal.errors`; commands in an error's action name the directory."""
    with terminal.errors(form):
        try:
            yield
        except FcilError as error:
            error.action = with_dir(error.action or type(error).default_action(), directory)
            raise


def ask(directory: Path, op: str, **fields: Any) -> dict[str, Any]:
    """Ask the running server.

    Raises:
        As `control_socket.ask`; Unreachable names the host if the server works on another one.
    """
    from fcil_protocol.process import control_socket

    try:
        return control_socket.ask(directory, op, **fields)
    except Unreachable as error:
        from fcil_server.ledger.databases.opening import host_of_server

        if host := host_of_server(directory):
            raise elsewhere(host) from error
        raise


def elsewhere(host: str) -> Unreachable:
    """Return the error for a command whose server works on another host."""
    return Unreachable(
        f"the server of this federation runs on {host}, and answers there alone.",
        action="Run this command on that machine.",
    )


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
