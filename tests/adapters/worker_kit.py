"""Small pieces for tests of the workers: image folders, contexts and a worker without a process."""

import io
from types import SimpleNamespace

import numpy as np
from PIL import Image

from fcil_adapters.contract import Context, TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import load_method, make_hparams
from fcil_adapters.worker.loop import Call, context_fields
from fcil_protocol.payloads.payload import pack, unpack


def png(seed, brightness=128, size=32):
    rng = np.random.default_rng(seed)
    values = np.clip(rng.normal(brightness, 10, (size, size, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def fill(root, part, cls, seeds, brightness=128):
    folder = root / part / cls
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (folder / f"{seed}.png").write_bytes(png(seed, brightness))
    return root


def context(method, kind="train", classes=(0, 1), past=(), options=None, info=NO_BACKBONE, **more):
    return Context(
        kind=kind,
        task=TaskInfo(len(past) // 2, tuple(classes), tuple(past)),
        round=0,
        rounds=1,
        hparams=make_hparams(load_method(method), options or {}),
        backbone_info=info,
        seed=(1993,),
        **more,
    )


def fields_of(method, ctx, **more):
    backbone = {"name": "embedded", "weights": None, "device": "cpu"}
    return {"method": method, "context": context_fields(ctx), "backbone": backbone, **more}


class Direct:
    """Calls a worker's operations in this process, through bytes as the pipe would carry them."""

    def __init__(self, worker):
        self.operations = worker.operations()
        self.sent = []

    def __call__(self, op, fields, payloads=(), answers=None):
        replies = iter(answers or ())
        pipe = SimpleNamespace(send=self.sent.append, recv=lambda: next(replies))
        blobs = [p if isinstance(p, bytes) else pack(p) for p in payloads]
        reply, out = self.operations[op](Call(fields, blobs, pipe))
        return reply, [unpack(pack(p)) for p in out]
