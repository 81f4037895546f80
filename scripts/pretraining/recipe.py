"""What decides a pre-trained backbone: sizes, terms of the loss, and schedules.

Every schedule is a function of the step, never of the clock: the same recipe on the same machine
with as many threads gives the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from fcil_protocol.errors import ConfigError

_HELD_SHARE = 4  # so many other pictures are in a step for each held one

RECIPES: dict[str, dict[str, Any]] = {
    "dino": {"dino": 1.0},
    "supervised": {"classes": 1.0},
    "joint": {"classes": 1.0, "spread": 0.05, "dino": 0.5},
    "layers": {"layers": 1.0, "classes": 0.05, "rotations": False},
    "distil": {"distil": 1.0, "area": 0.6, "colours": 0.5},
}


@dataclass(frozen=True)
class Recipe:
    """A pre-training from its first step to its last.

    Attributes:
        steps: optimiser steps; all schedules end there.
        seed: of weights, order and views.
        batch: images in a step; each is seen in several views.
        lr: largest learning rate, after `warmup` (share of the steps) of linear growth; cosine
            to zero from there.
        weight_decay: of AdamW, on matrices alone.
        clip: largest norm of all gradients.
        dino, classes, spread: weights of the terms of the loss (`terms`).
        layers: weight of the term that draws the class token to what the blocks of the starting
            weights know (`answers`).
        distil: weight of the term that draws it to a larger backbone's feature (`answers`,
            `targets`); of these two terms one at most.
        hold: weight of the term that keeps the features of held pictures at what the starting
            weights say of them (Li and Hoiem, Learning without forgetting, ECCV 2016, on
            features); a step has a quarter as many of them as of the others. 0: none are held.
        whiten: power of its spread by which each direction of the answers is divided.
        rotations: each image is turned by a quarter, and (class, turn) is what is learned:
            four times as many classes (self-supervised label augmentation, Lee et al., ICML 2020).
        smoothing: of the labels.
        area: smallest share of the picture in a large view.
        colours: strength of the changes of colours in a view; 0: none.
        small: small views of an image, for DINO; half the side, 0.1 to `area` of the picture.
        keep: share of the patches that a student's large view keeps while it trains.
        whole_after: from this share of the steps on all patches are kept.
        outputs: of DINO's head.
        momentum: of DINO's teacher at the first step; it ends at 1 (cosine).
        average: momentum of a moving mean of the weights, which then is the result instead of the
            last weights; 0: none. It takes the place of DINO's teacher.
        student_temperature, teacher_temperature: DINO's; the teacher's is reached linearly from
            0.04 after `warm_teacher` of the steps.
        centring: momentum of DINO's centre.
        precision: fp32, or bf16 (mixed).
    """

    steps: int
    seed: int = 0
    batch: int = 128
    lr: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.05
    clip: float = 1.0
    dino: float = 0.0
    classes: float = 0.0
    spread: float = 0.0
    layers: float = 0.0
    distil: float = 0.0
    hold: float = 0.0
    whiten: float = 0.5
    rotations: bool = True
    smoothing: float = 0.1
    area: float = 0.4
    colours: float = 1.0
    small: int = 4
    keep: float = 1.0
    whole_after: float = 0.9
    outputs: int = 1024
    momentum: float = 0.996
    average: float = 0.0
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    warm_teacher: float = 0.2
    centring: float = 0.9
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 2:
            raise ConfigError(
                f"a pre-training has at least 1 step of at least 2 images, got {self.steps} steps "
                f"of {self.batch}.",
                action="Give larger numbers.",
            )
        terms = (self.dino, self.classes, self.spread, self.layers, self.distil)
        if min(terms) < 0 or not sum(terms) or (self.layers and self.distil):
            raise ConfigError(
                "of the weights dino, classes, spread, layers and distil none may be negative, "
                "one must be above 0, and one of the last two is 0, got "
                f"{', '.join(f'{t:g}' for t in terms)}.",
                action="Choose a recipe: " + ", ".join(RECIPES) + ".",
            )
        if not (self.hold >= 0 and math.isfinite(self.hold)):
            raise ConfigError(f"hold is a weight, at least 0 and finite, got {self.hold:g}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ConfigError(f"the learning rate is above 0 and finite, got {self.lr:g}.")
        if not (0 < self.keep <= 1 and 0 < self.area <= 1):
            raise ConfigError(
                f"keep and area are shares above 0 and up to 1, got {self.keep:g} and "
                f"{self.area:g}."
            )
        if not (0 <= self.colours <= 1 and 0 <= self.whiten <= 1):
            raise ConfigError(
                f"colours and whiten are 0 to 1, got {self.colours:g} and {self.whiten:g}."
            )
        if not 0 <= self.average < 1 or (self.average and self.dino):
            raise ConfigError(
                f"average is at least 0, below 1, and 0 in a recipe with DINO, got "
                f"{self.average:g}."
            )

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, found: dict[str, Any]) -> Recipe:
        """Make a recipe of what a checkpoint says; names that are not known are an error."""
        known = {f.name for f in fields(cls)}
        if set(found) != known:
            raise ConfigError(
                f"a recipe has the fields {', '.join(sorted(known))}; "
                f"different here: {', '.join(sorted(known ^ set(found)))}.",
                action="Start again in another folder.",
            )
        return cls(**found)

    @classmethod
    def of(cls, kind: str, steps: int, **given: Any) -> Recipe:
        """Make one of `RECIPES`, with some fields as they are given."""
        return cls(**{"steps": steps, **RECIPES[kind], **given})

    @property
    def terms(self) -> dict[str, Any]:
        """Return the fields by which one of `RECIPES` differs from another."""
        names = sorted({name for fields_ in RECIPES.values() for name in fields_})
        return {name: getattr(self, name) for name in names}

    @property
    def held(self) -> int:
        """Return how many held pictures a step has."""
        return max(1, self.batch // _HELD_SHARE) if self.hold else 0

    @property
    def large(self) -> int:
        """Return how many large views an image has."""
        return 2 if self.dino or self.spread else 1

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * _cosine((step - warm) / max(1, self.steps - warm))

    def teacher_momentum(self, step: int) -> float:
        """Return how much of the teacher stays after a step.

        By a cosine from `momentum` to 1; a mean of the weights (`average`) is over fewer steps in
        the beginning, so that it forgets the random ones.
        """
        if self.average:
            return min(self.average, (1 + step) / (10 + step))
        return 1 - (1 - self.momentum) * _cosine(step / self.steps)

    def sharpness(self, step: int) -> float:
        """Return the teacher's temperature."""
        warm = self.warm_teacher * self.steps
        share = min(1.0, step / warm) if warm else 1.0
        return 0.04 + (self.teacher_temperature - 0.04) * share

    def patches_kept(self, step: int) -> float:
        """Return the share of the patches that a large view keeps."""
        return 1.0 if step >= self.whole_after * self.steps else self.keep


def _cosine(share: float) -> float:
    """Fall from 1 at 0 to 0 at 1."""
    return (1 + math.cos(math.pi * share)) / 2
