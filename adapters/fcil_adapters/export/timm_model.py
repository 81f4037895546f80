"""A model as a folder that timm and Hugging Face's libraries open: its files' texts (torch-free).

Format of ``config.json``: timm's, https://huggingface.co/docs/timm/hf_hub; of
``preprocessor_config.json``: that of transformers' image processors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fcil_adapters.backbones.known import EMBEDDED
from fcil_adapters.contract import Method, Preprocessing
from fcil_adapters.export.folder import (
    ABOUT,
    CARD,
    FolderInfo,
    Scores,
    checked_fact,
    learned_facts,
)
from fcil_protocol.errors import DataError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PREPROCESSOR = "preprocessor_config.json"
FILES = (ABOUT, CONFIG, WEIGHTS, PREPROCESSOR, CARD)
HEAD = "head"  # timm's name of a transformer's last layer

# PIL's numbers, by the names that timm and fcil use.
_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


class TimmInfo(FolderInfo):
    """Description of an exported model.

    Attributes:
        changed: names of the weights that differ from the backbone's.
        architecture: name of the model in timm.
        weights_sha256: SHA-256 of `WEIGHTS` (hex).
    """

    changed: tuple[str, ...]
    architecture: str
    weights_sha256: str


def check_has_weights(method: Method) -> None:
    """Refuse a method whose model is no backbone with a linear layer on it, before any work.

    Raises:
        DataError: it changes no weight of the backbone and has no classifier on its features.
    """
    if not method.changes and not method.frozen:
        kind = "works on pixels" if not method.needs_backbone else "changes no weight of it"
        raise DataError(
            f"a timm model is a backbone with a linear layer, and {method.name} {kind}.",
            action="Export its whole model: --onnx model.onnx",
        )


def model_config(
    architecture: str,
    arguments: Mapping[str, Any],
    p: Preprocessing,
    names: tuple[str, ...],
    dim: int,
) -> bytes:
    """Return the content of `CONFIG`.

    Args:
        architecture: name of the model in timm, perhaps with the tag of its first weights.
        arguments: of ``timm.create_model`` for it.
        p: preparation of images.
        names: of the classes, in the order of the outputs; empty: the model gives features.
        dim: width of a feature.
    """
    base, _, tag = architecture.partition(".")
    config: dict[str, Any] = {
        "architecture": base,
        "num_classes": len(names),
        "num_features": dim,
        "global_pool": "token",
        **({"label_names": list(names)} if names else {}),
        "model_args": dict(arguments),
        "pretrained_cfg": {
            **({"tag": tag} if tag else {}),
            "custom_load": False,
            "input_size": [3, p.size, p.size],
            "fixed_input_size": True,
            "interpolation": p.interpolation,
            "crop_pct": _crop_pct(p),
            "crop_mode": "center",
            "mean": list(p.mean),
            "std": list(p.std),
            "num_classes": len(names),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": HEAD,
        },
    }
    return _json(config)


def preprocessor_config(p: Preprocessing) -> bytes:
    """Return the content of `PREPROCESSOR`: shorter side, central square, mean and std."""
    resample = _RESAMPLE.get(p.interpolation, _RESAMPLE["bicubic"])
    config: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": _shorter_side(p)},
        "resample": resample,
        "do_center_crop": True,
        "crop_size": {"height": p.size, "width": p.size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
    }
    return _json(config)


def labels(classes: tuple[int, ...], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return a label for each class; one without a known name gets its id."""
    return tuple(names.get(c, "") or f"class {c}" for c in classes)


def _shorter_side(p: Preprocessing) -> int:
    return round(p.size / p.crop_pct)


def _crop_pct(p: Preprocessing) -> float:
    """Return the share from which timm, which rounds down, gets the same shorter side."""
    side = _shorter_side(p)
    if math.floor(p.size / p.crop_pct) == side:
        return p.crop_pct
    return math.floor(p.size / side * 1e6) / 1e6


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"


# --- the card -------------------------------------------------------------------------------

_SCORES: dict[Scores, str] = {
    "same": "The outputs are the scores of the federation's model.",
    "shifted": "The model decides by the nearest prototype or class mean. The classifier is that "
    "as a linear layer: its outputs are the model's scores and one number for each image, so the "
    "decisions and the softmax are the same.",
    "scaled": "The model decides by the largest cosine. The classifier is that as a linear layer: "
    "its outputs are the model's scores times the length of the image's feature, so the decisions "
    "are the same, and a softmax is not.",
    "none": "The model's classifier is no linear layer of the features, so it is not here, and the "
    "outputs are the features. The whole model: `fcil-server export --onnx model.onnx`.",
}

_CODE = """\
```python
import json
from pathlib import Path
import timm
import torch
from PIL import Image, ImageOps

about = json.loads(Path("fcil.json").read_text())
model = timm.create_model("local-dir:.", pretrained=True).eval()
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")  # upright
with torch.no_grad():
    outputs = model(prepare(photo)[None])
{result}
```
"""


def card_text(method: Method, info: TimmInfo) -> str:
    """Return the README.md of a model's folder.

    Args:
        method: of the model.
        info: its description.
    """
    headed = info.scores != "none"
    name = info.backbone.name
    meta = {
        "library_name": "timm",
        **({} if name == EMBEDDED else {"base_model": f"timm/{name}"}),
        "pipeline_tag": "image-classification" if headed else "image-feature-extraction",
        "tags": ["timm", "federated-learning", "class-incremental-learning", info.method],
    }
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in meta.items())
    merged = "Its weights are the backbone's, unchanged."
    if info.changed:
        merged = f"What was learned is merged into {len(info.changed)} of its weights."
    order = " in the order of the outputs" if headed else ""
    facts = (
        f"Backbone: {name}, whose own weights have the digest {info.backbone.digest}. {merged}",
        f"Classes: {len(info.classes)}; `{ABOUT}` has ids and names{order}.",
        _SCORES[info.scores],
        *learned_facts(info),
        f"Digest of `{WEIGHTS}` (SHA-256): {info.weights_sha256}.",
        checked_fact(info.checked),
    )
    listed = "".join(f"- {fact}\n" for fact in facts)
    result = 'print(about["names"][outputs.argmax(1).item()])' if headed else "features = outputs"
    return (
        f"---\n{front}---\n# {method.title}\n\n"
        f"Model of the run {info.run} of an fcil federation, state {info.state}, of task "
        f"{info.task}; its method is {info.method} {info.method_version} ({method.citation}).\n\n"
        f"{listed}\n## Use\n\nIn this folder, with `pip install timm pillow`:\n\n"
        f"{_CODE.format(result=result)}"
    )
