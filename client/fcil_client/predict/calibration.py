"""Probabilities from scores: one temperature, fitted on images that no training has used.

A method's scores may be distances, cosines or logits, so their softmax says little. Dividing them
by one number T (temperature scaling: Guo et al., "On Calibration of Modern Neural Networks", ICML
2017) keeps their order and makes probabilities of them. T minimises the cross-entropy on the
client's ``select`` images; the targets leave a little for the other classes, as in Platt (1999), so
that a few images, all classified correctly, do not claim certainty.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Predictor
from fcil_adapters.images.cache import ImageStore
from fcil_adapters.images.decoding import open_source
from fcil_client.data import manifest as manifests
from fcil_client.state.current_model import CurrentModel
from fcil_client.state.home import Home
from fcil_protocol.errors import FcilError, StorageError
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.storage.atomic_files import write_atomic

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

NAME = "calibration.json"  # in the client's directory
FORMAT = 1
MOST = 256  # images: one number needs no more, and each is a pass through the backbone
USUAL = 0.95
_LARGEST = 1e6  # of T and of 1 / T
_HALVINGS = 80


@dataclass(frozen=True)
class Calibration:
    """Calibration of a model's scores on the client's own images.

    Attributes:
        temperature: divisor of the scores.
        images: number that it was fitted on; 0: fitted elsewhere, number unknown.
        usual: the unknown score (`unknown_score`) that `USUAL` of them stay below; None as above.
    """

    temperature: float
    images: int = 0
    usual: float | None = None


def softmax(scores: F32, temperature: float) -> F64:
    """Return probabilities (B, C) of scores (B, C)."""
    z = scores.astype(np.float64) / temperature
    z -= z.max(axis=1, keepdims=True)
    e = np.exp(z)
    out: F64 = e / e.sum(axis=1, keepdims=True)
    return out


def unknown_score(probabilities: F64) -> F64:
    """Return the unknown score of each row (B, C), its normalised entropy, 0 to 1.

    Of the well-known scores for images of no known class this one was the most even over the
    methods (docs/predict.md#images-of-no-known-class).
    """
    width = probabilities.shape[1]
    if width == 1:
        return np.zeros(len(probabilities))
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    score: F64 = -(probabilities * logs).sum(axis=1) / np.log(width)
    return score.clip(0, 1)


def fit_temperature(scores: F32, columns: I64) -> float:
    """Return the temperature that fits scores (N, C) with the correct classes in ``columns``.

    The cross-entropy is convex in 1 / T, so its slope is bisected.
    """
    n, width = scores.shape
    centred = scores.astype(np.float64) - scores.mean(axis=1, keepdims=True, dtype=np.float64)
    right = (n + 1) / (n + 2)
    targets = np.full((n, width), (1 - right) / max(width - 1, 1))
    targets[np.arange(n), columns] = right if width > 1 else 1.0
    wanted = float((targets * centred).sum())
    low, high = -np.log(_LARGEST), np.log(_LARGEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slope = float((softmax(centred, np.exp(-middle)) * centred).sum()) - wanted
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


def calibration_of(
    home: Home,
    model: CurrentModel,
    predictor: Predictor,
    *,
    batch: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> Calibration | None:
    """Return a model's calibration, cached or measured now; None without images for it.

    Args:
        home: the client's.
        model: the current model.
        predictor: composed from it.
        batch: images per pass.
        threads: number of decoding threads.
        progress: receives the number of images done and in total.
    """
    path = home.directory / NAME
    key = model.record.key
    known = _cached(path, key)
    if known is not None:
        return known
    found = _scores(home, model, predictor, batch, threads, progress)
    if found is None:
        return None
    scores, columns = found
    temperature = fit_temperature(scores, columns)
    usual = float(np.quantile(unknown_score(softmax(scores, temperature)), USUAL))
    calibration = Calibration(temperature, len(columns), usual)
    body = {"format": FORMAT, "key": key, **asdict(calibration)}
    with contextlib.suppress(StorageError):  # it is measured again then
        write_atomic(path, json.dumps(body).encode(), sync=False)
    return calibration


def _cached(path: Path, key: str) -> Calibration | None:
    try:
        fields = json.loads(path.read_bytes())
        if fields["format"] != FORMAT or fields["key"] != key:
            return None
        known = Calibration(
            float(fields["temperature"]), int(fields["images"]), float(fields["usual"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None  # measured again
    return known if 0 < known.temperature < np.inf else None


def _scores(
    home: Home,
    model: CurrentModel,
    predictor: Predictor,
    batch: int,
    threads: int,
    progress: Callable[[int, int], None],
) -> tuple[F32, I64] | None:
    """Return scores of the select images of known classes, and the columns of their classes."""
    columns = {class_id: column for column, class_id in enumerate(predictor.classes)}
    ids = {class_key(name): c for c, name in model.names.items() if c in columns}
    try:
        manifest = manifests.load(home.directory / manifests.NAME, home.salt())
        enrolment = home.enrolment()
        images = manifest.images if manifest and enrolment else ()
        own = [i for i in images if i.side == "select" and class_key(i.entry.class_name) in ids]
        if not own or enrolment is None:
            return None
        own = sorted(own, key=lambda image: image.digest)[:MOST]  # as good as a random draw
        store = ImageStore(
            open_source(Path(enrolment.data)), model.info.preprocessing, memory_bytes=0,
            threads=threads,
        )  # fmt: skip
    except FcilError:  # the images are away: the daemon reports it, and prediction needs none
        return None
    scores: list[F32] = []
    right: list[int] = []
    with contextlib.closing(store):
        for start in range(0, len(own), batch):
            some = own[start : start + batch]
            decoded = store.arrays(some)
            good = [(i, a) for i, a in zip(some, decoded, strict=True) if a is not None]
            if good:
                scores.append(predictor.logits(np.stack([a for _, a in good])))
                right += [columns[ids[class_key(i.entry.class_name)]] for i, _ in good]
            progress(start + len(some), len(own))
    return (np.concatenate(scores), np.array(right, np.int64)) if right else None
