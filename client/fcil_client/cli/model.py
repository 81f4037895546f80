"""``fcil-client predict`` and ``export``: use the model on this device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil_client.cli.target_options import ServerOption, SlotOption
from fcil_protocol.errors import EXIT_RUN_FAILED, UsageError
from fcil_protocol.process.cli_options import FormatOption, JsonOption
from fcil_protocol.process.terminal import (
    Format,
    chosen,
    count_of,
    emit,
    errors,
    printable,
    say,
    say_at_times,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fcil_client.predict.predict import Current, Means, PredictionRequest, Ready
    from fcil_client.state.home import Home


DataOption = Annotated[
    Path | None,
    typer.Option(help="The folder of the client whose model to use, if this user has several."),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="The backbone's file, if it is not the one that the client uses."),
]


def predict(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|FOLDER|-...", help="- is one image on standard input."),
    ],
    model: Annotated[
        Path | None, typer.Option(help="An exported model; else the client's current one.")
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    slot: SlotOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 3,
    unknown: Annotated[
        bool,
        typer.Option(
            "--unknown", help="Also score, from 0 to 1, how likely the image is of no known class."
        ),
    ] = False,
    unknown_above: Annotated[
        float | None, typer.Option(min=0, max=1, help="Call images above this score unknown.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep running and classify each new image in FOLDER.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="auto, torch or onnx, for the current model's backbone.")
    ] = "auto",
    device: DeviceOption = "auto",
    weights: WeightsOption = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: all cores.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images in one pass.")] = 32,
    calibrate: Annotated[
        bool, typer.Option(help="Fit probabilities to the client's own held-out images, once.")
    ] = True,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Classify images with the client's current model, or an exported one; works offline.

    Images that cannot be read are named, and the others continue; the exit code is 1 then.
    """
    form = chosen(form, json_flag)
    failed = 0
    with errors(form):
        from fcil_adapters.backbones.onnx_session import default_threads
        from fcil_client.predict.predict import Current, Means, PredictionRequest

        if model is not None and (
            data or server or slot is not None or weights or engine != "auto"
        ):
            raise UsageError("--model FILE holds everything: no --data, --weights or --engine.")
        means = Means(engine, device, weights, threads or default_threads(), batch, calibrate)
        wanted = PredictionRequest(top, unknown, unknown_above)
        current = None
        if model is None:
            current = Current(find_home(data, server, slot), means, _images_done("calibrating"))
        if watch:
            _watch(images, current or model, means, wanted, form)
        else:
            failed = _predict(images, current or model, means, wanted, form)
    if failed:
        raise typer.Exit(EXIT_RUN_FAILED)


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
            help="Write class means or prototypes to this safetensors file; replaces an existing "
            "one."
        ),
    ] = None,
    mlflow: Annotated[
        Path | None,
        typer.Option(
            help="Write the ONNX file as a model of MLflow to this folder; replaces an earlier "
            "export."
        ),
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    slot: SlotOption = None,
    precision: Annotated[
        str, typer.Option(help="fp32, fp16, or int8, which is measured on the client's images.")
    ] = "fp32",
    opset: Annotated[
        int | None, typer.Option(help="ONNX operator set, if a device needs another one.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write fp16 or int8 even if its results differ too much."),
    ] = False,
    weights: WeightsOption = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: all cores.")] = 0,
    calibrate: Annotated[
        bool, typer.Option(help="Fit probabilities to the client's own held-out images.")
    ] = True,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Write the client's current model for other programs, checked against torch; works offline.

    --onnx: one file with all of it. --timm: a folder with weights and a linear head. --peft: the
    adapter of a method with LoRA. --statistics: class means or prototypes. --mlflow: the ONNX file
    as a model of MLflow.
    """
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_adapters.backbones.onnx_session import default_threads
        from fcil_adapters.export.load import wanted_form
        from fcil_client.predict.export import export_current
        from fcil_client.predict.predict import Means

        cores = threads or default_threads()
        means = Means(weights=weights, threads=cores, calibrate=calibrate)
        wanted = wanted_form(
            {"onnx": onnx, "timm": timm, "peft": peft, "statistics": statistics, "mlflow": mlflow},
            precision=precision,
            opset=opset,
            force=force,
        )
        info = export_current(find_home(data, server, slot), wanted, means=means, notify=say)
        named: dict[str, Any] = {
            "folder" if wanted.is_folder else "file": str(wanted.target),
            "bytes": wanted.bytes,
        }
        emit({**named, **info.model_dump(mode="json")}, form, lambda: None)
        of = getattr(info, "precision", f"for {wanted.form}")
        if wanted.form == "statistics":
            of = getattr(info, "source", "")
        say(
            f"{wanted.target}: {info.method}, {count_of(len(info.classes), 'class')}, {of}, "
            f"{wanted.bytes / 1e6:.1f} MB"
        )
        checked = getattr(info, "checked", None)
        if checked is not None:
            say(
                f"on {checked.images} images its largest difference from torch is "
                f"{checked.error:.1e} of the scores' spread, and {checked.agreement:.1%} of the "
                "likeliest classes are the same"
            )


def find_home(data: Path | None, server: str | None, slot: str | None) -> Home:
    """Return the client of a folder, or the only one of this user.

    Raises:
        UsageError: there is none, or several could be meant.
    """
    from fcil_client.membership.enrol import find_member
    from fcil_client.state.home import Home

    if data is not None:
        found = find_member(data, server, slot)
        if found is None:
            raise UsageError(
                f"{data} is not enrolled with a federation.",
                action="See which folders are: fcil-client status. Without a client, give an "
                "exported model: --model FILE.onnx",
            )
        return found[0]
    if slot is not None:
        raise UsageError(
            "--slot names a client of a data set that a partition divides.",
            action="Say which data set: --data DATA",
        )
    homes = Home.all()
    if len(homes) == 1:
        return homes[0]
    if not homes:
        raise UsageError(
            "no folder of this user is enrolled, so there is no current model.",
            action="Give an exported model: --model FILE.onnx, or join: fcil-client join "
            "--data FOLDER",
        )
    raise UsageError(
        f"this user has {len(homes)} clients.",
        action="Name the folder of one: --data FOLDER. List them with: fcil-client status",
    )


def _open(model: Current | Path | None, means: Means) -> Ready:
    from fcil_client.predict.predict import open_file

    assert model is not None, "there is one or the other"
    ready = open_file(model, means) if isinstance(model, Path) else model.open()
    say(ready.line)
    return ready


def _stdin(images: list[str]) -> bytes | None:
    from fcil_adapters.images.decoding import MAX_FILE_BYTES
    from fcil_client.predict.images import STDIN

    if STDIN not in images:
        return None
    if images.count(STDIN) > 1:
        raise UsageError("standard input is one image: give - once.")
    if sys.stdin is None:
        raise UsageError("- reads standard input, which is closed.")
    return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)


def _predict(
    asked: list[str],
    model: Current | Path | None,
    means: Means,
    wanted: PredictionRequest,
    form: Format,
) -> int:
    """Classify images, and count those that cannot be read."""
    from fcil_client.predict.images import batches, find
    from fcil_client.predict.predict import answers

    pictures, faults = find(asked, _stdin(asked))
    ready = _open(model, means)
    for fault in faults:
        say(f"error: {fault}")
    decoded = batches(pictures, ready.preprocessing, size=means.batch, threads=means.threads)
    tell = _images_done("predicting")
    show = _shower(form)
    rows, failed, unnamed = [], len(faults), False
    for done, row in enumerate(answers(ready, decoded, wanted), 1):
        failed += "error" in row
        unnamed |= any(not one["name"] for one in row.get("top", ()))
        if form is Format.JSON:
            rows.append(row)
        else:
            show(row)
        if form is not Format.TEXT or not sys.stdout.isatty():
            tell(done, len(pictures))
    _tell_nameless(unnamed, form)
    if form is Format.JSON:
        told = {"model": ready.about, "images": rows, "failed": failed}
        emit(told, form, lambda: None, status="error" if failed else "ok")
    return failed


def _tell_nameless(unnamed: bool, form: Format) -> None:
    if unnamed and form is Format.TEXT:
        say(
            "unnamed-NUMBER: a class of other clients, whose name this model does not have. The "
            "server's operator can share names: [privacy] share_names"
        )


def _shower(form: Format) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes one row immediately."""

    def show(row: dict[str, Any]) -> None:
        if form is Format.TEXT and "error" in row:
            say(f"error: {row['image']}: {row['error']}")
        else:
            emit(row, form, lambda: typer.echo(printable(row_text(row))))

    return show


def row_text(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    top = ", ".join(
        f"{one['name'] or 'unnamed-' + str(one['class'])} {one['probability']:.3f}"
        for one in row["top"]
    )
    if "unknown" not in row:
        return f"{row['image']}: {top}"
    called = "unknown; " if row.get("is_unknown") else ""
    return f"{row['image']}: {called}{top}; unknown {row['unknown']:.3f}"


# --- watching -------------------------------------------------------------------------------


def _watch(
    asked: list[str],
    model: Current | Path | None,
    means: Means,
    wanted: PredictionRequest,
    form: Format,
) -> None:
    """Classify images as they arrive, until Ctrl-C."""
    if len(asked) != 1 or not Path(asked[0]).is_dir():
        raise UsageError("--watch takes one folder.")
    if form is Format.JSON:
        raise UsageError("--watch never ends, so it writes lines: use --format jsonl, or text.")
    import asyncio

    from fcil_client.predict.live import LivePredictions

    current = None if isinstance(model, Path) else model
    live = LivePredictions(Path(asked[0]), _open(model, means), current, means, wanted, say)
    asyncio.run(live.run(_shower(form)))


def _images_done(doing: str) -> Callable[[int, int], None]:
    return say_at_times(lambda done, total: f"{doing}: {done} of {count_of(total, 'image')}")
