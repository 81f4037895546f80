"""A model as a folder that timm opens: merged weights and a linear classifier (torch).

`timm_model` has the other files' texts. timm loads the folder before it gets its name, and what it
computes is compared with the torch model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.backbones.frozen_features import FeatureScorer
from fcil_adapters.backbones.probes import probe_images
from fcil_adapters.contract import Context, Method, Predictor, registry
from fcil_adapters.export.check import check_loaded, outputs_of
from fcil_adapters.export.exported_model import Checked, Origin, composed
from fcil_adapters.export.folder import Scores, common_fields, place_folder, write_description
from fcil_adapters.export.peft_adapter import changed_linears
from fcil_adapters.export.timm_model import (
    CONFIG,
    FILES,
    HEAD,
    PREPROCESSOR,
    WEIGHTS,
    TimmInfo,
    card_text,
    labels,
    model_config,
    preprocessor_config,
)
from fcil_adapters.numerics.scores import cosines, linear, negative_distances
from fcil_adapters.toolkit.closed_form.model import SCORES as CLOSED_FORM
from fcil_adapters.toolkit.heads.scorer import LinearLayer, Scorer
from fcil_adapters.toolkit.lora.low_rank import Changes
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import write_atomic

U8 = NDArray[np.uint8]

# Any plain transformer is this one with other arguments.
_PLAIN = "vit_tiny_patch16_224"


def export_timm(
    method: Method,
    ctx: Context,
    parts: Mapping[str, Payload],
    origin: Origin,
    target: Path,
    images: U8 | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> TimmInfo:
    """Write the model of a broadcast as one backbone with a classifier; all of it or nothing.

    Args:
        method: the method of the model (`timm_model.check_has_weights`).
        ctx: with the backbone loaded on the CPU.
        parts: the broadcast, in float32.
        origin: goes into the description.
        target: the folder (`check_folder`).
        images: (N, S, S, 3), preprocessed, to compare in addition to the probe images.
        notify: called with a sentence about each next step.

    Raises:
        DataError: the model has no classes yet, or is no backbone with a linear layer.
        InternalError: what timm loads differs from the model.
        DiskFull, StorageError: it cannot be written.
    """
    notify("putting the model together")
    predictor = composed(method, ctx, parts)
    layer = linear_layer_of(predictor)
    state = _weights(method, ctx, parts, predictor)
    own = ctx.backbone.module.state_dict()
    changed = tuple(sorted(name for name in state if not torch.equal(state[name], own[name])))
    if layer is None and not changed:
        raise DataError(
            f"this model of {method.name} leaves the backbone as it is, and its classifier is no "
            "linear layer of the features, so a timm folder could hold nothing of it.",
            action="Export the whole model: --onnx model.onnx",
        )
    scores: Scores = "none" if layer is None else layer.scores
    if layer is not None:
        state |= {f"{HEAD}.weight": layer.weight, f"{HEAD}.bias": layer.bias}
    weights = safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()},
        {"format": "pt"},
    )
    info = ctx.backbone_info
    names = () if layer is None else labels(predictor.classes, origin.names)
    architecture, arguments = _architecture(ctx.backbone)
    contents = {
        CONFIG: model_config(architecture, arguments, info.preprocessing, names, info.dim),
        PREPROCESSOR: preprocessor_config(info.preprocessing),
        WEIGHTS: weights,
    }
    looked = np.concatenate([probe_images(info), *([] if images is None else [images])])
    with place_folder(target, FILES) as folder:
        for name, content in contents.items():
            write_atomic(folder / name, content, mode=0o644)
        notify(f"loading it with timm, and comparing it on {len(looked)} images")
        described = TimmInfo(
            **common_fields(method, ctx, predictor, origin, scores),
            changed=changed,
            architecture=architecture,
            weights_sha256=hashlib.sha256(weights).hexdigest(),
            checked=_check(folder, ctx.backbone, predictor, scores, looked),
        )
        write_description(folder, described, card_text(method, described))
    return described


def linear_layer_of(predictor: Predictor) -> LinearLayer | None:
    """Return the linear layer that prefers the same classes as a model's last step, exactly.

    None: there is none.
    """
    if isinstance(predictor, Scorer):
        return predictor.linear_layer
    if not isinstance(predictor, FeatureScorer) or predictor.extractor is None:
        return None
    weight, *others = (torch.from_numpy(np.asarray(w)) for w in predictor.weights)
    if predictor.score is linear:
        return LinearLayer(weight.float(), others[0].float())
    if predictor.score is negative_distances:
        return LinearLayer.nearest(weight)
    if predictor.score is cosines:
        return LinearLayer.cosine(weight)
    # W f / |f| is W f, scaled; with a bias it is not.
    if predictor.score is CLOSED_FORM["linear"] and not others[0].any():
        return LinearLayer(weight.float(), torch.zeros(len(weight)), "scaled")
    return None


def _weights(
    method: Method, ctx: Context, parts: Mapping[str, Payload], predictor: Predictor
) -> dict[str, Tensor]:
    """Return the weights of the model's backbone, by their names in timm's model."""
    if isinstance(predictor, FeatureScorer) and isinstance(predictor.extractor, Backbone):
        return dict(predictor.extractor.module.state_dict())
    if not method.changes:
        raise DataError(
            f"{method.name} names no function that reads its LoRA, so its weights are unknown.",
            action="Export the whole model: --onnx model.onnx",
        )
    return _merged(ctx.backbone, registry.load_object(method.changes)(ctx, parts))


def _merged(backbone: Backbone, changes: Changes) -> dict[str, Tensor]:
    """Return ``W + scale * change`` in the place of each changed W, rounded once."""
    state: dict[str, Tensor] = dict(backbone.module.state_dict())
    for name, linear_, own in changed_linears(changes):
        wide = backbone.weight(f"{name}.weight").astype(np.float64)
        slices = linear_.slices(own)
        rows = dict(zip(slices, np.split(wide, len(slices)), strict=True))  # views
        for module, change in own.items():
            rows[module] += changes.scale * change.total()
        state[f"{name}.weight"] = torch.from_numpy(wide.astype(np.float32))
    return state


def _architecture(backbone: Backbone) -> tuple[str, dict[str, Any]]:
    """Return timm's name of a backbone's model, and the arguments that make it."""
    import timm

    info, module = backbone.info, backbone.module
    size = {"img_size": info.preprocessing.size}
    if timm.is_model(info.name):
        return info.name, size
    return _PLAIN, {
        **size,
        "patch_size": int(module.patch_embed.patch_size[0]),
        "embed_dim": info.dim,
        "depth": info.depth,
        "num_heads": info.heads,
        "mlp_ratio": info.mlp_dim / info.dim,
    }


def _check(
    folder: Path, backbone: Backbone, predictor: Predictor, scores: Scores, images: U8
) -> Checked:
    """Compare what timm loads with the model."""
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    outputs = outputs_of(model, backbone, images)
    library = f"timm {timm.__version__}"
    return check_loaded("the folder", library, outputs, predictor, scores, images)
