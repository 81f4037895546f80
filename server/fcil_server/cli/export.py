"""``fcil-server export``: a run's model, its LoRA or its class statistics for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import Format, chosen, count_of, emit, say
from fcil_server.cli.completion import complete_weights
from fcil_server.cli.options import DEFAULT_DIRECTORY, DirOption, RunOption, errors

if TYPE_CHECKING:
    from fcil_adapters.export.exported_model import ExportInfo
    from fcil_adapters.export.folder import FolderInfo
    from fcil_adapters.export.load import Described, ExportOrder
    from fcil_adapters.export.peft_adapter import AdapterInfo
    from fcil_adapters.export.statistics_file import StatisticsInfo
    from fcil_adapters.export.timm_model import TimmInfo

app = typer.Typer()


@app.command()
def export(
    onnx: Annotated[
        Path | None,
        typer.Option(help="Write the whole model to this file; replaces an existing one."),
    ] = None,
    timm: Annotated[
        Path | None,
        typer.Option(
            help="Write the merged model with a linear head to this folder, for timm and Hugging "
            "Face; replaces an earlier export."
        ),
    ] = None,
    peft: Annotated[
        Path | None,
        typer.Option(
            help="Write the LoRA and a linear head to this folder, for the PEFT library; replaces "
            "an earlier export."
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Write class means, prototypes or Gaussians to this safetensors file; replaces an "
            "existing one."
        ),
    ] = None,
    mlflow: Annotated[
        Path | None,
        typer.Option(
            help="Write the ONNX file as a model of MLflow to this folder; replaces an earlier "
            "export."
        ),
    ] = None,
    directory: DirOption = DEFAULT_DIRECTORY,
    run: RunOption = None,
    task: Annotated[
        int | None, typer.Option(min=0, help="The model at the end of this task.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="The model of this state: its number, last, or best: docs/export.md."),
    ] = None,
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

    --onnx: one file with all of it. --timm: a folder with weights and a linear head. --peft: the
    adapter of a method with LoRA. --statistics: class means, prototypes or Gaussians. --mlflow: the
    ONNX file as a model of MLflow.
    Works while the server runs. Without --task or --state it exports the newest state.
    """
    form = chosen(form, json_flag)
    with errors(directory, form):
        from fcil_adapters.export.load import wanted_form
        from fcil_server.federation.directory import find_directory
        from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
        from fcil_server.runs.export import export_state
        from fcil_server.runs.state_choice import find_state

        wanted = wanted_form(
            {"onnx": onnx, "timm": timm, "peft": peft, "statistics": statistics, "mlflow": mlflow},
            precision=precision,
            opset=opset,
            force=force,
        )
        with Ledger(find_directory(directory) / LEDGER_NAME, read_only=True) as ledger:
            row = ledger.runs.named(run)
            info = export_state(
                ledger,
                directory,
                row,
                find_state(ledger, directory, row, task=task, state=state),
                wanted,
                calibrate=calibrate,
                overrides=settings or (),
                notify=say,
            )
        named = {
            "folder" if wanted.is_folder else "file": str(wanted.target),
            "bytes": wanted.bytes,
        }
        emit({**named, **info.model_dump(mode="json")}, form, lambda: _show(wanted, info))


def _show(wanted: ExportOrder, info: Described) -> None:
    from fcil_adapters.export.exported_model import ExportInfo
    from fcil_adapters.export.peft_adapter import AdapterInfo
    from fcil_adapters.export.statistics_file import StatisticsInfo
    from fcil_adapters.export.timm_model import TimmInfo

    if isinstance(info, ExportInfo):
        show_exported(wanted.target, info, wanted.bytes)
    elif isinstance(info, AdapterInfo):
        show_adapter(wanted, info)
    elif isinstance(info, TimmInfo):
        show_timm(wanted, info)
    elif isinstance(info, StatisticsInfo):
        show_statistics(wanted, info)


def show_timm(wanted: ExportOrder, info: TimmInfo) -> None:
    """Print what was written for timm."""
    from fcil_protocol.formats import format_bytes

    head = "with the classifier"
    if info.scores == "none":
        head = "features alone, since the classifier is not linear"
    changed = f"{count_of(len(info.changed), 'changed weight')}" if info.changed else "unchanged"
    typer.echo(f"{wanted.target}  {format_bytes(wanted.bytes)}, {changed}, {head}")
    _show_folder(info)


def show_statistics(wanted: ExportOrder, info: StatisticsInfo) -> None:
    """Print which statistics were written."""
    from fcil_protocol.formats import format_bytes

    form = "" if info.covariance == "none" else f", covariances: {info.covariance}"
    typer.echo(f"{wanted.target}  {format_bytes(wanted.bytes)}, {info.source}{form}")
    typer.echo(
        f"  {info.method} {info.method_version}, run {info.run}, state {info.state}, of task "
        f"{info.task}: {count_of(len(info.classes), 'class')} of {info.dim} numbers"
    )


def show_adapter(wanted: ExportOrder, info: AdapterInfo) -> None:
    """Print what was written for PEFT."""
    from fcil_protocol.formats import format_bytes

    ranks = sorted(set(info.ranks.values()))
    span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    head = "without a head, since that is not linear" if info.scores == "none" else "with the head"
    typer.echo(f"{wanted.target}  {format_bytes(wanted.bytes)}, {span}, {head}")
    if info.factored:
        typer.echo(
            f"  {count_of(len(info.factored), 'layer')} of {len(info.ranks)} "
            "by singular value decomposition"
        )
    _show_folder(info)


def _show_folder(info: FolderInfo) -> None:
    typer.echo(
        f"  {info.method} {info.method_version}, run {info.run}, state {info.state}, of task "
        f"{info.task}: {count_of(len(info.classes), 'class')}"
    )
    typer.echo(
        f"  loaded by {info.checked.provider} on {count_of(info.checked.images, 'image')}: differs "
        f"from the model by {info.checked.error:.1e} of the spread (at most 1e-4)"
    )


def show_exported(place: Path, info: ExportInfo, size_bytes: int) -> None:
    """Print what was written as ONNX, alone or for MLflow."""
    from fcil_protocol.formats import format_bytes

    checked, allowed = info.checked, info.tolerance
    least = f" (at least {allowed.agreement:.0%})" if allowed.agreement else ""
    limit = f"at most {allowed.error:g}" if allowed.error is not None else "not limited"
    unnamed = sum(not name for name in info.names)
    names = f", {unnamed} of them without a name" if unnamed else ""
    size = format_bytes(size_bytes)
    typer.echo(f"{place}  {size}, {info.precision}, opset {info.opset}")
    typer.echo(
        f"  {info.method} {info.method_version}, run {info.run}, state {info.state}, of task "
        f"{info.task}: {count_of(len(info.classes), 'class')}{names}"
    )
    images = count_of(checked.images, "image")
    typer.echo(
        f"  compared with torch on {images} ({checked.provider}): scores differ by "
        f"{checked.error:.1e} of their spread ({limit}), the same class for "
        f"{checked.agreement:.1%}{least}"
    )
