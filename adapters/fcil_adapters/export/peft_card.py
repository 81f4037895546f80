"""The model card of an exported adapter: its description, and its use (torch-free)."""

from __future__ import annotations

import json

from fcil_adapters.backbones.known import EMBEDDED
from fcil_adapters.contract import Method
from fcil_adapters.export.folder import ABOUT, checked_fact, learned_facts
from fcil_adapters.export.peft_adapter import AdapterInfo

_SCORES = {
    "same": "The outputs of the head are the scores of the federation's model.",
    "shifted": "The model decides by the nearest prototype or class mean. The head is that as a "
    "linear layer: its outputs are the model's scores and one number for each image, so the "
    "decisions and the softmax are the same.",
    "scaled": "The model decides by the largest cosine. The head is that as a linear layer: its "
    "outputs are the model's scores times the length of the image's feature, so the decisions are "
    "the same, and a softmax is not.",
    "none": "The model's head is no linear layer of the features, so it is not in the adapter, "
    "which gives the features alone. The whole model: `fcil-server export --onnx model.onnx`.",
}

_CODE = """\
```python
import json
from pathlib import Path
{imports}import timm
import torch
from peft import PeftModel
from PIL import Image, ImageOps

about = json.loads(Path("fcil.json").read_text())
base = {base}
model = PeftModel.from_pretrained(base, ".").eval()
p = about["preprocessing"]
prepare = timm.data.create_transform(
    input_size=(3, p["size"], p["size"]), interpolation=p["interpolation"],
    crop_pct=p["crop_pct"], mean=p["mean"], std=p["std"])
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")  # upright
with torch.no_grad():
    outputs = model(prepare(photo)[None])
{result}
```
"""
# fcil brings these weights, and timm has no such model.
_EMBEDDED_BASE = """\
fcil_adapters.backbones.backbone.load_backbone("embedded", image_size={size}).module
base.reset_classifier({classes})"""


def card_text(method: Method, info: AdapterInfo) -> str:
    """Return the README.md of an adapter's folder.

    Args:
        method: of the model.
        info: its description.
    """
    headed = info.scores != "none"
    name = info.backbone.name
    meta = {
        "library_name": "peft",
        **({} if name == EMBEDDED else {"base_model": f"timm/{name}"}),
        **({"pipeline_tag": "image-classification"} if headed else {}),
        "tags": ["lora", "federated-learning", "class-incremental-learning", info.method],
    }
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in meta.items())
    named = 'print(about["names"][outputs.argmax(1).item()])'
    code = _CODE.format(
        imports="import fcil_adapters.backbones.backbone\n" if name == EMBEDDED else "",
        base=_base(info),
        result=named if headed else "features = outputs",
    )
    facts = (
        f"Base model: {name}; its weights must have the digest {info.backbone.digest}.",
        f"Classes: {len(info.classes)}; `{ABOUT}` has ids and names in the order of the outputs.",
        _SCORES[info.scores],
        _ranks(info),
        *learned_facts(info),
        checked_fact(info.checked),
    )
    listed = "".join(f"- {fact}\n" for fact in facts)
    return (
        f"---\n{front}---\n# {method.title}\n\n"
        f"LoRA of the run {info.run} of an fcil federation, state {info.state}, of task "
        f"{info.task}; its method is {info.method} {info.method_version} ({method.citation}).\n\n"
        f"{listed}\n## Use\n\nIn this folder, with `pip install peft timm pillow`:\n\n{code}"
    )


def _base(info: AdapterInfo) -> str:
    classes = len(info.classes) if info.scores != "none" else 0
    if info.backbone.name == EMBEDDED:
        return _EMBEDDED_BASE.format(classes=classes, size=info.preprocessing.size)
    return (
        f'timm.create_model("{info.backbone.name}", pretrained=True, num_classes={classes}, '
        f"img_size={info.preprocessing.size})"
    )


def _ranks(info: AdapterInfo) -> str:
    least, most = min(info.ranks.values()), max(info.ranks.values())
    span = f"Ranks: {least}" if least == most else f"Ranks: {least} to {most}"
    own = (
        "The run's own factors (of q and v, of several tasks, of residuals) stand side by side as "
        "one pair of a higher rank."
    )
    if not info.factored:
        return f"{span}. {own}"
    return (
        f"{span}. {own} In {len(info.factored)} of {len(info.ranks)} layers a pair is a singular "
        "value decomposition of the sum, which has a dense part or more ranks than the matrix."
    )
