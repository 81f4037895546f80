"""The loop: pictures in, checkpoints out, progress to the terminal."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fcil_adapters.backbones.backbone import VisionTransformer, backbone_digest
from fcil_adapters.backbones.known import EMBEDDED_PREPROCESSING, EMBEDDED_SIZE
from fcil_protocol.errors import ConfigError, DataError
from pretraining import checkpoint
from pretraining.checkpoint import Story
from pretraining.learner import Learner, batches, held_rows
from pretraining.pictures import Pictures
from pretraining.recipe import Recipe

CHECKPOINT = "checkpoint.safetensors"
_TELL_S = 10.0
_LOOKED_AT = 2000  # pictures, evenly over all, from which the answers' directions are taken
_MEASURED_STEPS = (
    3  # by which --minutes tells how many steps there will be; the first is thrown away
)


@dataclass(frozen=True)
class Sitting:
    """How one call trains: nothing here changes the numbers.

    Attributes:
        save_s: seconds between checkpoints.
        until: stop before this step, saved; None: the recipe's end.
        tell: where lines of progress go.
    """

    folder: Path
    save_s: float = 60.0
    until: int | None = None
    tell: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def progress(self, rows: range, things: str) -> Iterator[int]:
        """Yield the rows; tell every ten seconds how many of the things are done."""
        start = told = self.clock()
        for row in rows:
            now = self.clock()
            if now - told >= _TELL_S:
                told = now
                speed = max(row - rows.start, 1) / (now - start)
                self.tell(
                    f"{things}: {row:,} of {rows.stop:,}, {speed:.1f}/s, "
                    f"{(rows.stop - row) / speed / 60:.0f} minutes left"
                )
            yield row


def model_of(width: int, depth: int, heads: int) -> dict[str, Any]:
    """Return the sizes of a transformer for the embedded backbone's pictures.

    Raises:
        ConfigError: there is none of these sizes.
    """
    if min(width, depth, heads) < 1 or width % heads:
        raise ConfigError(
            f"width, depth and heads are above 0 and the width is a multiple of the heads, got "
            f"{width}, {depth} and {heads}."
        )
    return {
        "img_size": EMBEDDED_PREPROCESSING.size, "patch_size": 4, "embed_dim": width,
        "depth": depth, "num_heads": heads, "mlp_ratio": 4, "num_classes": 0,
    }  # fmt: skip


EMBEDDED_MODEL = model_of(*EMBEDDED_SIZE)


def new_model(model: dict[str, Any], seed: int) -> Any:
    """Return a transformer with random weights of a seed."""
    torch.manual_seed(seed)
    return VisionTransformer(**model)


def begin(
    recipe: Recipe, pictures: Pictures, model: dict[str, Any], weights: dict[str, Any] | None,
    device: str,
) -> tuple[Learner, Story]:  # fmt: skip
    """Return a learner before its first step.

    Args:
        weights: to start from; None: random ones of the recipe's seed.

    Raises:
        DataError: the weights are of another transformer, or the pictures are too few for a step.
        ConfigError: the recipe needs a teacher's features and there are none, or the reverse.
    """
    if bool(recipe.distil) != (pictures.targets is not None):
        raise ConfigError(
            "the recipe distil, and no other, learns from the features of a teacher.",
            action="Compute them with scripts/pretrain targets, then give --targets FOLDER in "
            "place of --data.",
        )
    if bool(recipe.hold) != (pictures.held is not None) or (recipe.hold and weights is None):
        raise ConfigError(
            "held pictures need weights that know them, and the weight hold of the recipe.",
            action="Give --hold together with --start.",
        )
    if len(pictures.images) < recipe.batch:
        raise DataError(
            f"a step takes {recipe.batch} pictures, there are {len(pictures.images)}.",
            action="Give a smaller --batch.",
        )
    vit = new_model(model, recipe.seed)
    if weights is not None:
        try:
            vit.load_state_dict(weights)
        except RuntimeError as error:
            raise DataError(
                f"the weights to start from are of another transformer "
                f"({' '.join(str(error).split())[:160]})."
            ) from error
    story = Story(
        recipe=recipe,
        step=0,
        start="" if weights is None else backbone_digest(vit.state_dict()),
        data=pictures.digest,
        classes=pictures.classes,
        images=len(pictures.images),
        seconds=0.0,
        cpu_seconds=0.0,
        machine=f"{_machine(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        model=model,
        teacher=pictures.teacher,
        held=0 if pictures.held is None else len(pictures.held),
    )
    learner = _learner(vit, recipe, pictures, device)
    if recipe.layers or recipe.distil:
        stride = max(1, len(pictures.images) // _LOOKED_AT)
        images, _, targets = _batch(pictures, torch.arange(0, len(pictures.images), stride))
        learner.look(images, targets)
    return learner, story


def _learner(vit: Any, recipe: Recipe, pictures: Pictures, device: str) -> Learner:
    width = 0 if pictures.targets is None else pictures.targets.shape[2]
    return Learner(vit, len(pictures.classes), recipe, device, width)


def _batch(pictures: Pictures, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return copies of the images, labels and targets of some rows."""
    index = rows.numpy()
    targets = None if pictures.targets is None else torch.from_numpy(pictures.targets[index])
    return (
        torch.from_numpy(pictures.images[index]),
        torch.from_numpy(pictures.labels[index]),
        targets,
    )


def _held(pictures: Pictures, learner: Learner) -> Tensor | None:
    """Return copies of the held images of a learner's next step."""
    if pictures.held is None:
        return None
    rows = held_rows(len(pictures.held), learner.recipe, learner.step)
    return torch.from_numpy(pictures.held[rows.numpy()])


def resume(folder: Path, pictures: Pictures, device: str) -> tuple[Learner, Story]:
    """Return the learner of a checkpoint.

    Raises:
        DataError: there is none, or these are other pictures than it learned from.
        CorruptFile: it is damaged.
    """
    tensors, story = checkpoint.load(folder / CHECKPOINT)
    if story.data != pictures.digest:
        raise ConfigError(
            f"{folder} was begun with other pictures or targets ({story.images} in "
            f"{len(story.classes)} classes, digest {story.data[:12]}; given: "
            f"{len(pictures.images)} in {len(pictures.classes)}, {pictures.digest[:12]}).",
            action="Give the same --data or --targets, and --hold, or begin in another folder.",
        )
    vit = new_model(story.model, story.recipe.seed)
    learner = _learner(vit, story.recipe, pictures, device)
    learner.restore(tensors, story.step)
    return learner, story


def train(learner: Learner, story: Story, pictures: Pictures, how: Sitting) -> Story:
    """Train to the recipe's end, or to a signal; saved whenever this returns."""
    last = min(how.until or story.recipe.steps, story.recipe.steps)
    watch = _Watch(story, how)
    with _Interrupt() as interrupt:
        for rows in batches(len(pictures.images), story.recipe, learner.step):
            if learner.step >= last or interrupt.asked:
                break
            watch.losses = learner.learn(*_batch(pictures, rows), _held(pictures, learner))
            watch.look(learner)
    return watch.save(learner)


def steps_for(learner: Learner, pictures: Pictures, minutes: float) -> int:
    """Return how many steps fit the minutes, by the time of a few that are thrown away."""
    taken = 0.0
    for number, rows in enumerate(batches(len(pictures.images), learner.recipe, 0)):
        start = time.monotonic()
        learner.learn(*_batch(pictures, rows), _held(pictures, learner))
        taken += (time.monotonic() - start) * (number > 0)
        if number == _MEASURED_STEPS:
            break
    return max(1, round(minutes * 60 / max(taken / _MEASURED_STEPS, 1e-6)))


class _Watch:
    """Time, progress and checkpoints of one sitting."""

    def __init__(self, story: Story, how: Sitting) -> None:
        self.losses: dict[str, float] = {}
        self._story, self._how = story, how
        self._start, self._cpu = how.clock(), time.process_time()
        self._told = self._saved = self._start

    def look(self, learner: Learner) -> None:
        now = self._how.clock()
        if now - self._told >= _TELL_S:
            self._told = now
            self._how.tell(self._line(learner.step, now))
        if now - self._saved >= self._how.save_s:
            self.save(learner)
            self._saved = self._how.clock()

    def save(self, learner: Learner) -> Story:
        now = self._how.clock()
        story = replace(
            self._story,
            step=learner.step,
            seconds=self._story.seconds + now - self._start,
            cpu_seconds=self._story.cpu_seconds + time.process_time() - self._cpu,
        )
        checkpoint.save(self._how.folder / CHECKPOINT, learner.tensors(), story)
        return story

    def _line(self, step: int, now: float) -> str:
        done = step - self._story.step
        left = (now - self._start) / done * (self._story.recipe.steps - step)
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in self.losses.items())
        return (
            f"step {step} of {self._story.recipe.steps}: {losses}; "
            f"{done / (now - self._start):.2f} steps/s, {left / 60:.0f} minutes left"
        )


class _Interrupt:
    """Ctrl-C and SIGTERM end the loop after the step that is under way."""

    asked = False

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self.asked = True


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU"
