"""Naming of images by a model: the client's current one, or an exported file (without torch)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones import engines
from fcil_adapters.backbones.onnx_session import THREADS_VARIABLE
from fcil_adapters.contract import BackboneInfo, Method, Predictor, Preprocessing
from fcil_adapters.contract.backbone_info import preprocessing_digest
from fcil_adapters.export.exported_model import ExportedModel
from fcil_client.predict.calibration import Calibration, calibration_of, softmax, unknown_score
from fcil_client.predict.images import Decoded
from fcil_client.state import current_model
from fcil_client.state.current_model import CurrentModel
from fcil_client.state.home import Home
from fcil_protocol.errors import BackboneMismatch, ConfigError, DataError, MethodMismatch

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Means:
    """Resources of the computation.

    Attributes:
        engine: auto, torch or onnx; of the client's current model.
        device: auto, cpu, cuda or cuda:N.
        weights: the backbone's file; None: the one that the daemon used.
        threads: of one pass, and for decoding.
        batch: images in one pass.
        calibrate: the client's images may be used for it.
    """

    engine: str = "auto"
    device: str = "auto"
    weights: Path | None = None
    threads: int = 1
    batch: int = 32
    calibrate: bool = True


@dataclass(frozen=True)
class PredictionRequest:
    """The requested answers about an image.

    Attributes:
        top: number of likeliest classes.
        unknown: give a score for belonging to none of the classes.
        above: score above which an image is called unknown; None: no image is.
    """

    top: int = 3
    unknown: bool = False
    above: float | None = None


@dataclass(frozen=True)
class Ready:
    """A loaded model that scores images.

    Attributes:
        classes: ids, one per column of the scores.
        names: class id -> name, as far as they are known here.
        logits: scores preprocessed images.
        calibration: None: scores are used as they are.
        about: description of the model and its engine, JSON-ready.
        line: the same as text.
    """

    classes: tuple[int, ...]
    names: Mapping[int, str]
    preprocessing: Preprocessing
    logits: Callable[[U8], F32] = field(repr=False)
    calibration: Calibration | None
    about: dict[str, Any]
    line: str

    @property
    def temperature(self) -> float:
        """Divisor of the scores."""
        return self.calibration.temperature if self.calibration else 1.0


def open_file(path: Path, means: Means) -> Ready:
    """Load an exported model.

    Raises:
        FcilError: it cannot be loaded; the message says why.
    """
    _bound(means.threads)
    model = ExportedModel.load(path, means.device, means.threads)
    info = model.info
    names = {c: name for c, name in zip(info.classes, info.names, strict=True) if name}
    calibration = Calibration(info.temperature) if info.temperature else None
    about = {
        "source": str(path),
        "federation": info.federation,
        "run": info.run,
        "task": info.task,
        "state": info.state,
        "when": f"after task {info.task}",
        "method": info.method,
        "backbone": info.backbone.name,
        "precision": info.precision,
        "engine": "onnx",
        "device": model.runtime.description,
    }
    line = (
        f"model {path}: {info.method} on {info.backbone.name}, task {info.task} of run "
        f"{info.run}, {info.precision}; {model.runtime.description}"
    )
    ready = Ready(info.classes, names, info.preprocessing, model.logits, calibration, about, line)
    return _told(ready)


class Current:
    """A client's current model, which can be reopened when there is a newer one.

    Args:
        home: the client's.
        means: resources of the computation.
        progress: receives the number of calibration images done and in total.
    """

    def __init__(self, home: Home, means: Means, progress: Callable[[int, int], None]) -> None:
        self._home = home
        self._means = means
        self._progress = progress
        self._loaded: tuple[str, Any] | None = None  # engine and backbone, kept across models
        self._tried = ""  # key of the last one

    @property
    def directory(self) -> Path:
        """Folder in which a newer model appears."""
        return self._home.directory

    def exists(self) -> bool:
        """Return True if the client's directory exists."""
        return self._home.directory.is_dir()

    def is_older(self) -> bool:
        """Return True if the current model is not the one that was opened last."""
        record = current_model.read_if_whole(self._home)
        return record is not None and record.key != self._tried

    def open(self) -> Ready:
        """Load the model, and calibrate it if there is no cached calibration.

        Raises:
            FcilError: there is none, or it cannot be loaded; the message says why.
        """
        _bound(self._means.threads)
        model = current_model.load(self._home)
        self._tried = model.record.key
        engine, backbone = self.backbone(model)
        device = backbone.device if backbone is not None else "cpu"
        predictor = model.compose(backbone, device=device, batch=self._means.batch)
        classes, record = tuple(predictor.classes), model.record
        if not classes:
            raise DataError(
                f"the model {record.progress_text} of run {record.run} knows no class yet.",
                action="Wait for the end of a round in which a client has images.",
            )
        about = {
            "source": "current",
            "federation": record.federation,
            "run": record.run,
            "task": record.task,
            "state": record.state,
            "when": record.progress_text,
            "fetched_at": record.fetched,
            "method": record.method,
            "backbone": model.info.name if model.method.needs_backbone else "",
            "precision": "fp32",
            "engine": engine,
            "device": backbone.description if backbone is not None else "cpu",
        }
        # Of the model that was opened: the client may have fetched a newer one meanwhile.
        told = current_model.describe(current_model.summary_of(record))
        ready = Ready(
            classes,
            model.names,
            model.info.preprocessing,
            predictor.logits,
            self._calibration(model, predictor) if self._means.calibrate else None,
            about,
            f"model {told}; {record.method}, {about['device']}",
        )
        return _told(ready)

    def _calibration(self, model: CurrentModel, predictor: Predictor) -> Calibration | None:
        return calibration_of(
            self._home,
            model,
            predictor,
            batch=self._means.batch,
            threads=self._means.threads,
            progress=self._progress,
        )

    def backbone(self, model: CurrentModel) -> tuple[str, Any]:
        """Return the engine's name and the backbone, None if none is needed.

        Raises:
            BackboneMismatch: the available backbone is not the run's.
            MethodMismatch, ConfigError, DataError: none can be loaded here.
        """
        if not model.method.needs_backbone:
            return "numpy", None
        if self._loaded is None or not _same(self._loaded[1].info, model.info):
            self._loaded = None  # two may not fit at once
            own = Path(model.record.weights) if model.record.weights else None
            weights = self._means.weights or own
            self._loaded = _load(model.method, model.info, weights, self._means)
        ours = self._loaded[1].info
        if not _same(ours, model.info):
            raise BackboneMismatch(
                f"the model was learned on {model.info.name} with weights "
                f"{model.info.digest[:12]}; the backbone {ours.name} here has "
                f"{ours.digest[:12]}, or prepares images differently.",
                action="Give the file with those weights: --weights FILE.",
            )
        return self._loaded


def _same(ours: BackboneInfo, theirs: BackboneInfo) -> bool:
    prepared = preprocessing_digest(ours.preprocessing) == preprocessing_digest(
        theirs.preprocessing
    )
    return ours.digest == theirs.digest and prepared


def _told(ready: Ready) -> Ready:
    known = ready.calibration
    more = {
        "classes": len(ready.classes),
        "temperature": known.temperature if known else None,
        "calibrated": known is not None,
        "unknown_usual": known.usual if known else None,
    }
    words = "; not calibrated"
    if known is not None:
        words = f"; calibrated on {known.images} held-out images" if known.images else ""
    if known is not None and known.usual is not None:
        words += f", 95 % of which have an unknown score of at most {known.usual:.2f}"
    return replace(ready, about={**ready.about, **more}, line=ready.line + words)


def _bound(threads: int) -> None:
    """Limit numeric libraries that are imported from now on to this many threads."""
    os.environ[THREADS_VARIABLE] = str(threads)


def _choose(method: Method, choice: str) -> str:
    """Return the engine that a choice means for the model of a method.

    Raises:
        MethodMismatch: the engine cannot compute it, or is not installed.
    """
    try:
        return engines.choose(choice, needs_gradient=not method.frozen)
    except ConfigError as error:
        if choice not in engines.CHOICES:
            raise
        why = "" if method.frozen else ", which changes the backbone, needs torch"
        raise MethodMismatch(
            f"the current model is one of the method {method.name!r}{why}: {error.message}",
            action=f"{error.action} Or use an exported file, which needs onnxruntime alone: "
            "--model FILE.onnx",
        ) from error


def _load(
    method: Method, info: BackboneInfo, weights: Path | None, means: Means
) -> tuple[str, Any]:
    """Load with the chosen engine; if both would do, with the one that starts sooner."""
    engine, size = _choose(method, means.engine), info.preprocessing.size

    def load(name: str) -> Any:
        return engines.load(name, info.name, weights, means.device, means.threads, size)

    if means.engine == "auto" and method.frozen and engines.installed().onnxruntime:
        try:
            return "onnx", load("onnx")
        except (ConfigError, DataError):
            if engine == "onnx":
                raise  # there is no torch to use instead
    return engine, load(engine)


# --- answers --------------------------------------------------------------------------------


def answers(
    ready: Ready, batches: Iterable[list[Decoded]], wanted: PredictionRequest
) -> Iterator[dict[str, Any]]:
    """Yield one row per image, JSON-ready, in order.

    ``image`` and ``top``, a list of ``class``, ``name`` (None if unknown here) and ``probability``;
    ``unknown``, a score, and ``is_unknown`` on request. An image that cannot be used has ``image``
    and ``error``.
    """
    for batch in batches:
        good = [one.pixels for one in batch if one.pixels is not None]
        rows = iter(predict_rows(ready, np.stack(good), wanted) if good else [])
        for one in batch:
            if one.pixels is None:
                yield {"image": one.name, "error": one.fault}
            else:
                yield {"image": one.name, **next(rows)}


def predict_rows(ready: Ready, images: U8, wanted: PredictionRequest) -> list[dict[str, Any]]:
    """Return the rows of preprocessed images (B, S, S, 3)."""
    scores = ready.logits(images)  # (B, C)
    probabilities = softmax(scores, ready.temperature)
    # By scores: the likeliest is the one that evaluation counts, also if softmax has a tie.
    order = np.argsort(-scores, axis=1, kind="stable")[:, : wanted.top]
    unknown = unknown_score(probabilities)
    return [
        _row(ready, columns.tolist(), row, float(score), wanted)
        for columns, row, score in zip(order, probabilities, unknown, strict=True)
    ]


def _row(
    ready: Ready, columns: list[int], probabilities: F64, unknown: float, wanted: PredictionRequest
) -> dict[str, Any]:
    ids = [ready.classes[column] for column in columns]
    top = [
        {"class": c, "name": ready.names.get(c), "probability": round(float(probabilities[k]), 6)}
        for c, k in zip(ids, columns, strict=True)
    ]
    row: dict[str, Any] = {"top": top}
    if wanted.unknown or wanted.above is not None:
        row["unknown"] = round(unknown, 6)
    if wanted.above is not None:
        row["is_unknown"] = unknown > wanted.above
    return row
