"""Ask torch and onnxruntime what they can do, in a process that may die of it."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from fcil_adapters.backbones import engines
from fcil_client.doctor.checks.facts import EngineFacts, Gpu, Loaded, OnnxFacts, TorchFacts, Wanted
from fcil_protocol.errors import FcilError, Timeout, WorkerDied, from_code
from fcil_protocol.process.children import ChildProcess, module_command

IMPORT_S = 60.0  # for torch or onnxruntime to say what they see; a cold disk is slow
FORWARD_S = 90.0  # for a backbone to be loaded and to run: a cold disk and a small board are slow
CHILD = "fcil_client.doctor.probes.engine_child"


def look(asked: str, device: str, driver: str, *, jetson: bool) -> EngineFacts:
    """Gather the installed engines and their abilities."""
    found = installed()
    return EngineFacts(
        asked=asked,
        device=device,
        installed=found,
        torch=_ask_torch() if "torch" in found else None,
        onnx=_ask_onnx() if found.keys() - {"torch", "timm"} else None,
        driver=driver,
        jetson=jetson,
    )


def installed() -> Mapping[str, str]:
    """Return distribution -> version of all that can run a backbone, without importing any."""
    here = engines.installed()
    found = {"torch": here.torch, "timm": here.timm, **here.distributions}
    if here.onnxruntime and not here.distributions:
        found["onnxruntime"] = here.onnxruntime
    return {name: version for name, version in found.items() if version}


def _ask_torch() -> TorchFacts | FcilError:
    try:
        said = ask("torch", IMPORT_S)
    except FcilError as error:
        return error
    gpus = tuple(Gpu(str(name), int(free), int(total)) for name, free, total in said["gpus"])
    return TorchFacts(said["version"], said["cuda"], gpus, said["why_not"])


def _ask_onnx() -> OnnxFacts | FcilError:
    try:
        said = ask("onnxruntime", IMPORT_S)
    except FcilError as error:
        return error
    return OnnxFacts(said["version"], said["providers"])


def load(wanted: Wanted, engine: str, device: str) -> Loaded:
    """Load a backbone in a process of its own, whose memory is that of one engine, and time it.

    Raises:
        FcilError: it cannot be loaded.
    """
    said = ask(
        "forward",
        FORWARD_S,
        engine=engine,
        gradient=wanted.gradient,
        name=wanted.name,
        weights=wanted.weights or None,
        device=device,
        image_size=wanted.image_size,
    )
    return Loaded(
        engine=said["engine"],
        digest=said["info"]["digest"],
        size=said["info"]["preprocessing"]["size"],
        device=said["device"],
        probe=np.array(said["probe"], dtype=np.float64),
        loaded_s=said["loaded_s"],
        images_per_s=said["images_per_s"],
        peak_bytes=said["peak_bytes"],
    )


def ask(task: str, limit_s: float, **fields: Any) -> dict[str, Any]:
    """Return the answer of a child process, started for this one request.

    Raises:
        WorkerDied: the child ended, as a broken driver would make it.
        Timeout: it did not answer within ``limit_s`` seconds.
        FcilError: what it raised.
    """
    request = json.dumps({"task": task, **fields}).encode() + b"\n"
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as words:
        child = ChildProcess(module_command(CHILD), stdout=answer, stderr=words)
        try:
            child.tell(request)
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Timeout(
                f"no answer within {limit_s:.0f} s ({task}).",
                action="Look at the device and its driver; dmesg may say more.",
            ) from None
        finally:
            child.stop(0.0)
        answer.seek(0)
        said = answer.read()
        words.seek(0)
        last = words.read()[-4000:].decode(errors="replace").strip().splitlines()
    try:
        reply: dict[str, Any] = json.loads(said)
    except ValueError:
        raise _died(code, last[-1][:200] if last else "") from None
    if "fault" in reply:
        raise from_code(reply["code"], reply["fault"], reply["action"])
    return reply


def _died(code: int, last: str) -> WorkerDied:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return WorkerDied(
        f"the process that tried it {how}{f': {last}' if last else ''}.",
        action="It is the driver or the library: install them again, in versions that fit; "
        "dmesg may say more. If memory ran out, free some.",
    )
