"""The doctor's child process: it tries what can take a whole process down.

A broken driver ends the process that touches it, so that process is this one, and the doctor
reads what it had said before. One request comes in, one answer goes out, each a line of JSON.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fcil_protocol.process.child import end_with_parent, parent_pipe, read_line

FORWARD_S = 2.0  # of passes through the backbone that are timed
BATCH = 16
# A model of one Identity, to see which providers take a session (opset 13, IR version 8).
_IDENTITY = base64.b64decode(
    "CAg6NwoQCgF4EgF5IghJZGVudGl0eRIBZ1oPCgF4EgoKCAgBEgQKAggBYg8KAXkSCgoICAESBAoCCAFCBAoAEA0="
)


def torch(_request: dict[str, Any]) -> dict[str, Any]:
    """Return torch's version, build and devices."""
    import torch

    fields: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "gpus": [],
        "why_not": "",
    }
    if not fields["cuda"]:
        return fields
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            fields["gpus"].append([torch.cuda.get_device_name(i), free, total])
    except (RuntimeError, AssertionError) as error:
        fields["why_not"] = str(error).strip().splitlines()[0][:200]
    return fields


def onnxruntime(_request: dict[str, Any]) -> dict[str, Any]:
    """Return onnxruntime's version, and for each provider why it cannot be used."""
    from fcil_adapters.backbones.onnx_session import import_onnxruntime

    ort = import_onnxruntime()
    quiet = ort.SessionOptions()
    quiet.log_severity_level = 4
    found: dict[str, str] = {}
    for name in ort.get_available_providers():
        if name == "AzureExecutionProvider":  # sends what it is given to a service: never used
            continue
        try:
            session = ort.InferenceSession(_IDENTITY, quiet, providers=[name])
            session.run(None, {"x": np.zeros(1, np.float32)})
            found[name] = "" if name in session.get_providers() else "it takes no session"
        except Exception as error:  # whatever its libraries raise: it is the finding
            found[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return {"version": ort.__version__, "providers": found}


def forward(request: dict[str, Any]) -> dict[str, Any]:
    """Load a backbone as a client would, compute the probe features and time some passes.

    Fields: ``engine``, ``gradient`` (the method trains), ``name``, ``weights`` (path or None),
    ``device``, ``image_size`` (or None).
    """
    from fcil_adapters.backbones import engines
    from fcil_adapters.backbones.probes import probe_images
    from fcil_adapters.contract.backbone_info import backbone_fields

    began = time.perf_counter()
    engine = engines.choose(request["engine"], needs_gradient=request["gradient"])
    weights = Path(request["weights"]) if request["weights"] else None
    backbone = engines.load(
        engine, request["name"], weights, request["device"], image_size=request["image_size"]
    )
    loaded_s = time.perf_counter() - began
    probe = backbone.features(probe_images(backbone.info))
    size = backbone.info.preprocessing.size
    rng = np.random.default_rng(0)
    passes, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < FORWARD_S:
        # Other images each time: the features of those it has seen are remembered.
        backbone.features(rng.integers(0, 256, (BATCH, size, size, 3), dtype=np.uint8))
        passes += 1
    return {
        "engine": engine,
        "info": backbone_fields(backbone.info),
        "device": backbone.description,
        "probe": np.asarray(probe, dtype=np.float64).tolist(),
        "loaded_s": loaded_s,
        "images_per_s": passes * BATCH / took_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
    }


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "torch": torch,
    "onnxruntime": onnxruntime,
    "forward": forward,
}


def answer(line: bytes) -> dict[str, Any]:
    """Do what a request says; what it raises is the answer."""
    from fcil_protocol.errors import FcilError, WorkerError

    request = json.loads(line)
    try:
        return _TASKS[request["task"]](request)
    except FcilError as error:
        action = error.action or type(error).default_action()
        return {"fault": error.message, "action": action, "code": error.code}
    except BaseException as error:
        text = (str(error).strip().splitlines() or [""])[0][:300]
        return {"fault": f"{type(error).__name__}: {text}", "action": "", "code": WorkerError.code}


def main() -> None:
    """Answer one request."""
    pipe = parent_pipe()
    request = read_line(pipe)
    end_with_parent(pipe)
    # Libraries print what they like: the way out is another descriptor than theirs.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        answers.write(json.dumps(answer(request)).encode() + b"\n")
    os._exit(0)  # a driver may hang or crash when it is taken down


if __name__ == "__main__":
    main()
