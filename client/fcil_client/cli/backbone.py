"""``fcil-client backbone``: files of a backbone for clients without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fcil_protocol.process.cli_options import FormatOption, JsonOption, verbs_in_panels
from fcil_protocol.process.terminal import Format, chosen, emit, errors

app = typer.Typer(
    cls=verbs_in_panels({}),
    help="Prepare backbone files for clients without torch.",
    no_args_is_help=True,
)


@app.command()
def export(
    name: Annotated[str, typer.Argument(help="embedded, or the name of a timm ViT.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.onnx and NAME.safetensors.")],
    weights: Annotated[
        Path | None, typer.Option(help="Local safetensors file with the weights.")
    ] = None,
    image_size: Annotated[
        int,
        typer.Option(min=0, help="Side of the images in pixels, as [run] image_size; 0: its own."),
    ] = 0,
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Write a backbone as an ONNX graph and the safetensors file that holds its weights.

    Needs torch, and pip install 'fcil[export]'. Copy both files to each device without torch, and
    join there with --weights NAME.onnx.
    """
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_adapters.backbones.engines import choose

        choose("torch")
        from fcil_adapters.export.backbone_file import export_backbone

        done = export_backbone(name, weights, out, image_size or None)
        row = {
            "name": done.info.name,
            "image_size": done.info.preprocessing.size,
            "digest": done.info.digest,
            "graph": str(done.graph),
            "weights": str(done.weights),
            "agreement": done.agreement,
            "checked": done.checked,
        }

        def show() -> None:
            typer.echo(f"{done.graph}  ({_size(done.graph)}, opens with {done.weights.name})")
            typer.echo(f"{done.weights}  ({_size(done.weights)})")
            typer.echo(f"digest  {done.info.digest}")
            if done.agreement is None:
                typer.echo("Not compared with torch: onnxruntime is not installed here.", err=True)
            else:
                typer.echo(
                    f"features agree with torch's to {done.agreement:.1e} on the probe images, "
                    f"on {done.checked}"
                )

        emit(row, form, show)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A torch checkpoint: .pth or .pt.")],
    target: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    form: FormatOption = Format.TEXT,
    json_flag: JsonOption = False,
) -> None:
    """Convert a torch checkpoint to safetensors; no other command reads such a file.

    A checkpoint can hold a program. This command opens it with weights_only, which runs none.
    """
    form = chosen(form, json_flag)
    with errors(form):
        from fcil_adapters.backbones.engines import choose

        choose("torch")
        from fcil_adapters.backbones.convert_weights import convert as convert_weights

        file = convert_weights(source, target)
        row = {"weights": str(target), "tensors": len(file.tensors), "digest": file.digest()}

        def show() -> None:
            typer.echo(f"{target}  ({_size(target)}, {len(file.tensors)} tensors without a head)")
            typer.echo(f"digest  {row['digest']}")

        emit(row, form, show)


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
