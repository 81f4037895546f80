"""The adapter of a LoRA method as a folder that the PEFT library loads: checked, described (torch).

`peft_adapter` has the contents. The folder is loaded back with the library itself and compared with
the torch model before it gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.backbones.probes import probe_images
from fcil_adapters.contract import Context, Method, Predictor, registry
from fcil_adapters.export.check import check_loaded, outputs_of
from fcil_adapters.export.exported_model import Checked, Origin, composed
from fcil_adapters.export.folder import Scores, common_fields, place_folder, write_description
from fcil_adapters.export.peft_adapter import (
    CONFIG,
    FILES,
    WEIGHTS,
    AdapterInfo,
    adapter_config,
    adapter_layers,
    adapter_tensors,
)
from fcil_adapters.export.peft_card import card_text
from fcil_adapters.numerics.torch_numpy import to_numpy
from fcil_adapters.toolkit.heads.scorer import Scorer
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.atomic_files import write_atomic

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


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
    predictor = composed(method, ctx, parts)
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
        checked = _check(folder, ctx.backbone, predictor, scores, looked)
        info = AdapterInfo(
            **common_fields(method, ctx, predictor, origin, scores),
            ranks={name: len(layer.A) for name, layer in layers.items()},
            factored=tuple(name for name, layer in layers.items() if layer.factored),
            checked=checked,
        )
        write_description(folder, info, card_text(method, info))
    return info


def _check(
    folder: Path, backbone: Backbone, predictor: Predictor, scores: Scores, images: U8
) -> Checked:
    """Compare what the library loads with the model."""
    outputs = _loaded(folder, backbone, 0 if scores == "none" else len(predictor.classes), images)
    return check_loaded("the adapter", _version(), outputs, predictor, scores, images)


def _loaded(folder: Path, backbone: Backbone, classes: int, images: U8) -> tuple[F32, F32]:
    """Return features (N, d) and outputs (N, C) of the folder on timm's model, by the library."""
    from peft import PeftModel

    base = backbone.view()
    base.reset_classifier(classes)
    model: Any = PeftModel.from_pretrained(base, str(folder)).eval()
    return outputs_of(model.base_model.model, backbone, images)


def _version() -> str:
    import peft

    return f"peft {peft.__version__}"
