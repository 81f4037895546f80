"""Engines that can run a frozen backbone here: torch, or onnxruntime without it (torch-free).

All code that needs a backbone loads it here, and neither runtime is imported before that.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from fcil_adapters.contract import Method, registry
from fcil_adapters.resources import memory_limit
from fcil_protocol.errors import ConfigError, FcilError, MethodMismatch

Name = Literal["torch", "onnx"]

CHOICES = ("auto", *get_args(Name))

# Each of them installs a package of the same name; a custom build may be none of them.
_ONNXRUNTIMES = (
    "onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml",
    "onnxruntime-rocm", "onnxruntime-migraphx", "onnxruntime-qnn", "onnxruntime-training",
    "ort-nightly", "ort-nightly-gpu",
)  # fmt: skip
_UNKNOWN = "of unknown version"
_GPU = {"CUDAExecutionProvider", "TensorrtExecutionProvider"}


@dataclass(frozen=True)
class Engines:
    """The installed engines, as far as visible without importing them.

    Attributes:
        torch, timm, onnxruntime: their versions; empty: not installed.
        distributions: each installed onnxruntime distribution with its version.
    """

    torch: str = ""
    timm: str = ""
    onnxruntime: str = ""
    distributions: dict[str, str] = field(default_factory=dict)

    @property
    def clash(self) -> str:
        """The fault and remedy if two onnxruntime distributions are installed; else empty."""
        if len(self.distributions) < 2:
            return ""
        both = " and ".join(f"{name} {v}" for name, v in self.distributions.items())
        names = " ".join(self.distributions)
        return (
            f"{both} are both installed, but they write the same files, and what runs is a mixture "
            f"of them. Uninstall all (pip uninstall {names}), then install the one you want."
        )

    def providers(self) -> list[str]:
        """Return the providers of the installed onnxruntime, the best first; imports it.

        Raises:
            ConfigError: it is missing or broken.
        """
        from fcil_adapters.backbones.onnx_session import import_onnxruntime

        return [str(name) for name in import_onnxruntime().get_available_providers()]


def installed() -> Engines:
    """Return the installed engines; nothing is imported."""
    found = {name: _version(name) for name in _ONNXRUNTIMES}
    distributions = {name: v for name, v in found.items() if v}
    here = _is_here("onnxruntime")
    return Engines(
        torch=(_version("torch") or _UNKNOWN) if _is_here("torch") else "",
        timm=(_version("timm") or _UNKNOWN) if _is_here("timm") else "",
        onnxruntime=next(iter(distributions.values()), _UNKNOWN) if here else "",
        distributions=distributions,
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # another object has taken its place
        return False


def check_engine(engine: str) -> None:
    """Refuse an unknown engine.

    Raises:
        ConfigError: it is none of `CHOICES`.
    """
    if engine not in CHOICES:
        raise ConfigError(
            f"unknown engine {engine[:40]!r}; known are {', '.join(CHOICES)}.",
            action="Leave it at auto, which is torch if it is installed.",
        )


def choose(engine: str = "auto", *, needs_gradient: bool = False) -> Name:
    """Return the engine that a choice means here: with ``auto``, torch if it is installed.

    Raises:
        ConfigError: the needed engine is not installed, or the choice is unknown.
    """
    check_engine(engine)
    here = installed()
    if needs_gradient or engine == "torch":
        if engine == "onnx":
            raise ConfigError(
                "gradients need torch, and the engine onnx was chosen.",
                action="Choose the engine auto or torch.",
            )
        missing = [name for name in ("torch", "timm") if not getattr(here, name)]
        if missing:
            raise ConfigError(
                f"torch is needed, but {' and '.join(missing)} cannot be found here.",
                action="Install it: pip install 'fcil[client]'",
            )
        return "torch"
    if engine == "auto" and here.torch and here.timm:
        return "torch"
    if not here.onnxruntime:
        wanted = "onnxruntime" if engine == "onnx" else "torch or onnxruntime"
        raise ConfigError(
            f"{wanted} is needed to run a backbone, but cannot be found here.",
            action="Install it: pip install 'fcil[edge]', or with torch: pip install "
            "'fcil[client]'",
        )
    return "onnx"


def choose_for(method: Method, engine: str = "auto") -> Name:
    """Return the engine for a client's half of a method that needs a backbone.

    Raises:
        MethodMismatch: the method cannot run with the engines installed here, or with the chosen
            one.
        ConfigError: the choice is unknown.
    """
    check_engine(engine)
    try:
        return choose(engine, needs_gradient=not method.frozen)
    except ConfigError as error:
        raise _cannot_run(method, engine, error) from error


def check_round(method: Method, trains: bool, engine: str) -> None:
    """Check that an engine can compute a client's half of an exchange.

    Args:
        method: a method that `choose_for` accepted.
        trains: `Exchange.trains`.
        engine: as `choose` returned it.

    Raises:
        MethodMismatch: the exchange needs a gradient, which the engine cannot compute.
    """
    if trains and engine != "torch":
        raise MethodMismatch(
            f"this round of {method.name!r} trains with gradients, which needs torch; this client "
            "takes part in the method's other rounds.",
            action="To train too, install it: pip install 'fcil[client]'",
        )


def _cannot_run(method: Method, engine: str, cause: FcilError) -> MethodMismatch:
    if method.frozen:
        return MethodMismatch(
            f"method {method.name!r} needs a backbone: {cause.message}", action=cause.action
        )
    if engine == "onnx":
        return MethodMismatch(
            f"method {method.name!r} trains with gradients, which needs torch, and this client was "
            "started with --engine onnx.",
            action="Start it without --engine; torch comes with: pip install 'fcil[client]'",
        )
    return MethodMismatch(
        f"method {method.name!r} trains with gradients, which needs torch, and torch is not "
        "installed on the client.",
        action="Install it: pip install 'fcil[client]'. Without it a client can take part in: "
        f"{', '.join(frozen_methods())}.",
    )


def frozen_methods() -> list[str]:
    """Return the installed methods in which a client without torch can take part."""
    methods = []
    for name in registry.method_names():
        try:
            methods.append(registry.load_method(name))
        except ConfigError:  # the list of methods names a broken package
            continue
    return [m.name for m in methods if m.frozen or not m.needs_backbone]


def load(
    engine: str,
    name: str = "embedded",
    weights: Path | None = None,
    device: str = "auto",
    threads: int = 0,
    image_size: int | None = None,
) -> Any:
    """Load a frozen backbone.

    Args:
        engine: as `choose` returned it.
        name: ``embedded``, or a timm vision transformer.
        weights: safetensors; for onnx the exported graph, or the safetensors file next to it; torch
            takes the graph's weights as well.
        device: for torch auto, cpu, cuda or cuda:N; for onnx tensorrt as well.
        threads: of one operator, for onnx; 0: those of the process.
        image_size: side of its images in pixels; None: the model's own, or the graph's.

    Returns:
        `backbone.Backbone` or `onnx_backbone.OnnxBackbone`: both have ``info``, ``device``,
            ``description``, ``features(images)`` and ``alive``.

    Raises:
        ConfigError, DataError, CorruptFile: it cannot be loaded; the message says why.
    """
    if engine == "onnx":
        from fcil_adapters.backbones.onnx_backbone import load_onnx_backbone

        if device == "cpu" or not _GPU.intersection(installed().providers()):
            memory_limit.enforce()  # a GPU's driver maps more of main memory than it uses
        loaded = load_onnx_backbone(name, weights, device, threads, image_size)
        if loaded.runtime.device == "cpu":  # also where the GPU does not work
            memory_limit.enforce()
        return loaded
    try:
        from fcil_adapters.backbones.backbone import choose_device, load_backbone
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch cannot be used here: {str(error)[:300]}.",
            action="Install it again: pip install 'fcil[client]', or choose --engine onnx.",
        ) from error
    if weights is not None and weights.suffix == ".onnx":
        weights = weights.with_suffix(".safetensors")
    chosen = choose_device(device)
    memory_limit.enforce(chosen, memory_limit.TORCH_ROOM)  # not before torch is loaded
    return load_backbone(name, weights, chosen, image_size)
