"""The client's current model in another format, calibrated on its own images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Predictor
from fcil_adapters.export.exported_model import Origin
from fcil_adapters.export.load import Described, ExportOrder, check_method, exporter, write
from fcil_adapters.images.decoding import open_source
from fcil_client.data import manifest as manifests
from fcil_client.data.local_data import LocalData
from fcil_client.predict.calibration import calibration_of
from fcil_client.predict.predict import Current, Means
from fcil_client.state import current_model
from fcil_client.state.current_model import CurrentModel
from fcil_client.state.home import Home
from fcil_protocol.errors import FcilError

U8 = NDArray[np.uint8]

# int8 ranges need a few hundred images; the others are compared with torch on a few.
MOST_IMAGES = {"int8": 512, "fp16": 64, "fp32": 64}


def export_current(
    home: Home, wanted: ExportOrder, *, means: Means, notify: Callable[[str], None]
) -> Described:
    """Write the model, completely or not at all.

    Args:
        home: the client's.
        wanted: format, target and options (`fcil_adapters.export.load.wanted_form`).
        means: weights and threads; export runs in torch on the CPU.
        notify: receives a sentence before each step.

    Raises:
        FcilError: it cannot be exported; the message says why.
    """
    model = current_model.load(home)
    check_method(wanted.form, model.method)
    module = exporter("client", wanted.form)
    wanted.check(module)
    means = replace(means, engine="torch", device="cpu")
    if not wanted.is_graph:
        means = replace(means, calibrate=False)
    backbone = images = None
    if wanted.needs_backbone:
        notify(f"loading {model.info.name}")
        _, backbone = Current(home, means, lambda _done, _total: None).backbone(model)
        images = own_images(home, model, MOST_IMAGES.get(wanted.precision, 0), means.threads)
        if images is None:
            notify("none of the client's own images are here; only the probe images are compared")
    ctx = model.context(backbone, device="cpu")
    origin = _origin(home, model, backbone, means, notify)
    return write(module, wanted, (model.method, ctx, model.parts, origin), None, images, notify)


def _origin(
    home: Home, model: CurrentModel, backbone: Any, means: Means, notify: Callable[[str], None]
) -> Origin:
    calibration = None
    if means.calibrate:
        predictor: Predictor = model.compose(backbone, device="cpu", batch=means.batch)
        calibration = (
            calibration_of(
                home,
                model,
                predictor,
                batch=means.batch,
                threads=means.threads,
                progress=lambda done, total: notify(f"calibrating: {done} of {total} images"),
            )
            if predictor.classes
            else None
        )
    record = model.record
    return Origin(
        federation=record.federation,
        run=record.run,
        task=record.last_task,
        state=record.state,
        names=model.names,
        temperature=calibration.temperature if calibration else None,
    )


def own_images(home: Home, model: CurrentModel, most: int, threads: int) -> U8 | None:
    """Return training images of all classes that the model knows, preprocessed: (N, S, S, 3).

    They are evenly spaced among all of them. None: none are here.
    """
    ids = {name: class_id for class_id, name in model.names.items()}
    try:
        manifest = manifests.load(home.directory / manifests.NAME, home.salt())
        enrolment = home.enrolment()
        if manifest is None or enrolment is None:
            return None
        data = LocalData(
            open_source(Path(enrolment.data)),
            manifest,
            model.info.preprocessing,
            memory_bytes=0,
            threads=threads,
        )
    except FcilError:  # the images are away
        return None
    with closing(data):
        view = data.learner_images(ids)
        if not len(view) or not most:
            return None
        index = np.unique(np.linspace(0, len(view) - 1, min(most, len(view))).astype(np.int64))
        return view.take(index)
