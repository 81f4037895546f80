"""Options of every command, on both sides, and their help in groups.

On a terminal each group is a panel. In a pipe or a file help is plain: verbs in sections, and the
options of a verb in one list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from fcil_protocol.process.defects import own_version
from fcil_protocol.process.terminal import Format

Verbs = Mapping[str, Sequence[str]]  # title of a group: its verbs, both in order of use

# Groups of options that several commands have.
LOG_PANEL = "Log file"
COMPUTE_PANEL = "Computing"
SCHEDULE_PANEL = "When to work"
PRIVACY_PANEL = "Privacy limits"
_WHOLE = 1000  # characters of a verb's first sentence: no ellipsis

FormatOption = Annotated[Format, typer.Option("--format", help="Format of the data on stdout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --format json.")]


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


def verbs_in_panels(verbs: Verbs) -> type[TyperGroup]:
    """Return the class of a `typer.Typer` whose help shows its verbs in groups.

    Verbs that no group names come last, under typer's own title.
    """

    class PanelGroup(TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            order = [name for names in verbs.values() for name in names if name in self.commands]
            self.commands = {name: self.commands[name] for name in (*order, *self.commands)}
            for title, names in verbs.items():
                for name in names:
                    if name in self.commands:
                        # Its class is typer's, or a subclass: both have the attribute.
                        self.commands[name].rich_help_panel = title  # type: ignore[attr-defined]

        def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
            """Write the groups as plain sections."""
            shown = {n: c for n, c in self.commands.items() if not c.hidden}
            grouped = [name for names in verbs.values() for name in names]
            for title, names in {
                **verbs, "Commands": [n for n in shown if n not in grouped]
            }.items():  # fmt: skip
                lines = [(n, shown[n].get_short_help_str(_WHOLE)) for n in names if n in shown]
                if lines:
                    with formatter.section(title):
                        formatter.write_dl(lines)

    return PanelGroup
