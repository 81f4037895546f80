"""The frozen vision transformer: loading, digest, preprocessing, adapter views, CLS features.

A loaded backbone is never modified. Methods work on views: new module trees over the very same
parameter tensors, in which single Linears are replaced. So one process serves many clients with one
copy of the weights.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcil_adapters.backbones.feature_cache import FeatureMemory
from fcil_adapters.backbones.known import (
    EMBEDDED,
    EMBEDDED_DIGEST,
    EMBEDDED_NAMES,
    EMBEDDED_PREPROCESSING,
    EMBEDDED_SIZE,
    embedded_file,
)
from fcil_adapters.backbones.precision import Precision, check_choice
from fcil_adapters.backbones.torch_imports import ensure_torchvision, without_compiler
from fcil_adapters.backbones.weights import HEAD, digest_at, weights_digest
from fcil_adapters.contract import BackboneInfo, Preprocessing
from fcil_adapters.contract.backbone_info import MOST_PIXELS
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_protocol.errors import ConfigError, CorruptFile, DataError

with without_compiler():
    ensure_torchvision()  # before timm, which needs it

    import timm
    from timm.data.config import resolve_model_data_config
    from timm.models.vision_transformer import Block, VisionTransformer

# Smaller row counts take other kernels, whose last bits differ (measured: below 16).
_FEWEST_ROWS = 64


class Backbone:
    """A loaded, frozen vision transformer without head.

    Attributes:
        info: its description that needs no torch.
        mean, std: of its input's channels, (1, 3, 1, 1).
        module: the timm model, in eval mode, no parameter requires a gradient; read only.
        device: name of the device that holds it.
        alive: called at the beginning of every pass; a worker uses it to report progress to its
            daemon.
        memory: its cached features of plain images, by `info.digest`; they live as long as the
            backbone, unless an experiment stores them.
        precision: that of forward passes in `training`; all others are float32.
        positions: the position embedding of the weights' file, where the module has a resampled
            one; None: they are the same.
        variant: the last result of `with_weights`.
    """

    def __init__(
        self, module: Any, info: BackboneInfo, device: str, positions: Tensor | None = None
    ) -> None:
        if device.startswith("cuda"):
            # Torch's default rounds convolutions, here the patch embedding, to TF32's ten bits;
            # features would be 3e-4 away from those of a CPU or of onnxruntime.
            torch.backends.cudnn.allow_tf32 = False
        self.module = module.requires_grad_(requires_grad=False).eval().to(device)
        self.info = info
        self.device = device
        self.positions = positions
        self.alive: Callable[[], None] = _nobody
        self.memory = FeatureMemory()
        self.precision: Precision = "fp32"
        self.variant: Backbone | None = None
        p = info.preprocessing
        self.mean = torch.tensor(p.mean, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(p.std, device=device).view(1, 3, 1, 1)

    def __repr__(self) -> str:
        return f"Backbone({self.info.name}, {self.device}, {self.info.digest[:12]})"

    @property
    def description(self) -> str:
        """The device and library that compute it, for people."""
        trains = "" if self.precision == "fp32" else f"trains in {self.precision}"
        if self.device.startswith("cuda"):
            facts = [torch.cuda.get_device_name(self.device)]
        else:
            threads = torch.get_num_threads()
            facts = [platform.machine(), f"{threads} thread{'' if threads == 1 else 's'}"]
        facts += [f"torch {torch.__version__}", trains]
        return f"{self.device} ({', '.join(filter(None, facts))})"

    def view(self) -> Any:
        """Return a new module tree over the same parameter tensors, to attach adapters to."""
        shared = [*self.module.parameters(), *self.module.buffers()]
        return _copied(self.module, {id(tensor): tensor for tensor in shared})

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return a copy of one weight, by its name in the state dict."""
        return to_numpy(self.module.get_parameter(name)).astype(np.float32)

    def with_weights(self, weights: Mapping[str, NDArray[np.float32]], digest: str) -> Backbone:
        """Return a backbone with some weights replaced, which shares the others.

        It has a memory of features of its own, shares the store, and replaces the last one made
        here (`variant`).

        Args:
            weights: by their names in the state dict.
            digest: of its description.
        """
        view = self.view()
        for name, array in weights.items():
            owner, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(to_torch(array, self.device), requires_grad=False)
            setattr(view.get_submodule(owner), leaf, parameter)
        made = Backbone(view, replace(self.info, digest=digest), self.device, self.positions)
        made.alive = self.alive
        made.memory.store = self.memory.store  # its keys contain the digest
        self.variant = made
        return made

    def choose_precision(self, choice: str) -> None:
        """Set the precision of training that a choice means on this device.

        Raises:
            ConfigError: the choice is unknown.
        """
        self.precision = precision_of(choice, self.device)

    def training(self) -> AbstractContextManager[Any]:
        """Return the context for a training step's forward pass: mixed precision, if chosen."""
        return mixed(self.precision, self.device)

    def normalise(self, images: NDArray[np.uint8] | Tensor) -> Tensor:
        """Turn preprocessed or augmented images into the module's input.

        Args:
            images: (B, S, S, 3) in [0, 255], uint8 or float.

        Returns:
            (B, 3, S, S) float32 on the backbone's device.
        """
        self.alive()
        pixels = torch.tensor(images) if isinstance(images, np.ndarray) else images
        x = pixels.to(self.device, torch.float32).permute(0, 3, 1, 2)  # (B, 3, S, S)
        return (x / 255 - self.mean) / self.std

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the frozen CLS features (B, d) of preprocessed images (B, S, S, 3)."""
        with torch.no_grad():
            return to_numpy(cls_features(self.module, self.normalise(images)))


def _nobody() -> None:
    return None


def load_backbone(
    name: str = "embedded",
    weights: Path | None = None,
    device: str = "cpu",
    image_size: int | None = None,
) -> Backbone:
    """Load a frozen backbone.

    Args:
        name: ``embedded`` (the small transformer that ships with the package) or the name of
            any timm vision transformer with a class token.
        weights: a local safetensors file of exactly this model; head tensors are ignored.
            None: the embedded weights, or the weights that timm's hub offers for the name.
        device: a torch device name.
        image_size: side of its images in pixels; the position embedding is resampled for another
            size than the model's own. None: the model's own.

    Raises:
        DataError: the size, the name or the weights cannot be used; the message says what to give.
        ConfigError: this machine has no such device.
        CorruptFile: the embedded weights are not those that were shipped.
    """
    _check_device(device)
    if name in EMBEDDED_NAMES:
        module, preprocessing, name = _embedded(), EMBEDDED_PREPROCESSING, EMBEDDED
        if weights is None:
            _load_weights(module, embedded_file(".safetensors"))
            if backbone_digest(module.state_dict()) != EMBEDDED_DIGEST:
                raise CorruptFile(
                    "the embedded backbone's weights differ from those that were shipped.",
                    action="Install the package again.",
                )
    else:
        module = _timm_model(name, pretrained=weights is None)
        preprocessing = _timm_preprocessing(name, module)
    if weights is not None:
        _load_weights(module, weights)
    return wrap_backbone(module, name, preprocessing, device, image_size)


def wrap_backbone(
    module: Any,
    name: str,
    preprocessing: Preprocessing,
    device: str = "cpu",
    image_size: int | None = None,
) -> Backbone:
    """Freeze a timm vision transformer and describe it.

    Raises:
        DataError: it is not a plain vision transformer with its class token as feature, or cannot
            have images of this size.
    """
    _check_structure(module, name)
    digest, positions = backbone_digest(module.state_dict()), None
    if image_size not in (None, preprocessing.size):
        positions = _resize(module, name, image_size)
        digest = digest_at(digest, image_size)
        preprocessing = replace(preprocessing, size=image_size)
    block = module.blocks[0]
    info = BackboneInfo(
        name=name,
        dim=int(module.embed_dim),
        depth=len(module.blocks),
        heads=int(block.attn.num_heads),
        mlp_dim=int(block.mlp.fc1.out_features),
        preprocessing=preprocessing,
        digest=digest,
    )
    return Backbone(module, info, device, positions)


def _resize(module: Any, name: str, image_size: int) -> Tensor:
    """Set another image size; return the position embedding of the model's own."""
    patch = int(module.patch_embed.patch_size[0])
    if image_size % patch or not 0 < image_size <= MOST_PIXELS:
        below = min(max(1, image_size // patch), MOST_PIXELS // patch - 1) * patch
        raise DataError(
            f"the backbone {name!r} cannot have images of {image_size} pixels: it divides them "
            f"into patches of {patch}.",
            action=f"Choose a multiple of {patch} up to {MOST_PIXELS}, such as {below} or "
            f"{below + patch}.",
        )
    own: Tensor = module.pos_embed.detach()
    module.set_input_size(img_size=(image_size, image_size))
    return own


def backbone_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over sorted (name, shape, float32 little-endian bytes), in hex."""
    return weights_digest(
        (name, state[name].detach().to("cpu", torch.float32).contiguous().numpy())
        for name in sorted(state)
    )


def cls_features(view: Any, x: Tensor) -> Tensor:
    """Return the class token after the final norm for input (B, 3, S, S): (B, d)."""
    features: Tensor = view.forward_head(leading_tokens(view, x), pre_logits=True)
    return features


def leading_tokens(view: Any, x: Tensor, least: int = 1) -> Tensor:
    """Return the class token, and perhaps some after it, after the final norm: (B, n, d).

    Like timm's ``forward_features``, except that the last block's MLP, which processes one token at
    a time, skips tokens that have no reader; the first ``least`` are read.
    """
    if type(view).forward_features is not VisionTransformer.forward_features:
        return view.forward_features(x)  # type: ignore[no-any-return]
    tokens = view.norm_pre(view.patch_drop(view._pos_embed(view.patch_embed(x))))  # noqa: SLF001
    *first, last = view.blocks
    for block in first:
        tokens = block(tokens)
    count: int = max(view.num_prefix_tokens, least)
    if not torch.compiler.is_exporting():  # a graph fits every batch
        count = max(count, -(-_FEWEST_ROWS // max(len(tokens), 1)))
    normed: Tensor = view.norm(_leading(last, tokens, count))
    return normed


def _leading(block: Any, tokens: Tensor, count: int) -> Tensor:
    """Return a block's output for the first ``count`` tokens, or for all."""
    if type(block) is not Block or block._forward_hooks:  # noqa: SLF001  a hook needs all tokens
        return block(tokens)  # type: ignore[no-any-return]
    attended = block.drop_path1(block.ls1(block.attn(block.norm1(tokens))))
    tokens = (tokens + attended)[:, :count]
    out: Tensor = tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
    return out


def _embedded() -> Any:
    width, depth, heads = EMBEDDED_SIZE
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=4,
        num_classes=0,
    )  # fmt: skip


def choose_device(name: str) -> str:
    """Return the torch device that a choice means here: with ``auto``, a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_device(device: str) -> None:
    if device == "tensorrt":
        raise ConfigError(
            "TensorRT is a device of onnxruntime, and this is torch.",
            action="Choose --engine onnx, or the device cuda.",
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"the device {device!r} cannot be used: {str(error).splitlines()[0][:200]}",
            action="Choose 'cpu', or a device that torch sees on this machine.",
        ) from error


def _timm_model(name: str, *, pretrained: bool) -> Any:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose a name of timm.list_models()."
        raise DataError(f"timm has no model {name[:80]!r}.", action=hint)
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0)
    except Exception as error:
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"the model {name!r} could not be made by timm: {cause[0][:200]}.",
            action="Without access to timm's hub, give `weights = FILE` (safetensors).",
        ) from error


def _timm_preprocessing(name: str, module: Any) -> Preprocessing:
    config = resolve_model_data_config(module)
    channels, height, width = config["input_size"]
    if channels != 3 or height != width:
        raise DataError(
            f"the model {name!r} expects input {config['input_size']}; only square RGB works.",
            action="Choose another backbone.",
        )
    r, g, b = (float(v) for v in config["mean"])
    sr, sg, sb = (float(v) for v in config["std"])
    return Preprocessing(
        size=int(height),
        mean=(r, g, b),
        std=(sr, sg, sb),
        interpolation=str(config["interpolation"]),
        crop_pct=float(config["crop_pct"]),
    )


def _check_structure(module: Any, name: str) -> None:
    """Refuse models to which the adapters cannot be attached, before any work."""
    usable = (
        isinstance(module, VisionTransformer)
        and module.cls_token is not None
        and module.global_pool == "token"
        and all(_plain_block(block) for block in module.blocks)
    )
    if not usable:
        raise DataError(
            f"the model {name!r} is not a plain vision transformer with a class-token feature.",
            action="Choose a timm ViT such as 'vit_base_patch16_224.dino'.",
        )


def _plain_block(block: Any) -> bool:
    qkv = getattr(getattr(block, "attn", None), "qkv", None)
    fc1 = getattr(getattr(block, "mlp", None), "fc1", None)
    return isinstance(qkv, nn.Linear) and isinstance(fc1, nn.Linear)


def _load_weights(module: Any, path: Path) -> None:
    try:
        loaded = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(
            f"the weights file {path} cannot be read as safetensors: {str(error)[:200]}.",
            action="Give the path of a safetensors file of this model.",
        ) from error
    state = {k: v for k, v in loaded.items() if not k.startswith(HEAD)}
    wanted: dict[str, Tensor] = module.state_dict()
    faults = [f"missing {n}" for n in sorted(wanted.keys() - state.keys())]
    faults += [f"unexpected {n}" for n in sorted(state.keys() - wanted.keys())]
    faults += [
        f"{n}: expected shape {tuple(wanted[n].shape)}, got {tuple(state[n].shape)}"
        for n in sorted(wanted.keys() & state.keys())
        if wanted[n].shape != state[n].shape
    ]
    if faults:
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise DataError(
            f"the weights file {path} does not fit the model: {listed}.",
            action="Give the weights of exactly this model.",
        )
    module.load_state_dict(state, strict=True)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return what `copy.deepcopy` returns, in a fifth of its time for a tree of modules.

    Nearly all that it visits are empty dictionaries of hooks, and numbers.
    """
    if id(module) in memo or hasattr(type(module), "__deepcopy__"):
        return copy.deepcopy(module, memo)
    made = memo[id(module)] = module.__class__.__new__(module.__class__)
    attributes = vars(made)
    for name, value in vars(module).items():
        if name == "_modules":
            children = value.items()
            copied: Any = {k: None if m is None else _copied(m, memo) for k, m in children}
        elif isinstance(value, dict | list | set) and not value:
            copied = value.copy()
        elif value is None or isinstance(value, bool | int | float | str):
            copied = value
        else:
            copied = copy.deepcopy(value, memo)
        attributes[name] = copied
    return made


# --- precision ----------------------------------------------------------------------------------


def precision_of(choice: str, device: str) -> Precision:
    """Return the precision that a choice means on a device.

    ``auto``: fp32, as long as no accuracy with ``amp`` has been measured on a GPU. ``amp``: bf16 on
    processors, some of which emulate it, and on GPUs that compute with it; else fp16 with scaled
    losses.

    Raises:
        ConfigError: the choice is unknown.
    """
    check_choice(choice)
    if choice != "amp":
        return "fp32"
    if not device.startswith("cuda"):
        return "bf16"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def mixed(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Return the context in which a training step's forward pass runs."""
    if precision == "fp32":
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.partition(":")[0], dtype)
