"""A float32 graph in half precision, or with linear layers in int8 (onnx and onnxruntime).

Only the transformer is changed. The head, all after its last norm, decides between classes by small
differences of large numbers (squared distances most of all), costs next to nothing, and stays
float32.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.onnx_session import import_onnxruntime
from fcil_adapters.contract import BackboneInfo
from fcil_adapters.export.exported_model import INPUT
from fcil_protocol.errors import DataError

_NORM = "LayerNormalization"
_BATCH = 16


def to_half(model: Any, info: BackboneInfo) -> Any:
    """Return a model whose transformer computes in float16.

    Raises:
        DataError: it contains no transformer.
    """
    import_onnxruntime()
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    _require(model, info, "fp16")
    typed = onnx.shape_inference.infer_shapes(model)
    types = {value.name: value for value in typed.graph.value_info}
    body, head = _cut(model.graph)
    made = {name for node in body for name in node.output}
    crossing = sorted({name for node in head for name in node.input} & made)
    transformer = _with_nodes(model, body, [types[name] for name in crossing])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that become 0 in float16
        half = convert_float_to_float16(transformer, keep_io_types=True, op_block_list=[])
    return _joined(half, _with_nodes(model, head, list(model.graph.output)))


def quantised(model: Any, info: BackboneInfo, images: NDArray[np.uint8]) -> Any:
    """Return a model whose transformer's linear layers compute in int8.

    Weights have one scale for each output channel, activations one for each tensor, symmetric (as
    TensorRT demands), from the range that the images show.

    Raises:
        DataError: it contains no transformer.
    """
    import_onnxruntime()
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    _require(model, info, "int8")

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = _batches(images)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._batches, None)

    with _quiet(), tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "int8.onnx"
        quantize_static(
            model,
            target,
            Reader(),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            nodes_to_quantize=_linears(model.graph, info),
            extra_options={"ActivationSymmetric": True},
        )
        return onnx.load(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the advice that the quantiser logs for models of other makers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _batches(images: NDArray[np.uint8]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(images), _BATCH):
        yield {INPUT: images[start : start + _BATCH]}


def _require(model: Any, info: BackboneInfo, precision: str) -> None:
    if not _linears(model.graph, info):
        raise DataError(
            f"the model has no transformer in it, so {precision} would change nothing.",
            action="Export it as fp32.",
        )


# --- parts of a graph -----------------------------------------------------------------------


def _cut(graph: Any) -> tuple[list[Any], list[Any]]:
    """Return the nodes up to the last norm, with it, and those after it, each in order."""
    makers = {name: node for node in graph.node for name in node.output}
    body: set[str] = set()
    left = [node for node in graph.node if node.op_type == _NORM]
    while left:
        node = left.pop()
        if node.name not in body:
            body.add(node.name)
            left.extend(makers[name] for name in node.input if name in makers)
    return (
        [node for node in graph.node if node.name in body],
        [node for node in graph.node if node.name not in body],
    )


def _with_nodes(model: Any, nodes: list[Any], outputs: list[Any]) -> Any:
    """Return a copy of a model with some of its nodes and the tensors they need."""
    import onnx

    used = {name for node in nodes for name in node.input}
    graph = onnx.helper.make_graph(
        nodes,
        model.graph.name,
        list(model.graph.input),
        outputs,
        [tensor for tensor in model.graph.initializer if tensor.name in used],
    )
    return onnx.helper.make_model(
        graph,
        opset_imports=list(model.opset_import),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
    )


def _joined(first: Any, second: Any) -> Any:
    """Join two models of one graph; the second continues from the first's outputs."""
    taken = {tensor.name for tensor in first.graph.initializer}
    renamed = {}
    for tensor in second.graph.initializer:
        if tensor.name in taken:  # a constant of both, in two precisions now
            renamed[tensor.name] = tensor.name = f"{tensor.name}.float"
    for node in second.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    graph = first.graph
    graph.ClearField("output")
    graph.ClearField("value_info")
    graph.output.extend(second.graph.output)
    graph.node.extend(second.graph.node)
    graph.initializer.extend(second.graph.initializer)
    return first


def _linears(graph: Any, info: BackboneInfo) -> list[str]:
    """Return the nodes that multiply tokens with a weight of one of the transformer's blocks."""
    d, mlp = info.dim, info.mlp_dim
    shapes = {(d, 3 * d), (d, d), (d, mlp), (mlp, d)}
    weights = {t.name for t in graph.initializer if tuple(t.dims) in shapes}
    body, _ = _cut(graph)
    return [n.name for n in body if n.op_type == "MatMul" and n.input[1] in weights]
