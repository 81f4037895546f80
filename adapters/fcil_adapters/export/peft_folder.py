"""The adapter of a LoRA method as a folder that the PEFT library loads: checked, described (torch).

`peft_adapter` has the contents. The folder is loaded back with the library itself and compared with
the torch model before it gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.backbones.probes import probe_images
from fcil_adapters.contract import Context, Method, Predictor, registry
from fcil_adapters.contract.backbone_info import backbone_fields
from fcil_adapters.export.check import compare
from fcil_adapters.export.exported_model import Checked, Origin
from fcil_adapters.export.folder import place_folder
from fcil_adapters.export.peft_adapter import (
    ABOUT,
    CARD,
    CONFIG,
    FILES,
    WEIGHTS,
    AdapterInfo,
    AdapterLayer,
    Scores,
    adapter_config,
    adapter_layers,
    adapter_tensors,
)
from fcil_adapters.export.peft_card import card_text
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.heads.scorer import LinearLayer, Scorer
from fcil_protocol.errors import DataError, InternalError
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import write_atomic

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

MOST_ERROR = 1e-4  # of the spread; rounding alone gives 1e-7 to 1e-5


def export_adapter(
    method: Method,
    ctx: Context,
    parts: Mapping[str, Payload],
    origin: Origin,
    target: Path,
    images: U8 | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> AdapterInfo:
    """Write the LoRA of a broadcast, and its head if that is linear; all of it or nothing.

    Args:
        method: the method of the model (`check_has_adapter`).
        ctx: with the backbone loaded on the CPU.
        parts: the broadcast, in float32.
        origin: goes into the description.
        target: the folder (`check_folder`).
        images: (N, S, S, 3), preprocessed, to compare in addition to the probe images.
        notify: called with a sentence about each next step.

    Raises:
        DataError: the model has no classes yet, or the options train no LoRA.
        InternalError: what PEFT loads differs from the model.
        DiskFull, StorageError: it cannot be written.
    """
    notify("putting the model together")
    changes = registry.load_object(method.changes)(ctx, parts)
    predictor: Predictor = registry.load_half(method.model).compose(ctx, parts, ctx.backbone)
    if not predictor.classes:
        raise DataError("the model knows no class yet.", action="Export it after the first round.")
    layers = adapter_layers(changes, ctx.backbone_info)
    head = predictor.linear_layer if isinstance(predictor, Scorer) else None
    rows = None if head is None else (to_numpy(head.weight), to_numpy(head.bias))
    scores: Scores = "none" if head is None else head.scores
    contents = {
        CONFIG: adapter_config(
            layers, changes.scale, ctx.backbone_info.name, with_head=rows is not None
        ),
        WEIGHTS: safetensors.numpy.save(adapter_tensors(layers, rows), {"format": "pt"}),
    }
    given = [probe_images(ctx.backbone_info), *([] if images is None else [images])]
    looked = np.concatenate(given)
    with place_folder(target, FILES) as folder:
        for name, content in contents.items():
            write_atomic(folder / name, content, mode=0o644)
        notify(f"loading it with PEFT, and comparing it on {len(looked)} images")
        checked = _check(folder, ctx.backbone, predictor, head, looked)
        info = _info(method, ctx, predictor, origin, layers, scores, checked)
        about = json.dumps(info.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        write_atomic(folder / ABOUT, about.encode(), mode=0o644)
        write_atomic(folder / CARD, card_text(method, info).encode(), mode=0o644)
    return info


def _check(
    folder: Path, backbone: Backbone, predictor: Predictor, head: LinearLayer | None, images: U8
) -> Checked:
    """Compare what the library loads: the features always, and the scores if there is a head."""
    features, scores = _loaded(folder, backbone, len(predictor.classes) if head else 0, images)
    results = [compare(features, _features(predictor, images))]
    if head is not None:
        kind = head.scores
        ours, theirs = predictor.logits(images), scores
        results.append(compare(_comparable(theirs, kind), _comparable(ours, kind)))
    worst = max(results, key=lambda one: one.error)
    if worst.error > MOST_ERROR:
        raise InternalError(
            f"the adapter as PEFT loads it differs from the model by up to {worst.error:.2g} of "
            f"the spread, {MOST_ERROR:g} is allowed. No file was written.",
            action="Report it with the versions of torch, timm and peft.",
        )
    agreement = results[-1].agreement if head is not None else 1.0
    return worst.model_copy(update={"provider": _version(), "agreement": agreement})


def _loaded(folder: Path, backbone: Backbone, classes: int, images: U8) -> tuple[F32, F32]:
    """Return features (N, d) and outputs (N, C) of the folder on timm's model, by the library."""
    from peft import PeftModel

    base = backbone.view()
    base.reset_classifier(classes)
    model: Any = PeftModel.from_pretrained(base, str(folder)).eval()
    vit = model.base_model.model
    features, scores = [], []
    with torch.no_grad():
        for image in images:
            tokens: Tensor = vit.forward_features(backbone.normalise(image[None]))
            features.append(to_numpy(vit.forward_head(tokens, pre_logits=True)))
            scores.append(to_numpy(vit.forward_head(tokens)))
    return np.concatenate(features), np.concatenate(scores)


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


def _version() -> str:
    import peft

    return f"peft {peft.__version__}"


def _info(
    method: Method,
    ctx: Context,
    predictor: Predictor,
    origin: Origin,
    layers: Mapping[str, AdapterLayer],
    scores: Scores,
    checked: Checked,
) -> AdapterInfo:
    backbone = ctx.backbone_info
    return AdapterInfo.model_validate(
        {
            "method": method.name,
            "method_version": method.version,
            "federation": origin.federation,
            "run": origin.run,
            "task": origin.task,
            "state": origin.state,
            "classes": predictor.classes,
            "names": [origin.names.get(c, "") for c in predictor.classes],
            "preprocessing": backbone_fields(backbone)["preprocessing"],
            "backbone": {"name": backbone.name, "digest": backbone.digest},
            "scores": scores,
            "ranks": {name: len(layer.A) for name, layer in layers.items()},
            "factored": [name for name, layer in layers.items() if layer.factored],
            "checked": checked,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
