"""Options of every command, on both sides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from fcil_protocol.process.defects import own_version
from fcil_protocol.process.terminal import Format

FormatOption = Annotated[Format, typer.Option("--format", help="Format of the data on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
AliveOption = Annotated[
    bool, typer.Option("--alive", help="Fail with code 2 or 3 if no daemon answers.")
]


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fcil {own_version()}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", is_eager=True, callback=_tell_version, help="Show fcil's version and exit."
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options, each as one argument.

    A parameter whose type is a dataclass stands for one option per field, in the fields' order;
    the command receives the dataclass. Commands that share options name the group once.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))
            continue
        assert isinstance(hint, type)
        groups[parameter.name] = hint
        within = get_type_hints(hint, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default,
                annotation=within[field.name],
            )
            for field in fields(hint)
        ]  # fmt: skip

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__name__, run.__doc__, run.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
