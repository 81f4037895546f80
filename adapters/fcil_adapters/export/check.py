"""Comparison of an export with the torch model, before it gets its name (torch).

A graph by its scores, with onnxruntime; a folder by its features and scores, as another library
loads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.backbones.onnx_session import CPU, import_onnxruntime
from fcil_adapters.contract import Predictor
from fcil_adapters.export.exported_model import INPUT, OUTPUT, Checked, Precision, Tolerance
from fcil_adapters.export.folder import Scores
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.heads.scorer import Scorer
from fcil_protocol.errors import DataError, InternalError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

MOST_ERROR = 1e-4  # of the spread, for folders; rounding alone gives 1e-7 to 1e-5

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


# --- folders --------------------------------------------------------------------------------


def outputs_of(vit: Any, backbone: Backbone, images: U8) -> tuple[F32, F32]:
    """Return the features (N, d) and the outputs (N, C) of timm's model on images (N, S, S, 3).

    Args:
        vit: in eval mode.
        backbone: normalises the images.
        images: preprocessed.
    """
    features, scores = [], []
    with torch.no_grad():
        for image in images:
            tokens: Tensor = vit.forward_features(backbone.normalise(image[None]))
            features.append(to_numpy(vit.forward_head(tokens, pre_logits=True)))
            scores.append(to_numpy(vit.forward_head(tokens)))
    return np.concatenate(features), np.concatenate(scores)


def check_loaded(
    what: str,
    library: str,
    outputs: tuple[F32, F32],
    predictor: Predictor,
    scores: Scores,
    images: U8,
) -> Checked:
    """Compare what a library loads with the model: the features, and the outputs of a head.

    Args:
        what: the export, for the message.
        library: name and version.
        outputs: of `outputs_of`, by the library.
        predictor: the model.
        scores: what the head's outputs are; ``none``: there is no head.
        images: (N, S, S, 3), preprocessed.

    Raises:
        InternalError: they differ by too much.
        DataError: the model has no features.
    """
    features, theirs = outputs
    results = [compare(features, _features(predictor, images))]
    if scores != "none":
        ours = predictor.logits(images)
        results.append(compare(_comparable(theirs, scores), _comparable(ours, scores)))
    worst = max(results, key=lambda one: one.error)
    if worst.error > MOST_ERROR:
        raise InternalError(
            f"{what} as {library} loads it differs from the model by up to {worst.error:.2g} of "
            f"the spread, {MOST_ERROR:g} is allowed. No file was written.",
            action="Report it with the versions of torch, timm and peft.",
        )
    agreement = 1.0 if scores == "none" else results[-1].agreement
    return worst.model_copy(update={"provider": library, "agreement": agreement})


def _features(predictor: Predictor, images: U8) -> F32:
    """Return the features (N, d) that a predictor's head gets."""
    if isinstance(predictor, Scorer) and predictor.features is not None:
        with torch.no_grad():
            return to_numpy(predictor.features(torch.from_numpy(images)))
    if isinstance(predictor, FeatureScorer) and predictor.extractor is not None:
        return predictor.extractor.features(images)
    raise DataError(
        f"a model of the class {type(predictor).__name__} has no features to compare.",
        action="Its method must return a Scorer with features: docs/method-rules.md.",
    )


def _comparable(scores: F32, kind: Scores) -> F32:
    """Return scores without the number of each image in which a head and its layer differ."""
    wide = scores.astype(np.float64)
    if kind == "shifted":
        wide -= wide.mean(1, keepdims=True)
    elif kind == "scaled":
        wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return wide.astype(np.float32)
