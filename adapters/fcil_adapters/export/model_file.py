"""The current global model of any method as one ONNX file, alone or as a model of MLflow (torch).

It exports the very function that evaluates (`heads.scorer.Scorer.score`,
`frozen_features.FeatureScorer.score`), from the pixels on. `exported_model` reads the file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.backbones.onnx_session import CPU
from fcil_adapters.backbones.probes import probe_images
from fcil_adapters.contract import BackboneInfo, Context, Method, Predictor
from fcil_adapters.export.check import TOLERANCES, check_graph, compare, run_graph
from fcil_adapters.export.exported_model import (
    FORMAT,
    INPUT,
    KEY,
    OUTPUT,
    ExportedModel,
    ExportInfo,
    Origin,
    Precision,
    composed,
    origin_fields,
    with_seal,
)
from fcil_adapters.export.folder import ABOUT, MLFLOW_DATA, MLFLOW_FILES, place_folder
from fcil_adapters.export.precision import quantised, to_half
from fcil_adapters.export.trace import OPSET, OPSETS, share_equal, strip_exporter_notes, trace
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.scorer import Scorer
from fcil_protocol.errors import ConfigError, DataError, InternalError
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import write_atomic

U8 = NDArray[np.uint8]

# int8: half of the images give the ranges, the other half test the result.
LEAST_IMAGES = 16
_EXAMPLES = 2


@dataclass(frozen=True)
class ExportOptions:
    """Settings of an exported file.

    Attributes:
        precision: of weights and arithmetic; pixels stay uint8 and scores float32.
        opset: of ONNX's own operators.
        force: write it even if fp16 or int8 changes more than is allowed. The metadata says so.
    """

    precision: Precision = "fp32"
    opset: int = OPSET
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown settings.

        Raises:
            ConfigError: the precision or the opset is unknown.
        """
        known = get_args(Precision)
        if self.precision not in known:
            raise ConfigError(
                f"unknown precision {self.precision!r}; known are {', '.join(known)}."
            )
        if self.opset not in OPSETS:
            raise ConfigError(
                f"opset {self.opset} is not possible; expected {OPSETS[0]} to {OPSETS[-1]}."
            )


def export_model(
    method: Method,
    ctx: Context,
    parts: Mapping[str, Payload],
    origin: Origin,
    target: Path,
    options: ExportOptions = ExportOptions(),
    images: U8 | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> ExportInfo:
    """Write the model of a broadcast as one ONNX file; all of it or nothing.

    Args:
        method: the method of the model.
        ctx: with the backbone loaded on the CPU, if the method needs one.
        parts: the broadcast, in float32.
        origin: goes into the metadata.
        target: the file; an existing one is replaced.
        options: settings of the file.
        images: (N, S, S, 3), preprocessed: of the kind that the model will see. They calibrate
            int8, and the file is compared with the torch model on them, in addition to the probe
            images.
        notify: called with a sentence about each next step.

    Returns:
        The file's metadata.

    Raises:
        DataError: the model has no classes yet, cannot be exported, or loses too much in the
            precision; there are too few images to calibrate with.
        ConfigError: a package is missing.
        InternalError: the graph's scores differ from the model's.
        DiskFull, StorageError: it cannot be written.
    """
    notify("putting the model together")
    predictor = composed(method, ctx, parts)
    given = images if images is not None else np.zeros((0, *_shape(ctx)), np.uint8)
    used, checks = _shared_out(given, options.precision)
    notify(f"writing its graph (opset {options.opset})")
    graph = _graph(predictor, method.name, ctx.backbone_info, options.opset)
    if options.precision == "fp16":
        graph = to_half(graph, ctx.backbone_info)
    elif options.precision == "int8":
        notify(f"measuring ranges on {len(used)} images")
        graph = quantised(graph, ctx.backbone_info, used)
    body = _serialised(graph)
    looked = np.concatenate([probe_images(ctx.backbone_info), checks])
    notify(f"comparing it with the torch model on {len(looked)} images")
    checked = compare(run_graph(body, looked), predictor.logits(looked))
    if not (options.force and options.precision != "fp32"):
        check_graph(checked, options.precision)
    info = ExportInfo(
        **origin_fields(method, ctx, predictor.classes, origin),
        format=FORMAT,
        precision=options.precision,
        opset=options.opset,
        temperature=origin.temperature,
        tolerance=TOLERANCES[options.precision],
        checked=checked,
    )
    write_atomic(target, *with_seal(body, _entry(info)), mode=0o644)
    return info


def export_mlflow(
    method: Method,
    ctx: Context,
    parts: Mapping[str, Payload],
    origin: Origin,
    target: Path,
    options: ExportOptions = ExportOptions(),
    images: U8 | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> ExportInfo:
    """Write the model as a folder that MLflow loads: the file of `export_model`, as its flavours.

    The arguments and errors are those of `export_model`; ``target`` is a folder (`check_folder`).

    Raises:
        InternalError: what MLflow loads computes something else.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before it is imported
    from mlflow import pyfunc

    with place_folder(target, MLFLOW_FILES) as folder:
        file = folder / MLFLOW_DATA
        info = export_model(method, ctx, parts, origin, file, options, images, notify)
        _describe_for_mlflow(folder, info)
        probes = probe_images(ctx.backbone_info)
        notify("loading it with MLflow")
        got = pyfunc.load_model(str(folder)).predict(probes)[OUTPUT]
        right = ExportedModel.load(file, "cpu").logits(probes)
        if not np.allclose(got, right, rtol=1e-5, atol=1e-5 * float(np.abs(right).max())):
            raise InternalError(
                "the model as MLflow loads it differs from the ONNX file in it. No file was "
                "written.",
                action="Report it with the versions of mlflow and onnxruntime.",
            )
    return info


def _describe_for_mlflow(folder: Path, info: ExportInfo) -> None:
    """Write MLflow's description of a model, its requirements, and ours."""
    import onnx
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    side = info.preprocessing.size
    pixels = TensorSpec(np.dtype(np.uint8), (-1, side, side, 3))
    scores = TensorSpec(np.dtype(np.float32), (-1, len(info.classes)), OUTPUT)
    fields = info.model_dump(mode="json")
    model = Model(
        signature=ModelSignature(Schema([pixels]), Schema([scores])), metadata={KEY: fields}
    )
    pyfunc.add_to_model(
        model, loader_module="mlflow.onnx", data=MLFLOW_DATA, python_env="python_env.yaml"
    )
    model.add_flavor("onnx", onnx_version=onnx.__version__, data=MLFLOW_DATA, providers=[CPU])
    texts = {
        "MLmodel": model.to_yaml(),
        "requirements.txt": "mlflow\nnumpy\nonnx\nonnxruntime>=1.14\n",
        "python_env.yaml": f"python: {platform.python_version()}\nbuild_dependencies: [pip]\n"
        "dependencies: [-r requirements.txt]\n",
        ABOUT: json.dumps(fields, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode(), mode=0o644)


def torch_score(predictor: Predictor) -> Callable[[Tensor], Tensor]:
    """Return a predictor's scores as a torch function of pixels (B, S, S, 3), uint8.

    Raises:
        DataError: the predictor is of a kind without such a function.
    """
    if isinstance(predictor, Scorer):
        return predictor.score
    if isinstance(predictor, FeatureScorer):
        extractor, score = predictor.extractor, predictor.score
        weights = [to_torch(w, dtype=torch.float32) for w in predictor.weights]
        if extractor is None:
            return lambda pixels: score(pixels.to(torch.float32), *weights)
        if isinstance(extractor, Backbone):
            backbone = extractor

            def of_features(pixels: Tensor) -> Tensor:
                features = cls_features(backbone.module, backbone.normalise(pixels))
                scores: Tensor = score(features, *weights)
                return scores

            return of_features
    raise DataError(
        f"a model of the class {type(predictor).__name__} cannot be exported.",
        action="Its method must return a Scorer or a FeatureScorer: docs/method-rules.md.",
    )


class _Graph(nn.Module):
    def __init__(self, score: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score = score

    def forward(self, pixels: Tensor) -> Tensor:
        return self.score(pixels).to(torch.float32)


def _graph(predictor: Predictor, name: str, info: BackboneInfo, opset: int) -> Any:
    size = info.preprocessing.size
    example = torch.zeros((_EXAMPLES, size, size, 3), dtype=torch.uint8)
    score = torch_score(predictor)
    try:
        model = trace(_Graph(score), example, (INPUT, OUTPUT), opset=opset)
    except torch.onnx.OnnxExporterError as error:
        raise _not_a_graph(name, str(error.__cause__ or error)) from error
    if not model.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise _not_a_graph(name, "it was made for one number of images")
    share_equal(model.graph)
    strip_exporter_notes(model, name)
    return model


def _not_a_graph(name: str, why: str) -> DataError:
    return DataError(
        f"the model of {name} has a step that cannot be written as a graph: "
        f"{' '.join(why.split())[:300]}.",
        action="Its score must not depend on the number of images: docs/method-rules.md.",
    )


def _shape(ctx: Context) -> tuple[int, int, int]:
    size = ctx.backbone_info.preprocessing.size
    return size, size, 3


def _shared_out(images: U8, precision: Precision) -> tuple[U8, U8]:
    """Return the images to calibrate with and those to compare on."""
    if precision != "int8":
        return images[:0], images
    if len(images) < LEAST_IMAGES:
        raise DataError(
            f"int8 needs images to measure the ranges of values on: expected at least "
            f"{LEAST_IMAGES}, got {len(images)}.",
            action="Give a folder with a few hundred images like those that the model will see.",
        )
    return images[::2], images[1::2]


def _serialised(model: Any) -> bytes:
    try:
        body: bytes = model.SerializeToString(deterministic=True)
    except ValueError as error:  # protobuf's limit
        raise DataError(
            "the model has more than 2 GiB, which one ONNX file cannot hold.",
            action="Export fp16, or use a smaller backbone.",
        ) from error
    return body


def _entry(info: ExportInfo) -> bytes:
    """Return the metadata as appended to a serialised model (`exported_model.seal`)."""
    import onnx

    text = json.dumps(info.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    pair = onnx.StringStringEntryProto(key=KEY, value=text)
    return bytes(onnx.ModelProto(metadata_props=[pair]).SerializeToString())
