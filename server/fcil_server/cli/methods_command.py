"""``fcil-server methods``: list the installed methods, show one, or begin a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fcil_protocol.errors import UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, emit, errors
from fcil_server.cli.completion import complete_method
from fcil_server.cli.new_method import MethodKind
from fcil_server.cli.options import BudgetOption, read_budget

app = typer.Typer()


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="One method, in full detail.", autocompletion=complete_method),
    ] = None,
    new: Annotated[
        str | None,
        typer.Option("--new", metavar="NAME", help="Write a new method's package instead."),
    ] = None,
    kind: Annotated[
        MethodKind | None,
        typer.Option(
            help="Kind of the new method: LoRA and your loss, frozen features and your "
            "head, or prompts and your loss.",
            show_default="lora",
        ),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="timm name of a ViT, or 'embedded'.", show_default="embedded")
    ] = None,
    classes: Annotated[int, typer.Option(min=1, max=100_000, help="Classes per task.")] = 10,
    past: Annotated[int, typer.Option(min=0, max=100_000, help="Classes of earlier tasks.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="Clients per round.")] = 10,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Take options and backbone from this federation; with --new: the folder to "
            "write, if not ./NAME.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("-c", "--set", help="method.rank=8, round.rounds_per_task=30 and the like."),
    ] = None,
    budget: BudgetOption = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """List the installed methods: citation, what they send and its size, presets and options.

    With --new: write a package with a method of your own, which runs as it is.
    """
    form = chosen(form, json_flag)
    with errors(form):
        if new is not None:
            _begin(new, kind, directory, form, listing=bool(name or settings or backbone or budget))
            return
        if kind is not None:
            raise UsageError(
                "--kind is for a new method.",
                action=f"For example: fcil-server methods --new my_idea --kind {kind.value}",
            )
        from fcil_server.cli.show_methods import show_method, show_methods
        from fcil_server.reports.traffic.method_list import describe_methods

        rows = describe_methods(
            name,
            directory=directory,
            overrides=tuple(settings or ()),
            backbone=backbone,
            classes=classes,
            past=past,
            clients=clients,
            budget=None if budget is None else read_budget(budget),
            notify=lambda text: typer.echo(f"left out: {text}", err=True),
        )
        show = show_methods if name is None else lambda rows: show_method(rows[0])
        emit({"methods": rows}, form, lambda: show(rows), rows=rows)


def _begin(
    name: str, kind: MethodKind | None, folder: Path | None, form: Format, *, listing: bool
) -> None:
    from fcil_server.cli.new_method import write_method

    if listing:
        raise UsageError(
            "--new goes with --kind and --dir alone; the other options are for installed methods.",
            action="For example: fcil-server methods --new my_idea --kind lora",
        )
    written = write_method(name, kind or MethodKind.LORA, folder)
    emit(written, form, lambda: _show(written))


def _show(written: dict[str, Any]) -> None:
    typer.echo(f"Wrote the method {written['name']} ({written['kind']}) to {written['folder']}:")
    for path in written["files"]:
        typer.echo(f"  {path}")
    typer.echo(f"Your {written['idea']} goes into {written['first']}. It runs as it is:")
    for command in written["next"]:
        typer.echo(f"  {command}")
