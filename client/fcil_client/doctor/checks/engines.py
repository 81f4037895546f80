"""Checks of what computes: torch, onnxruntime, their devices and providers, and the backbone."""

from __future__ import annotations

import numpy as np

from fcil_adapters.backbones.probes import TOLERANCE, compare_probes
from fcil_client.doctor.checks.facts import (
    BackboneFacts,
    EngineFacts,
    Loaded,
    OnnxFacts,
    Skip,
)
from fcil_client.doctor.checks.findings import (
    Finding,
    failure,
    megabytes,
    of_error,
    ok,
    skipped,
    some,
    warning,
)
from fcil_client.doctor.checks.register import of_facts
from fcil_protocol.errors import BackboneMismatch, ConfigError, FcilError, UsageError, WorkerError

SLOW_PASS_S = 600.0  # a pass over all images that takes longer is worth a warning
_INSTALL = (
    "Install torch with `pip install 'fcil[client]'`, or without it, for methods that need no "
    "gradient, `pip install 'fcil[edge]'`."
)

check = of_facts(lambda facts: facts.engines)


@check("engine.installed", "a library that can run a backbone")
def installed(facts: EngineFacts) -> Finding:
    works = ["torch"] * facts.torch_works + ["onnxruntime"] * isinstance(facts.onnx, OnnxFacts)
    wanted = {"torch": "torch", "onnx": "onnxruntime"}.get(facts.asked)
    if wanted and wanted not in works:
        text = f"--engine {facts.asked} was asked for, and {wanted} cannot be used here"
        return failure(text, _INSTALL, ConfigError)
    if works:
        found = [n for n in ("torch", "timm", *facts.runtimes) if n in facts.installed]
        return ok(", ".join(f"{n} {facts.installed[n]}" for n in found))
    if "torch" in facts.installed and "timm" not in facts.installed:
        text = "torch is installed, and timm is not: no backbone can be made"
        return failure(text, "Install it: pip install timm", ConfigError)
    text = "neither torch nor onnxruntime can be used: no backbone can run here"
    return failure(text, _INSTALL, ConfigError)


@check("engine.torch", "torch, its build, and the devices that it sees")
def torch(facts: EngineFacts) -> Finding:
    torch = facts.torch
    if torch is None:
        return skipped("torch is not installed")
    if isinstance(torch, FcilError):
        text = f"torch {facts.installed.get('torch', '')} cannot be used: {torch.message}"
        return failure(text, "Install it again: pip install --force-reinstall torch", WorkerError)
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "a CPU build"
    text = f"torch {torch.version}, {build}{f', driver {facts.driver}' if facts.driver else ''}"
    gpus = [
        f"cuda:{i} {g.name}, {megabytes(g.free_bytes)} of {megabytes(g.total_bytes)} free"
        for i, g in enumerate(torch.gpus)
    ]
    if gpus:
        return ok(f"{text}; {'; '.join(gpus)}")
    if not facts.driver and not facts.jetson:
        return ok(f"{text}; no GPU")
    if torch.cuda:
        return warning(
            f"{text}; it sees no GPU: {torch.why_not}",
            "Install a driver that is new enough for this CUDA version, or a torch built for an "
            "older one (https://pytorch.org says which).",
        )
    return warning(
        f"{text}, on a machine with a GPU",
        "To compute on the GPU install a CUDA build: pip uninstall torch, then pip install "
        "torch (on a Jetson: NVIDIA's wheel).",
    )


@check("engine.onnxruntime", "onnxruntime and its providers")
def onnxruntime(facts: EngineFacts) -> Finding:
    onnx, found = facts.onnx, ", ".join(facts.runtimes)
    if onnx is None:
        return skipped("onnxruntime is not installed")
    if isinstance(onnx, FcilError):
        text = f"{found} is installed and cannot be used: {onnx.message}"
        names = " ".join(facts.runtimes)
        remedy = f"Install it again: pip uninstall -y {names}, then one of them."
        return failure(text, remedy, WorkerError)
    usable = ", ".join(n.removesuffix("ExecutionProvider") for n in facts.usable) or "none"
    text = f"onnxruntime {onnx.version} ({found or 'of an unknown distribution'}), "
    text += f"providers {usable}"
    if not facts.usable:
        remedy = "Install it again: pip install --force-reinstall onnxruntime"
        return failure(text, remedy, WorkerError)
    return ok(text)


@check("engine.providers", "providers that are listed and cannot be used")
def providers(facts: EngineFacts) -> Finding:
    if not isinstance(facts.onnx, OnnxFacts):
        return skipped("onnxruntime is not installed, or cannot be used")
    broken = [f"{n}: {why}" for n, why in facts.onnx.providers.items() if why]
    if not broken:
        return ok("every provider that is listed can be used")
    return warning(
        f"listed and unusable: {some(broken)}",
        "Their libraries (CUDA, cuDNN, TensorRT) are missing or of another version than this "
        "onnxruntime-gpu needs; without them it computes on the CPU.",
    )


@check("engine.clash", "two onnxruntime distributions installed over each other")
def clash(facts: EngineFacts) -> Finding:
    if len(facts.runtimes) < 2:
        return skipped("only one onnxruntime distribution installed")
    best = next((n for n in facts.runtimes if n != "onnxruntime"), facts.runtimes[0])
    keep = best if facts.driver or facts.jetson else "onnxruntime"
    text = (
        f"{' and '.join(facts.runtimes)} are both installed; they write the same files, so the "
        "installed ones are a mixture"
    )
    remedy = f"pip uninstall -y {' '.join(facts.runtimes)}, then pip install {keep}"
    if facts.torch_works and facts.asked != "onnx":
        return warning(text, remedy)
    return failure(text, remedy, ConfigError)


@check("engine.device", "the device that a client would compute on")
def device(facts: EngineFacts) -> Finding:
    asked, gpus = facts.device, len(facts.gpus)
    on_gpu = any("CUDA" in p or "Tensorrt" in p for p in facts.usable)
    if asked == "auto":
        if gpus and facts.asked != "onnx":
            return ok("a client computes on cuda, unless --device says otherwise")
        if on_gpu and not (facts.torch_works and facts.asked != "onnx"):
            return ok("a client computes on the GPU through onnxruntime")
        return ok("a client computes on the CPU")
    if asked == "cpu":
        return ok("a client computes on the CPU, as asked")
    kind, _, number = asked.partition(":")
    if kind == "cuda" and number.isascii() and (number.isdecimal() or not number):
        if int(number or 0) < gpus or (on_gpu and not gpus):
            return ok(f"a client computes on {asked}, as asked")
        text = f"--device {asked} was asked for, and {gpus} GPUs can be used here"
        return failure(text, "Use --device auto or cpu, or see engine.torch.", UsageError)
    text = f"there is no device {asked[:40]!r}"
    return failure(text, "Choose auto, cpu, cuda or cuda:N.", UsageError)


# --- the backbone ---------------------------------------------------------------------------

backbone = of_facts(lambda facts: facts.backbone)


def _loaded(facts: BackboneFacts) -> Loaded:
    if not facts.expected.needed:
        raise Skip("no backbone is needed")
    if isinstance(facts.loaded, FcilError):
        raise Skip("the backbone could not be loaded")
    if isinstance(facts.loaded, Skip):
        raise facts.loaded
    return facts.loaded


@backbone("backbone.which", "the backbone, and the source of its name")
def which(facts: BackboneFacts) -> Finding:
    if not facts.expected.needed:
        return ok(f"the method uses no backbone ({facts.expected.source})")
    return ok(f"{facts.expected.name}, {facts.expected.source}")


@backbone("backbone.digest", "its weights are the expected ones")
def digest(facts: BackboneFacts) -> Finding:
    if isinstance(facts.loaded, FcilError):
        return of_error(facts.loaded)
    found, wanted = _loaded(facts).digest, facts.expected.digest
    if found == wanted:
        return ok(f"its weights are the expected ones ({wanted[:12]})")
    text = f"its weights have the digest {found[:12]}"
    if not wanted:
        return ok(text)
    return failure(
        f"{text}, expected was {wanted[:12]}",
        "Use the weights file that the server uses: --weights FILE",
        BackboneMismatch,
    )


@backbone("backbone.features", "this device computes the same features as others")
def features(facts: BackboneFacts) -> Finding:
    loaded, text = _loaded(facts), "features of the shipped images"
    how = f"with {loaded.engine} on {loaded.device}"
    if not np.isfinite(loaded.probe).all():
        remedy = "Check the driver, or use --device cpu."
        return failure(f"{text} are not numbers {how}", remedy, BackboneMismatch)
    if facts.reference is None or loaded.digest != facts.expected.digest:
        return ok(f"{text} are finite {how}; the server compares them when the client joins")
    error = compare_probes(loaded.probe, np.asarray(facts.reference, dtype=np.float64))
    text += f" differ by {error:.1g} relative {how}"
    if error <= TOLERANCE:
        return ok(f"{text}; {TOLERANCE:g} is allowed")
    return failure(
        f"{text}, allowed is {TOLERANCE:g}",
        "The server would refuse them. Check that it computes in float32, and try --device cpu.",
        BackboneMismatch,
    )


@backbone("backbone.speed", "images per second, and the time for one pass over the images here")
def speed(facts: BackboneFacts) -> Finding:
    loaded = _loaded(facts)
    text = f"{loaded.images_per_s:,.0f} images/s on {loaded.device}, "
    text += f"loaded in {loaded.loaded_s:.1f} s"
    if not facts.images:
        return ok(text)
    pass_s = facts.images / loaded.images_per_s
    took = f"{pass_s / 60:.0f} minutes" if pass_s >= 90 else f"{pass_s:.0f} s"
    text += f": one pass over the {facts.images:,} training images takes about {took}"
    if pass_s <= SLOW_PASS_S:
        return ok(text)
    return warning(
        text,
        "A round with a method that trains makes several passes: raise the server's [round] "
        "deadline_s, choose a method without a gradient, or use a GPU.",
    )
