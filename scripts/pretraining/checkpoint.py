"""Checkpoints of a pre-training: one safetensors file, replaced as a whole.

Its header says the recipe, the step and which pictures; there is no state of random generators,
since all chance is a function of seed and step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fcil_protocol.errors import CorruptFile, DataError
from fcil_protocol.storage.atomic_files import write_atomic
from pretraining.recipe import Recipe

_FORMAT = "fcil pretraining 1"


@dataclass(frozen=True)
class Story:
    """What a checkpoint says of itself beside the numbers.

    Attributes:
        step: steps taken.
        start: digest of the weights that it began with; "" for random ones.
        data: digest of the pictures, and of the held ones; `classes` and `images` say what the
            former are.
        seconds, cpu_seconds: of work so far, over all sittings.
        model: sizes of the transformer, for timm.
        teacher: its name, image size and digest, for people; "": none beside the weights.
        held: number of the pictures whose features stay.
    """

    recipe: Recipe
    step: int
    start: str
    data: str
    classes: tuple[str, ...]
    images: int
    seconds: float
    cpu_seconds: float
    machine: str
    model: dict[str, Any]
    teacher: str
    held: int

    def to_text(self) -> str:
        return json.dumps({**vars(self), "recipe": self.recipe.to_fields()})

    @classmethod
    def from_text(cls, text: str) -> Story:
        found = json.loads(text)
        found["recipe"] = Recipe.from_fields(found["recipe"])
        found["classes"] = tuple(found["classes"])
        return cls(**found)


def save(path: Path, tensors: dict[str, Tensor], story: Story) -> None:
    """Write a checkpoint; the one before stays until this one is whole on disk."""
    plain = {name: t.detach().to("cpu").contiguous().clone() for name, t in tensors.items()}
    header = {"format": _FORMAT, "story": story.to_text()}
    write_atomic(path, safetensors.torch.save(plain, header))


def load(path: Path) -> tuple[dict[str, Tensor], Story]:
    """Read a checkpoint.

    Raises:
        DataError: there is none.
        CorruptFile: it is damaged, or something else.
    """
    if not path.is_file():
        raise DataError(f"there is no checkpoint {path}.", action="Train first: scripts/pretrain.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise ValueError(f"its format is {header.get('format')!r}, not {_FORMAT!r}")
            story = Story.from_text(header["story"])
            return {name: file.get_tensor(name) for name in file.keys()}, story  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptFile(
            f"the checkpoint {path} cannot be used ({str(error)[:160]}).",
            action="Remove it to start from scratch, or replace it with a copy.",
        ) from error
