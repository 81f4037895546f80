"""``fcil-server export``: a run's model as one ONNX file, or its LoRA as a PEFT adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit, errors, printable
from fcil_server.cli.completion import complete_weights
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, RunOption

if TYPE_CHECKING:
    from fcil_adapters.export.exported_model import ExportInfo
    from fcil_adapters.export.peft_adapter import AdapterInfo

app = typer.Typer()


@app.command()
def export(
    onnx: Annotated[
        Path | None,
        typer.Option(help="Write the whole model to this file; replaces an existing one."),
    ] = None,
    peft: Annotated[
        Path | None,
        typer.Option(
            help="Write the LoRA and a linear head to this folder, for the PEFT library; replaces "
            "an earlier export."
        ),
    ] = None,
    directory: DirOption = DEFAULT_DIRECTORY,
    run: RunOption = None,
    task: Annotated[
        int | None, typer.Option(min=0, help="The model at the end of this task.")
    ] = None,
    state: Annotated[int | None, typer.Option(min=0, help="The model of this state.")] = None,
    precision: Annotated[str, typer.Option(help="Of ONNX: fp32, fp16 or int8.")] = "fp32",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images like those that the model will see; required for int8."
        ),
    ] = None,
    opset: Annotated[int | None, typer.Option(help="ONNX operator set.")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write fp16 or int8 even if its results differ too much."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--set",
            help="run.weights=FILE, if the weights were moved.",
            autocompletion=complete_weights,
        ),
    ] = None,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Write the current model with class names for other programs, checked before it is written.

    --onnx: one file with all of it, merged. --peft: the adapter of a method with LoRA.
    Works while the server runs. Without --task or --state it exports the newest state.
    """
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_adapters.export.load import check_options, chosen_form
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.runs.export import choose, export_state

        kind, target = chosen_form(onnx=onnx, peft=peft)
        check_options(kind, precision=precision != "fp32", opset=opset is not None, force=force)
        options: dict[str, Any] = {"precision": precision, "force": force}
        if opset is not None:
            options["opset"] = opset
        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            row = ledger.runs.named(run)
            info = export_state(
                ledger,
                directory,
                row,
                choose(ledger, directory, row, task=task, state=state),
                kind,
                target,
                options=options,
                calibrate=calibrate,
                overrides=settings or (),
                notify=lambda text: typer.echo(printable(text), err=True),
            )
        named = {"folder" if kind == "peft" else "file": str(target), "bytes": size_of(target)}
        emit({**named, **info.model_dump(mode="json")}, form, lambda: _show(target, info))


def size_of(target: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = target.iterdir() if target.is_dir() else (target,)
    return sum(file.stat().st_size for file in files)


def _show(target: Path, info: ExportInfo | AdapterInfo) -> None:
    from fcil_adapters.export.peft_adapter import AdapterInfo

    if isinstance(info, AdapterInfo):
        show_adapter(target, info)
    else:
        show_exported(target, info)


def show_adapter(folder: Path, info: AdapterInfo) -> None:
    """Print what was written for PEFT."""
    from fcil_protocol.formats import format_bytes

    ranks = sorted(set(info.ranks.values()))
    span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    head = "without a head, since that is not linear" if info.scores == "none" else "with the head"
    typer.echo(f"{folder}  {format_bytes(size_of(folder))}, {span}, {head}")
    typer.echo(
        f"  {info.method} {info.method_version}, run {info.run}, state {info.state}, after task "
        f"{info.task}: {count_of(len(info.classes), 'class')}"
    )
    if info.factored:
        typer.echo(
            f"  {count_of(len(info.factored), 'layer')} of {len(info.ranks)} "
            "by singular value decomposition"
        )
    typer.echo(
        f"  loaded by {info.checked.provider} on {count_of(info.checked.images, 'image')}: differs "
        f"from the model by {info.checked.error:.1e} of the spread (at most 1e-4)"
    )


def show_exported(file: Path, info: ExportInfo) -> None:
    """Print what was written as ONNX."""
    from fcil_protocol.formats import format_bytes

    checked, allowed = info.checked, info.tolerance
    least = f" (at least {allowed.agreement:.0%})" if allowed.agreement else ""
    limit = f"at most {allowed.error:g}" if allowed.error is not None else "not limited"
    unnamed = sum(not name for name in info.names)
    names = f", {unnamed} of them without a name" if unnamed else ""
    size = format_bytes(file.stat().st_size)
    typer.echo(f"{file}  {size}, {info.precision}, opset {info.opset}")
    typer.echo(
        f"  {info.method} {info.method_version}, run {info.run}, state {info.state}, after task "
        f"{info.task}: {count_of(len(info.classes), 'class')}{names}"
    )
    images = count_of(checked.images, "image")
    typer.echo(
        f"  compared with torch on {images} ({checked.provider}): scores differ by "
        f"{checked.error:.1e} of their spread ({limit}), the same class for "
        f"{checked.agreement:.1%}{least}"
    )
