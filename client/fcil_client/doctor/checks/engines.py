"""Lines about the engines: torch, onnxruntime, their devices and providers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fcil_client.doctor.checks.line import Line, failure, megabytes, ok, skipped, some, warning
from fcil_protocol.errors import ConfigError, WorkerError

NAMES = (
    "engine.installed", "engine.torch", "engine.onnxruntime", "engine.providers",
    "engine.clash", "engine.device",
)  # fmt: skip
_INSTALL = (
    "Install torch with `pip install 'fcil[client]'`, or without it, for methods that need no "
    "gradient, `pip install 'fcil[edge]'`."
)


@dataclass(frozen=True)
class Gpu:
    """One device that torch sees."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class TorchFacts:
    """torch's report from a process of its own.

    Attributes:
        cuda: CUDA version of the build; empty for a CPU build.
        why_not: reason why a CUDA build sees no device.
    """

    version: str
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class OnnxFacts:
    """onnxruntime's report from a process of its own.

    Attributes:
        providers: each listed one -> reason why it cannot be used; empty: it can.
    """

    version: str
    providers: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> list[str]:
        """Providers that created a session."""
        return [name for name, why in self.providers.items() if not why]


@dataclass(frozen=True)
class EngineFacts:
    """The installed engines and their capabilities here.

    Attributes:
        asked: the engine given with --engine. device: that given with --device.
        installed: distribution -> version, of torch, timm and all kinds of onnxruntime.
        torch_fault, onnx_fault: reason why it cannot be imported although it is installed.
        driver: version of NVIDIA's kernel driver; empty without one.
        jetson: the machine is a Jetson, with another NVIDIA driver.
    """

    asked: str = "auto"
    device: str = "auto"
    installed: Mapping[str, str] = field(default_factory=dict)
    torch: TorchFacts | None = None
    torch_fault: str = ""
    onnx: OnnxFacts | None = None
    onnx_fault: str = ""
    driver: str = ""
    jetson: bool = False

    @property
    def runtimes(self) -> list[str]:
        """The distributions that provide the package onnxruntime."""
        return sorted(self.installed.keys() - {"torch", "timm"})

    @property
    def torch_works(self) -> bool:
        """True if torch can run a backbone."""
        return self.torch is not None and "timm" in self.installed


def lines(facts: EngineFacts) -> list[Line]:
    """Return the lines about engines, and about the device that a client would use."""
    return [
        _installed(facts),
        _torch(facts),
        _onnxruntime(facts),
        _providers(facts),
        _clash(facts),
        _device(facts),
    ]


def _installed(facts: EngineFacts) -> Line:
    name = "engine.installed"
    found = [n for n in ("torch", "timm", *facts.runtimes) if n in facts.installed]
    wanted = {"torch": ["torch"], "onnx": ["onnxruntime"]}.get(facts.asked)
    works = (["torch"] if facts.torch_works else []) + (["onnxruntime"] if facts.onnx else [])
    if wanted and not set(wanted) & set(works):
        text = f"--engine {facts.asked} was asked for, and {wanted[0]} cannot be used here"
        return failure(name, text, _INSTALL, ConfigError.code)
    if works:
        return ok(name, ", ".join(f"{n} {facts.installed[n]}" for n in found))
    if "torch" in found and "timm" not in found:
        text = "torch is installed, and timm is not: no backbone can be made"
        return failure(name, text, "Install it: pip install timm", ConfigError.code)
    text = "neither torch nor onnxruntime can be used: no backbone can run here"
    return failure(name, text, _INSTALL, ConfigError.code)


def _torch(facts: EngineFacts) -> Line:
    name = "engine.torch"
    if "torch" not in facts.installed and facts.torch is None:
        return skipped(name, "torch is not installed")
    if facts.torch is None:
        action = "Install it again: pip install --force-reinstall torch"
        text = f"torch {facts.installed.get('torch', '')} cannot be used: {facts.torch_fault}"
        return failure(name, text, action, WorkerError.code)
    build = f"built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "a CPU build"
    driver = f", driver {facts.driver}" if facts.driver else ""
    text = f"torch {facts.torch.version}, {build}{driver}"
    gpus = [
        f"cuda:{i} {g.name}, {megabytes(g.free_bytes)} of {megabytes(g.total_bytes)} free"
        for i, g in enumerate(facts.torch.gpus)
    ]
    if gpus:
        return ok(name, f"{text}; {'; '.join(gpus)}")
    nvidia = bool(facts.driver) or facts.jetson
    if nvidia and facts.torch.cuda:
        action = (
            "Install a driver that is new enough for this CUDA version, or a torch built for an "
            "older one (https://pytorch.org says which)."
        )
        return warning(name, f"{text}; it sees no GPU: {facts.torch.why_not}", action)
    if nvidia:
        action = (
            "To compute on the GPU install a CUDA build: pip uninstall torch, then pip install "
            "torch (on a Jetson: NVIDIA's wheel)."
        )
        return warning(name, f"{text}, on a machine with a GPU", action)
    return ok(name, f"{text}; no GPU")


def _onnxruntime(facts: EngineFacts) -> Line:
    name = "engine.onnxruntime"
    if not facts.runtimes and facts.onnx is None:
        return skipped(name, "onnxruntime is not installed")
    if facts.onnx is None:
        found = ", ".join(facts.runtimes)
        action = f"Install it again: pip uninstall -y {' '.join(facts.runtimes)}, then one of them."
        text = f"{found} is installed and cannot be used: {facts.onnx_fault}"
        return failure(name, text, action, WorkerError.code)
    usable = ", ".join(n.removesuffix("ExecutionProvider") for n in facts.onnx.usable)
    kind = ", ".join(facts.runtimes) or "of an unknown distribution"
    text = f"onnxruntime {facts.onnx.version} ({kind}), providers {usable or 'none'}"
    if not facts.onnx.usable:
        action = "Install it again: pip install --force-reinstall onnxruntime"
        return failure(name, text, action, WorkerError.code)
    return ok(name, text)


def _providers(facts: EngineFacts) -> Line:
    name = "engine.providers"
    if facts.onnx is None:
        return skipped(name, "onnxruntime is not installed, or cannot be used")
    broken = [f"{n}: {why}" for n, why in facts.onnx.providers.items() if why]
    if not broken:
        return ok(name, "every provider that is listed can be used")
    action = (
        "Their libraries (CUDA, cuDNN, TensorRT) are missing or of another version than this "
        "onnxruntime-gpu needs; without them it computes on the CPU."
    )
    return warning(name, f"listed and unusable: {some(broken)}", action)


def _clash(facts: EngineFacts) -> Line:
    name = "engine.clash"
    if len(facts.runtimes) < 2:
        return skipped(name, "only one onnxruntime distribution installed")
    best = next((n for n in facts.runtimes if n != "onnxruntime"), facts.runtimes[0])
    keep = best if facts.driver or facts.jetson else "onnxruntime"
    text = (
        f"{' and '.join(facts.runtimes)} are both installed; they write the same files, and what "
        "is there is a mixture"
    )
    action = f"pip uninstall -y {' '.join(facts.runtimes)}, then pip install {keep}"
    if facts.torch_works and facts.asked != "onnx":
        return warning(name, text, action)
    return failure(name, text, action, ConfigError.code)


def _device(facts: EngineFacts) -> Line:
    name, asked = "engine.device", facts.device
    gpus = len(facts.torch.gpus) if facts.torch else 0
    on_gpu = any("CUDA" in p or "Tensorrt" in p for p in facts.onnx.usable) if facts.onnx else False
    if asked == "auto":
        if gpus and facts.asked != "onnx":
            return ok(name, "a client computes on cuda, unless --device says otherwise")
        if on_gpu and not (facts.torch_works and facts.asked != "onnx"):
            return ok(name, "a client computes on the GPU through onnxruntime")
        return ok(name, "a client computes on the CPU")
    if asked == "cpu":
        return ok(name, "a client computes on the CPU, as asked")
    kind, _, number = asked.partition(":")
    if kind == "cuda" and number.isascii() and (number.isdecimal() or not number):
        if int(number or 0) < gpus or (on_gpu and not gpus):
            return ok(name, f"a client computes on {asked}, as asked")
        text = f"--device {asked} was asked for, and {gpus} GPUs can be used here"
        return failure(name, text, "Use --device auto or cpu, or see engine.torch.", "usage")
    action = "Choose auto, cpu, cuda or cuda:N."
    return failure(name, f"there is no device {asked[:40]!r}", action, "usage")
