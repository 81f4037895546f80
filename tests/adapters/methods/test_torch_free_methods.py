"""The methods without a gradient, in processes in which torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A client's whole part: the learner on features that numpy computes, then the composed model.
CLIENT = """
import sys
sys.modules["torch"] = sys.modules["timm"] = sys.modules["torchvision"] = None
import numpy as np
from fcil_adapters.contract import BackboneInfo, Context, Preprocessing, State, TaskInfo
from fcil_adapters.contract.registry import load_half, load_method, make_hparams
from fcil_protocol.payloads.payload import Payload

class Engine:
    def features(self, images):
        return images.mean(axis=(1, 2)).astype(np.float32)

class Images:
    labels = np.array([4, 4, 7, 7])
    def __len__(self):
        return 4
    def take(self, index):
        pixels = np.full((4, 2, 2, 3), 9, np.uint8)
        pixels[[0, 1], ..., 0] = pixels[[2, 3], ..., 1] = 200
        return pixels[index]

name, options = {case}
method = load_method(name)
info = BackboneInfo("numpy", 3, 1, 1, 1, Preprocessing(2, (0.5,) * 3, (0.5,) * 3), "0" * 64)
ctx = Context(kind="train", task=TaskInfo(0, (4, 7)), round=0, rounds=1, backbone_info=info,
              hparams=make_hparams(method, options), backbone=Engine())
seed = {{"projection": Payload({{"seed": np.arange(4)}})}}
_, sent = load_half(method.learner).run(ctx, State(), seed, Images())
(exchange,) = method.exchanges(ctx.hparams, info)
dims = method.dims(ctx.hparams, info, ctx.task)
assert exchange.upload.check(sent, dims) + exchange.check(sent, ctx.task) == []
head = {{n: np.eye(2, 3, dtype=np.float32) for n in ("weight", "mean")}}
head |= {{"bias": np.zeros(2, np.float32), "classes": np.array([4, 7]), "count": np.array([2, 2])}}
given = {{"current": Payload(head)}} | (seed if name == "analytic" else {{}})
model = load_half(method.model).compose(ctx, given, Engine())
best = model.logits(Images().take(np.arange(4))).argmax(1).tolist()
for half in {halves}:
    load_half(getattr(method, half))
print(best, sys.modules["torch"])
"""
CASES = {
    "fedncm": ("fedncm", {}),
    "analytic": ("analytic", {"features": "linear"}),
    "gaussian_head": ("gaussian_head", {"cov_rank": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_client_learns_and_predicts_without_torch(name):
    """So does the server, but for the head that is trained on draws."""
    halves = () if name == "gaussian_head" else ("aggregator",)
    code = CLIENT.format(case=CASES[name], halves=halves)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[0, 0, 1, 1] None", "")
