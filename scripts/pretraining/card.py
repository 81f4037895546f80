"""The card of a backbone: what it is, how it came to be, and what its frozen features are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone, backbone_digest, load_backbone, wrap_backbone
from fcil_adapters.backbones.known import EMBEDDED, EMBEDDED_PREPROCESSING
from fcil_adapters.backbones.probes import probe_features
from fcil_adapters.export.backbone_file import write_graph, write_weights
from fcil_adapters.images.decoding import preprocess
from fcil_protocol.errors import ConfigError
from fcil_protocol.storage.atomic_files import write_atomic
from pretraining import transfer
from pretraining.checkpoint import Story, load
from pretraining.pictures import Pictures
from pretraining.training import CHECKPOINT, new_model
from pretraining.transfer import Features

TEST_PER_CLASS = 20  # of CIFAR-100: 2,000 pictures
OWN = (500, 100)  # of each pre-training class: train and test
_DIGITS = 1400  # for training, of 1,797
COLUMNS = (
    ("nearest class mean", transfer.nearest_mean),
    ("20-NN", transfer.neighbours),
    ("linear ridge", transfer.linear),
    ("ridge on 2,000 random relu features", transfer.relu_ridge),
)


@dataclass(frozen=True)
class Row:
    """Per cent of the test pictures, in the order of `COLUMNS`."""

    data: str
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class Blend:
    """A mean of a result's weights with those that it began from.

    It keeps more of what the earlier weights know of other pictures than the result does, and
    loses little of what was learned (Wortsman et al., Robust fine-tuning of zero-shot models,
    CVPR 2022).

    Attributes:
        share: of the result, between 0 and 1.
        start: the weights that it began from.
    """

    share: float
    start: Mapping[str, Tensor]

    def of(self, result: Mapping[str, Tensor], begun: str) -> dict[str, Tensor]:
        """Return the mean.

        Args:
            result: the weights of the result.
            begun: digest of the weights that it began from.

        Raises:
            ConfigError: these are others.
        """
        digest = backbone_digest(dict(self.start))
        if digest != begun:
            raise ConfigError(
                f"the checkpoint began from {f'the weights {begun[:12]}' if begun else 'chance'}, "
                f"not from {digest[:12]}.",
                action="Name the weights that it began from: --start FILE",
            )
        return {
            name: self.share * tensor + (1 - self.share) * self.start[name]
            for name, tensor in result.items()
        }


def backbone_of(folder: Path, blend: Blend | None = None) -> tuple[Backbone, Story]:
    """Return the result of a checkpoint as a frozen backbone: its student, or the mean of it.

    Args:
        folder: of the checkpoint.
        blend: weights to mix the result with.

    Raises:
        DataError, CorruptFile: there is no whole checkpoint.
        ConfigError: it did not begin from the weights of the blend.
    """
    tensors, story = load(folder / CHECKPOINT)
    vit = new_model(story.model, story.recipe.seed)
    prefix = "teacher.vit." if story.recipe.average else "student.vit."
    vit.load_state_dict(
        {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    )
    if blend is not None:
        vit.load_state_dict(blend.of(vit.state_dict(), story.start))
    return wrap_backbone(vit, EMBEDDED, EMBEDDED_PREPROCESSING), story


def measure(
    backbone: Backbone, own: tuple[Pictures, Pictures] | None, cifar100: tuple[Pictures, Pictures],
    per_class: int,
) -> list[Row]:  # fmt: skip
    """Measure frozen transfer, and accuracy on the pre-training classes if they are given.

    Args:
        own, cifar100: train and test part.
        per_class: training pictures of each class of CIFAR-100; the first by name.
    """
    train, test = cifar100
    parts = [
        (
            f"CIFAR-100, {per_class} train and {TEST_PER_CLASS} test images per class",
            train.part(0, per_class),
            test.part(0, TEST_PER_CLASS),
        ),
        ("scikit-learn digits, 1,400 train and 397 test images", *digits()),
    ]
    if own is not None:
        words = f"pre-training classes, {OWN[0]} train and {OWN[1]} test images per class"
        parts.append((words, own[0].part(0, OWN[0]), own[1].part(0, OWN[1])))
    return [row(words, Features.of(backbone.features, *both)) for words, *both in parts]


def row(data: str, features: Features) -> Row:
    return Row(data, tuple(function(features) for _, function in COLUMNS))


def digits() -> tuple[Pictures, Pictures]:
    """Return scikit-learn's digits: the first 1,400 of a fixed order, and the rest."""
    from sklearn.datasets import load_digits  # brings scipy: 2 s

    raw = load_digits()
    grey = (raw.images * 255 / 16).astype(np.uint8)
    images = np.stack([preprocess(Image.fromarray(g), EMBEDDED_PREPROCESSING) for g in grey])
    order = np.random.default_rng(0).permutation(len(images))
    names = tuple(map(str, range(10)))

    def chosen(rows: Any) -> Pictures:
        return Pictures(images[rows], raw.target[rows].astype(np.int64), names, "")

    return chosen(order[:_DIGITS]), chosen(order[_DIGITS:])


def embed(backbone: Backbone, folder: Path) -> None:
    """Write the files that ship: weights, their digest, the graph, and features of the probes.

    Raises:
        ConfigError: package onnx or onnxscript is missing.
        StorageError: they cannot be written.
    """
    weights = write_weights(backbone, folder / f"{EMBEDDED}.safetensors")
    digest = f"{backbone.info.digest}\n".encode("ascii")
    write_atomic(folder / f"{EMBEDDED}.digest", digest, mode=0o644)
    write_graph(backbone, weights, folder / f"{EMBEDDED}.onnx")
    np.save(folder / f"{EMBEDDED}.probe.npy", probe_features(backbone))


def write_card(
    path: Path,
    backbone: Backbone,
    story: Story | None,
    rows: list[Row],
    blend: Blend | None = None,
) -> None:
    write_atomic(path, card(backbone, story, rows, blend).encode(), mode=0o644)


def card(
    backbone: Backbone, story: Story | None, rows: list[Row], blend: Blend | None = None
) -> str:
    """Return the card in Markdown."""
    info = backbone.info
    side = info.preprocessing.size
    parameters = sum(p.numel() for p in backbone.module.parameters())
    facts = {
        "architecture": f"timm `VisionTransformer`, {side} x {side} pixels, width {info.dim}, "
        f"{info.depth} blocks, {info.heads} heads, MLP {info.mlp_dim}, no head; "
        f"{parameters:,} parameters",
        "input": "RGB, normalised with mean = std = 0.5 (of values in [0, 1])",
        "feature": f"class token after the final norm, {info.dim} numbers",
        **(_origin(story) if story else {}),
        **({"blend": _mixed(blend)} if blend else {}),
        "digest": f"`{info.digest}`",
    }
    names = [name for name, _ in COLUMNS]
    table = [["data", *names], ["---"] * (1 + len(names))]
    table += [[r.data, *(f"{n:.1f}" for n in r.numbers)] for r in rows]
    words = "Per cent of the test images that simple classifiers on its frozen features get right."
    which = "Images are the first of each class by name, digits in a fixed order."
    return (
        f"# {info.name}\n\n| | |\n|---|---|\n"
        + "".join(f"| {name} | {text} |\n" for name, text in facts.items())
        + f"\n{words} {which}\n\n"
        + "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    )


def _mixed(blend: Blend) -> str:
    return (
        f"{blend.share:g} of the result and {1 - blend.share:g} of the weights that it began from "
        "(Wortsman et al., CVPR 2022)"
    )


def _origin(story: Story) -> dict[str, str]:
    r = story.recipe
    numbers = ", ".join(f"{k} {v}" for k, v in r.to_fields().items() if k != "steps")
    names = ", ".join(story.classes[:12]) + (", ..." if len(story.classes) > 12 else "")
    whole = "" if story.step == r.steps else f" of {r.steps:,}, not at its end"
    passes = story.step * r.batch / story.images
    wall, cpu = story.seconds / 60, story.cpu_seconds / 60
    return {
        "begun from": f"the weights `{story.start}`" if story.start else "random weights",
        "pre-training data": f"{story.images:,} images of {len(story.classes)} classes ({names}), "
        f"digest `{story.data[:16]}`{' with the held ones' if story.held else ''}",
        **({"teacher": story.teacher} if story.teacher else {}),
        **({"held": _held(story)} if story.held else {}),
        "recipe": f"{story.step:,} steps{whole} ({passes:.2f} passes): {numbers}",
        "time": f"{wall:.1f} minutes, {cpu:.1f} of the processor; {story.machine}",
    }


def _held(story: Story) -> str:
    return f"features of {story.held:,} other pictures stay as the weights that it began from say"


def shipped() -> Backbone:
    """Return the backbone that ships, to be measured by the same table."""
    return load_backbone()
