"""The LoRA of a PEFT adapter, read as the first LoRA of a run (torch-free).

An adapter may come from anywhere. It is accepted only if the run's LoRA can be exactly that:
places, ranks and base must fit, and each fault is one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fcil_adapters.contract import BackboneInfo
from fcil_adapters.export.folder import ABOUT
from fcil_adapters.export.peft_adapter import CONFIG, HEAD, PREFIX, WEIGHTS
from fcil_adapters.toolkit.lora.tensors import PLACES, AdaptedLinear, module_shape
from fcil_protocol.errors import DataError
from fcil_protocol.payloads.schema import TensorSpec

F32 = NDArray[np.float32]

_MOST_JSON = 1 << 20
_MOST_BYTES = 1 << 30
_NAME = re.compile(
    re.escape(PREFIX) + r"(blocks\.(\d{1,4})\.(\w+)\.(\w+))\.lora_([AB])(?:\.default)?\.weight"
)
# What makes a layer compute something else than W + alpha / r B A.
_PLAIN = {"bias": "none"} | dict.fromkeys(
    (
        "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "layer_replication",
        "target_parameters", "alora_invocation_tokens", "arrow_config", "kasa_config",
    ),
    False,
)  # fmt: skip
# Each other way (PiSSA, OLoRA, CorDA, LoftQ, ...) changes the base's weights.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterStart:
    """An adapter as the LoRA of a run.

    Attributes:
        tensors: ``lora.<place>.A`` (s, in) and ``.B`` (out, s), s at most the run's rank, so that
            the run's scale times B A is the adapter's change.
        checked: the fact by which the base model was compared: ``digest``, ``name`` or ``nothing``.
        ignored: names of other modules that the adapter brings, such as a head.
    """

    tensors: Mapping[str, F32]
    checked: str
    ignored: tuple[str, ...]


def read_start(
    folder: Path, places: Collection[str], *, rank: int, scale: float, info: BackboneInfo
) -> AdapterStart:
    """Read an adapter for a run's LoRA.

    Args:
        folder: with `CONFIG` and `WEIGHTS`.
        places: those that the run adapts (`lora.tensors`).
        rank: of the run's LoRA.
        scale: factor of the run's products.
        info: the run's backbone.

    Raises:
        DataError: it cannot be read, or the run's LoRA cannot be this; the message says why.
    """
    config = _read_json(folder, CONFIG)
    _check_kind(folder, config)
    checked = _check_base(folder, config, info)
    layers, ignored = _layers(folder)
    found: dict[str, F32] = {}
    for (block, linear), (A, B) in layers.items():
        name = f"blocks.{block}.{linear.owner}.{linear.name}"
        factor = _scaling(config, name, len(A)) / scale
        for module, (down, up) in _modules(folder, name, linear, places, block, A, B, info).items():
            if len(down) > rank:
                raise DataError(
                    f"the adapter {folder} has rank {len(down)} at {name} for {module}, and "
                    f"method.rank is {rank}.",
                    action=f"Set method.rank to {len(down)} or more.",
                )
            found[f"lora.{block}.{module}.A"] = down
            found[f"lora.{block}.{module}.B"] = scaled = (up * factor).astype(np.float32)
            if np.abs(scaled).max(initial=0) > TensorSpec.max_abs:
                raise DataError(
                    f"the adapter {folder} has a lora_B at {name} that exceeds "
                    f"{TensorSpec.max_abs:g} times its alpha / r: no client would accept it.",
                    action="Give an adapter that was trained to smaller weights.",
                )
    return AdapterStart(found, checked, ignored)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        _refuse_special(path)
        with path.open("rb") as file:
            text = file.read(_MOST_JSON + 1)
        if len(text) > _MOST_JSON:
            raise ValueError("it is too large")
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError("it is no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)[:100]
        raise DataError(
            f"{path} cannot be read as the description of a PEFT adapter: {why}.",
            action="Give a folder that PEFT or fcil-server export --peft has written.",
        ) from error
    return fields


def _refuse_special(path: Path) -> None:
    """Refuse a pipe or a device, whose reading may never end; a link to a file is one."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    others = [key for key, plain in _PLAIN.items() if config.get(key) and config[key] != plain]
    if config.get("init_lora_weights") not in _BEGINNINGS:
        others.append("init_lora_weights")
    if kind != "LORA" or others:
        what = f"{others[0]} = {config[others[0]]!r}" if kind == "LORA" else f"peft_type {kind!r}"
        raise DataError(
            f"the adapter {folder} has {str(what)[:100]}; expected plain LoRA, which fcil's "
            "methods train.",
            action="Give an adapter of PEFT's LoraConfig without these.",
        )


def _check_base(folder: Path, config: Mapping[str, Any], info: BackboneInfo) -> str:
    """Compare the base: by the digest that an export states, else by its name."""
    action = "Set run.backbone (and run.weights) to the adapter's base, or give another adapter."
    if (folder / ABOUT).exists():
        backbone = _read_json(folder, ABOUT).get("backbone")
        digest = backbone.get("digest") if isinstance(backbone, dict) else None
        if digest != info.digest:
            raise DataError(
                f"the adapter {folder} is of a backbone with digest {str(digest)[:12]}; the run's "
                f"{info.name} has {info.digest[:12]}.",
                action=action,
            )
        return "digest"
    base = config.get("base_model_name_or_path")
    if not base:
        return "nothing"
    if str(base).rpartition("/")[2] != info.name:
        raise DataError(
            f"the adapter {folder} is of the base model {str(base)[:100]!r}; the run's is "
            f"{info.name!r}.",
            action=action,
        )
    return "name"


def _layers(
    folder: Path,
) -> tuple[dict[tuple[int, AdaptedLinear], tuple[F32, F32]], tuple[str, ...]]:
    """Return A and B of each Linear, and the other modules that the file has."""
    path = folder / WEIGHTS
    try:
        _refuse_special(path)
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it has more than 1 GiB")
        tensors = safetensors.numpy.load_file(path)
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read as safetensors in float32 or float16: {str(error)[:100]}.",
            action="Save the adapter in float32 with PEFT's save_pretrained.",
        ) from error
    linears = {(linear.owner, linear.name): linear for linear in PLACES}
    pairs: dict[tuple[int, AdaptedLinear], dict[str, F32]] = {}
    ignored = set()
    for name, values in tensors.items():
        if name.startswith(f"{PREFIX}{HEAD}."):
            ignored.add(HEAD)
            continue
        match = _NAME.fullmatch(name)
        linear = linears.get((match[3], match[4])) if match else None
        if match is None or linear is None:
            raise DataError(
                f"the adapter {folder} has a tensor {name[:100]!r}; expected LoRA on attn.qkv, "
                "attn.proj, mlp.fc1 or mlp.fc2 of timm's blocks.",
                action="Train it on timm's model of the run's backbone.",
            )
        wide = np.asarray(values, dtype=np.float32)
        if wide.ndim != 2:
            raise DataError(
                f"the adapter {folder} has an array of shape {wide.shape} in {name}; expected a "
                "matrix.",
                action="Give an adapter of linear layers, as PEFT's save_pretrained writes it.",
            )
        if not np.isfinite(wide).all() or np.abs(wide).max(initial=0) > TensorSpec.max_abs:
            raise DataError(f"the adapter {folder} holds NaN, infinity or huge numbers in {name}.")
        pairs.setdefault((int(match[2]), linear), {})[match[5]] = wide
    whole = {key: (pair["A"], pair["B"]) for key, pair in pairs.items() if len(pair) == 2}
    if len(whole) != len(pairs) or not whole:
        raise DataError(f"the adapter {folder} lacks a lora_A or a lora_B, or has none at all.")
    return whole, tuple(sorted(ignored))


def _modules(
    folder: Path,
    name: str,
    linear: AdaptedLinear,
    places: Collection[str],
    block: int,
    A: F32,
    B: F32,
    info: BackboneInfo,
) -> dict[str, tuple[F32, F32]]:
    """Return the pair of each module of the run that a Linear's pair changes.

    Of a slice of qkv it has those ranks alone whose columns of B are not zero there.
    """
    own = [m for m in (linear.name, *linear.thirds) if f"{block}.{m}" in places]
    slices = linear.slices(own) if own else (linear.name,)
    out, width = module_shape(slices[0], info)
    if A.ndim != 2 or B.ndim != 2 or (A.shape[1], len(B), B.shape[1]) != (
        width, out * len(slices), len(A),
    ):  # fmt: skip
        raise DataError(
            f"the adapter {folder} has factors {A.shape} and {B.shape} at {name}; the backbone "
            f"{info.name} needs (r, {width}) and ({out * len(slices)}, r).",
            action="Give an adapter of the run's backbone.",
        )
    found = {}
    for module, up in zip(slices, np.split(B, len(slices)), strict=True):
        used = np.abs(up).max(axis=0, initial=0) > 0 if len(slices) > 1 else np.ones(len(A), bool)
        if not used.any():
            continue
        if module in own:
            found[module] = (A[used], up[:, used])
        else:
            raise DataError(
                f"the adapter {folder} changes {name} ({module} of block {block}), which this run "
                "does not adapt.",
                action="Adapt it too (method.blocks, method.modules), or give another adapter.",
            )
    return found


def _scaling(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return alpha / r of a layer, as PEFT computes it: the first pattern that fits counts.

    To PEFT a pattern is a regular expression; only names are accepted here.
    """
    alpha = config.get("lora_alpha", 8)
    divisor = rank**0.5 if config.get("use_rslora") else rank
    try:
        patterns = dict(config.get("alpha_pattern") or {})
        if not all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns):
            raise ValueError("alpha_pattern has more than names")
        fits = (value for p, value in patterns.items() if f".{name}".endswith(f".{p}"))
        scaling = float(next(fits, alpha)) / divisor
        if not abs(scaling) <= TensorSpec.max_abs:
            raise ValueError("it is not finite")
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"the adapter states no usable lora_alpha for {name}: {str(error)[:100]}."
        ) from error
    return scaling
