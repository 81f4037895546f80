"""Write a backbone's graph as an ONNX file whose weights stay in the safetensors file (torch).

An ONNX file may point into another file, and a safetensors file is raw numbers behind a header: so
the weights exist once, under the names that the digest covers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fcil_adapters.backbones.backbone import Backbone, cls_features, load_backbone
from fcil_adapters.backbones.engines import installed
from fcil_adapters.backbones.onnx_backbone import (
    FEATURES,
    FORMAT,
    METADATA,
    PIXELS,
    load_onnx_backbone,
)
from fcil_adapters.backbones.probes import TOLERANCE, compare_probes, probe_features
from fcil_adapters.backbones.weights import HEAD, StoredTensor, WeightsFile, digest_at
from fcil_adapters.contract import BackboneInfo
from fcil_adapters.contract.backbone_info import backbone_fields
from fcil_adapters.export.trace import strip_exporter_notes, trace
from fcil_protocol.errors import BackboneMismatch, DataError, FcilError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

_MODULE = "vit"
_POSITIONS = "pos_embed"


class _Features(nn.Module):
    """Module from preprocessed pixels to features, as `Backbone.features` computes them."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.vit = backbone.module
        if backbone.positions is not None:
            self.vit = _with_stored_positions(backbone, backbone.positions)
        self.mean = backbone.mean
        self.std = backbone.std

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.to(torch.float32).permute(0, 3, 1, 2)  # (B, 3, S, S)
        return cls_features(self.vit, (x / 255 - self.mean) / self.std)


class _Resampled(nn.Module):
    """The position embedding of the model's own image size (1, N, d) -> of another, (1, M, d)."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Buffer(matrix)  # (M, N)

    def forward(self, positions: Tensor) -> Tensor:
        return self.matrix @ positions


def _resampling_matrix(module: Any, positions: Tensor) -> Tensor:
    """Return the matrix (M, N) that resamples a position embedding (1, N, d) for a module."""
    # After `backbone` has prepared its import.
    from timm.layers.pos_embed import resample_abs_pos_embed

    prefix = 0 if module.no_embed_class else int(module.num_prefix_tokens)
    matrix: Tensor = resample_abs_pos_embed(
        torch.eye(positions.shape[1])[None],  # one column for each position
        new_size=list(module.patch_embed.grid_size),
        num_prefix_tokens=prefix,
    )
    return matrix[0].to(positions.device)


def _with_stored_positions(backbone: Backbone, positions: Tensor) -> Any:
    """Return a view that resamples the stored position embedding, which the digest covers."""
    view = backbone.view()
    view.pos_embed = nn.Parameter(positions, requires_grad=False)
    resampled = _Resampled(_resampling_matrix(backbone.module, positions))
    parametrize.register_parametrization(view, _POSITIONS, resampled, unsafe=True)
    return view


@dataclass(frozen=True)
class Exported:
    """Result of `export_backbone`.

    Attributes:
        agreement: largest relative error of onnxruntime's features of the probe images from
            torch's; None: there is no onnxruntime to compute them.
        checked: the runtime that computed them.
    """

    info: BackboneInfo
    graph: Path
    weights: Path
    agreement: float | None
    checked: str


def export_backbone(
    name: str, weights: Path | None, folder: Path, image_size: int | None = None
) -> Exported:
    """Write a backbone's weights and graph, and compare its features with torch's.

    Args:
        name: ``embedded``, or a timm vision transformer.
        weights: a local safetensors file; None: those that come with the name.
        folder: gets ``NAME.safetensors`` and ``NAME.onnx``, with the model's NAME.
        image_size: side of the graph's images in pixels; None: the model's own.

    Raises:
        DataError, ConfigError: it cannot be loaded or exported; the message says why.
        BackboneMismatch: onnxruntime computes other features than torch; no graph is left.
        StorageError: it cannot be written.
    """
    backbone = load_backbone(name, weights, image_size=image_size)
    info = backbone.info
    with storage_errors("create the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    file = _weights_in(folder, backbone)
    graph = folder / f"{info.name}.onnx"
    write_graph(backbone, file, graph)
    try:
        agreement, checked = _check(backbone, graph)
    except FcilError:
        graph.unlink()
        raise
    return Exported(info, graph, file.path, agreement, checked)


def _weights_in(folder: Path, backbone: Backbone) -> WeightsFile:
    """Return the file of a backbone's weights in a folder, written unless it exists."""
    target = folder / f"{backbone.info.name}.safetensors"
    if not target.exists():
        return write_weights(backbone, target)
    file = WeightsFile.open(target)
    if not _holds(file, backbone) or any(tensor.dtype != "F32" for tensor in file.tensors.values()):
        raise DataError(
            f"{target} exists already, with other weights or another precision.",
            action="Choose another folder: --out FOLDER",
        )
    return file


def _check(backbone: Backbone, graph: Path) -> tuple[float | None, str]:
    if not installed().onnxruntime:
        return None, ""
    other = load_onnx_backbone(backbone.info.name, graph, "cpu")
    error = compare_probes(probe_features(other), probe_features(backbone))
    if not error <= TOLERANCE:
        raise BackboneMismatch(
            f"onnxruntime's features of the probe images differ from torch's by {error:.2g} "
            f"relative, allowed is {TOLERANCE:g}.",
            action="Use the versions of torch and onnxruntime that fcil's constraints.txt names.",
        )
    return error, other.description


def write_weights(backbone: Backbone, target: Path) -> WeightsFile:
    """Write the weights of a backbone, in float32, without a head.

    Raises:
        StorageError: it cannot be written.
    """
    named = backbone.module.state_dict()
    if backbone.positions is not None:
        named[_POSITIONS] = backbone.positions
    state = {
        name: values.detach().to("cpu", torch.float32).contiguous()
        for name, values in sorted(named.items())
        if not name.startswith(HEAD)
    }
    with storage_errors("write the weights", target):
        write_atomic(target, safetensors.torch.save(state), mode=0o644)
    return WeightsFile.open(target)


def _holds(file: WeightsFile, backbone: Backbone) -> bool:
    size = None if backbone.positions is None else backbone.info.preprocessing.size
    return digest_at(file.digest(), size) == backbone.info.digest


def write_graph(backbone: Backbone, weights: WeightsFile, target: Path) -> None:
    """Write the graph of a backbone next to the file of its weights.

    Args:
        backbone: on the CPU.
        weights: the file that the graph points into, in the same folder.
        target: the ONNX file.

    Raises:
        ConfigError: package onnx or onnxscript is missing.
        DataError: the file has other weights than the backbone.
        StorageError: it cannot be written.
    """
    if not _holds(weights, backbone):
        raise DataError(
            f"{weights.path} has other weights than the backbone {backbone.info.name}.",
            action="Export both together.",
        )
    size = backbone.info.preprocessing.size
    example = torch.zeros(2, size, size, 3, dtype=torch.uint8)
    # Optimised, the graph would have weights without the names that the digest covers.
    model = trace(_Features(backbone), example, (PIXELS, FEATURES), optimize=False)
    graph = model.graph
    _rename(graph)
    for tensor in graph.initializer:
        if tensor.name in weights.tensors:
            _point(tensor, weights.path.name, weights.tensors[tensor.name])
    strip_exporter_notes(model, "backbone")
    claim = {"format": FORMAT, "backbone": backbone_fields(backbone.info)}
    if backbone.positions is not None:
        claim["resampled"] = True
    model.metadata_props.add(key=METADATA, value=json.dumps(claim, sort_keys=True))
    with storage_errors("write the graph", target):
        write_atomic(target, model.SerializeToString(deterministic=True), mode=0o644)


def _rename(graph: Any) -> None:
    """Give the weights their names in the backbone."""
    prefix = f"{_MODULE}."

    def bare(name: str) -> str:
        name = name.removeprefix(prefix)
        return _POSITIONS if name == f"parametrizations.{_POSITIONS}.original" else name

    for tensor in (*graph.initializer, *graph.value_info):
        tensor.name = bare(tensor.name)
    for node in graph.node:
        node.input[:] = [bare(name) for name in node.input]


def _point(tensor: Any, location: str, stored: StoredTensor) -> None:
    """Replace a tensor's numbers by their place in the file."""
    if tensor.data_type != tensor.FLOAT or tuple(tensor.dims) != stored.shape:
        raise DataError(
            f"the exporter changed the weight {tensor.name}.",
            action="Use the versions of torch and onnxscript that fcil's constraints.txt names.",
        )
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = tensor.EXTERNAL
    for key, value in (
        ("location", location),
        ("offset", stored.offset),
        ("length", stored.length),
    ):
        tensor.external_data.add(key=key, value=str(value))
