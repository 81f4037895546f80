"""Comparison of an exported graph's scores with the torch model's, before it is written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.onnx_session import CPU, import_onnxruntime
from fcil_adapters.export.exported_model import INPUT, OUTPUT, Checked, Precision, Tolerance
from fcil_protocol.errors import DataError, InternalError

F32 = NDArray[np.float32]

# Float32 on both sides differs by rounding alone: 1e-6 to 1e-5 of the spread was measured, so 1e-3
# is another model. Half precision was measured at up to 1e-2; int8 changes scores visibly, and is
# judged by its decisions.
TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(error=1e-3, agreement=0.0),
    "fp16": Tolerance(error=5e-2, agreement=0.0),
    "int8": Tolerance(error=None, agreement=0.9),
}
_BATCH = 64


def run_graph(graph: bytes, images: NDArray[np.uint8]) -> F32:
    """Score images (N, S, S, 3) with a serialised graph on the CPU, in batches of more sizes.

    Raises:
        InternalError: onnxruntime refuses the graph.
    """
    ort = import_onnxruntime()
    try:
        session = ort.InferenceSession(graph, providers=[CPU])
        pieces = [images[:1], *(images[i : i + _BATCH] for i in range(1, len(images), _BATCH))]
        scores = [session.run([OUTPUT], {INPUT: piece})[0] for piece in pieces]
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise InternalError(
            f"onnxruntime {ort.__version__} refuses the exported graph: "
            f"{' '.join(str(error).split())[:300]}",
            action="Try another --opset; no file was written.",
        ) from error
    return np.concatenate(scores)


def compare(graph: F32, torch_scores: F32) -> Checked:
    """Compare the scores of an exported graph with those of the torch model, both (N, C).

    The error is the largest difference as a share of the spread: the mean, over images, of the
    highest score less the lowest. A single class has no spread; there its highest score counts.
    """
    spread = float(np.ptp(torch_scores, axis=1).mean()) or float(np.abs(torch_scores).max()) or 1.0
    wrong = graph.shape != torch_scores.shape or not np.isfinite(graph).all()
    if wrong:
        return Checked(images=len(torch_scores), provider=CPU, error=_HOPELESS, agreement=0.0)
    same = graph.argmax(1) == torch_scores.argmax(1)
    return Checked(
        images=len(torch_scores),
        provider=CPU,
        error=float(np.abs(graph.astype(np.float64) - torch_scores).max()) / spread,
        agreement=float(same.mean()),
    )


_HOPELESS = 1e30


def check_graph(checked: Checked, precision: Precision) -> None:
    """Refuse a graph that is not the model.

    Raises:
        InternalError: a float32 graph differs from the model.
        DataError: one of another precision differs by too much.
    """
    allowed = TOLERANCES[precision]
    too_far = allowed.error is not None and checked.error > allowed.error
    if not too_far and checked.agreement >= allowed.agreement:
        return
    found = (
        f"its scores differ by up to {checked.error:.2g} of their spread and "
        f"{checked.agreement:.1%} of {checked.images} images get the same class"
    )
    limit = f"{allowed.error:.0e} is" if too_far else f"{allowed.agreement:.0%} are"
    if precision == "fp32":
        raise InternalError(
            f"the exported graph differs from the model: {found}; {limit} required. No file was "
            "written.",
            action="Report it with the versions of torch and onnxscript.",
        )
    raise DataError(
        f"the model does not tolerate {precision}: {found}; {limit} required. No file was written.",
        action="Export fp32, give more images that are more typical, or write the file anyway "
        "with --force.",
    )
