"""Trace of a torch module on preprocessed images as an ONNX graph for any number of them."""

from __future__ import annotations

import hashlib
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fcil_protocol.errors import ConfigError

# LayerNormalization came with opset 17; onnxruntime reads 18 since 1.14 (early 2023).
OPSET = 18
OPSETS = range(18, 24)  # the exporter can write and onnxruntime 1.31 reads these

_EXAMPLES = 2
_MOST_ROWS = 65536


def trace(
    module: nn.Module,
    example: Tensor,
    names: tuple[str, str],
    *,
    opset: int = OPSET,
    optimize: bool = True,
) -> Any:
    """Return a module's forward pass as an ``onnx.ModelProto``.

    Args:
        module: takes one tensor and returns one; `torch.compiler.is_exporting` is True for it.
        example: an input of two rows; the graph takes any number.
        names: of the graph's input and output.
        opset: of ONNX's own operators.
        optimize: fold constants; then weights have other names and shapes than in the module.

    Raises:
        ConfigError: package onnx or onnxscript is missing.
    """
    assert len(example) == _EXAMPLES
    rows = torch.export.Dim("batch", min=1, max=_MOST_ROWS)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # about deprecations within the exporter itself
        try:
            program = torch.onnx.export(
                module.eval(),
                (example,),
                dynamo=True,
                optimize=optimize,
                opset_version=opset,
                input_names=[names[0]],
                output_names=[names[1]],
                dynamic_shapes=({0: rows},),
                verbose=False,
            )
        except ImportError as error:
            raise ConfigError(
                f"a graph cannot be exported: {error}.",
                action="Install: pip install 'fcil[export]'",
            ) from error
    assert program is not None, "dynamo exports return a program"
    return program.model_proto


def share_equal(graph: Any) -> None:
    """Keep one of each weight that a graph has twice, as when a backbone runs in two passes."""
    first: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    renamed: dict[str, str] = {}
    for place in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[place]
        key = (tensor.data_type, tuple(tensor.dims), hashlib.sha256(tensor.raw_data).digest())
        if tensor.raw_data and key in first:
            renamed[tensor.name] = first[key]
            del graph.initializer[place]
        else:
            first[key] = tensor.name
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]


def strip_exporter_notes(model: Any, name: str) -> None:
    """Remove the exporter's own notes: paths, stack traces, versions."""
    from onnx import helper

    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import))
    model.ClearField("metadata_props")
    model.producer_name, model.producer_version, model.doc_string = "fcil", "", ""
    graph = model.graph
    graph.name, graph.doc_string = name, ""
    graph.ClearField("value_info")
    graph.ClearField("metadata_props")
    for item in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        item.doc_string = ""
        item.ClearField("metadata_props")
