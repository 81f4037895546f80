"""The command line of `scripts/pretrain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from fcil_adapters.backbones.backbone import backbone_digest, load_backbone
from fcil_adapters.backbones.known import EMBEDDED, EMBEDDED_NAMES, EMBEDDED_SIZE, embedded_file
from fcil_adapters.contract.backbone_info import MOST_PIXELS
from fcil_protocol.errors import ConfigError, DataError, FcilError
from fcil_protocol.storage.atomic_files import DirectoryLock, storage_errors
from pretraining.checkpoint import Story, load
from pretraining.learner import Learner
from pretraining.pictures import Pictures, check_disjoint, read_pictures
from pretraining.recipe import RECIPES, Recipe
from pretraining.targets import compute, read_targets
from pretraining.training import (
    CHECKPOINT,
    EMBEDDED_MODEL,
    Sitting,
    begin,
    model_of,
    resume,
    steps_for,
    train,
)

# Fields of the recipe that have options; each recipe may have another value for them.
_CHANGES = (
    "batch", "lr", "seed", "keep", "area", "colours", "whiten", "average", "precision",
)  # fmt: skip
_SIZES = {"width": "embed_dim", "depth": "depth", "heads": "num_heads"}  # options -> timm's names
_INTERRUPTED = 130  # as shells report Ctrl-C
_LARGEST = 1e9  # of all that is counted or timed here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what goes wrong is one sentence and an exit code."""
    try:
        args = _parser().parse_args(arguments)
        args.run(args)
    except FcilError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/pretrain")
    commands = parser.add_subparsers(required=True)
    _targets_parser(commands)
    _train_parser(commands)
    draw = commands.add_parser("glyphs", help="draw letters like scanned digits, for --hold")
    draw.set_defaults(run=_glyphs)
    draw.add_argument("--out", type=Path, required=True, help="zip to write")
    draw.add_argument("--count", type=_count, default=12_000)
    draw.add_argument("--seed", type=int, default=0)
    show = commands.add_parser("card", help="measure, and write the files in the form that ships")
    show.set_defaults(run=_card)
    show.add_argument("--out", type=Path, help="folder of a checkpoint; none: the one that ships")
    show.add_argument("--data", type=Path, help="the pre-training data, with test/<class>/*")
    show.add_argument("--cifar100", type=Path, required=True)
    show.add_argument(
        "--blend", type=float, metavar="SHARE",
        help="mix this share of the result with the weights that it began from (--start)",
    )  # fmt: skip
    show.add_argument("--start", help="'embedded' or a safetensors file; for --blend")
    show.add_argument("--per-class", type=_count, default=100)
    show.add_argument("--threads", type=_count)
    return parser


def _targets_parser(commands: Any) -> None:
    ask = commands.add_parser("targets", help="compute a teacher's features of pictures, once")
    ask.set_defaults(run=_targets)
    ask.add_argument(
        "--data", type=Path, action="append", required=True,
        help="folder or zip of train/<class>/* or <class>/*; several times for several",
    )  # fmt: skip
    ask.add_argument("--out", type=Path, required=True, help="folder of the targets")
    ask.add_argument("--teacher-name", required=True, help="'embedded' or a name of timm's")
    ask.add_argument("--teacher", type=Path, help="its weights, a safetensors file")
    ask.add_argument("--teacher-size", type=_count, help="side of its images; default: its own")
    ask.add_argument("--mirror", action="store_true", help="of the mirrored pictures too")
    ask.add_argument(
        "--size", type=_count, default=EMBEDDED_MODEL["img_size"],
        help="side at which the pictures are kept for the student",
    )  # fmt: skip
    ask.add_argument("--allow-overlap", action="store_true", help="with classes of CIFAR-100")
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--threads", type=_count)


def _train_parser(commands: Any) -> None:
    go = commands.add_parser("train", help="begin, or go on where the folder's checkpoint is")
    go.set_defaults(run=_train)
    source = go.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder or zip of train/<class>/*")
    source.add_argument("--targets", type=Path, help="folder of targets, for the recipe distil")
    go.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    go.add_argument("--recipe", choices=RECIPES, help="default: dino, or distil with --targets")
    go.add_argument(
        "--hold", type=Path,
        help="folder or zip of pictures whose features stay as the weights of --start say them",
    )  # fmt: skip
    length = go.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=_above_zero, help="passes over the pictures")
    length.add_argument("--steps", type=int)
    length.add_argument(
        "--minutes", type=_above_zero, help="a few steps are timed, and their number fixed"
    )
    go.add_argument("--start", help="'embedded' or a safetensors file; default: random weights")
    go.add_argument("--allow-overlap", action="store_true", help="with classes of CIFAR-100")
    go.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
    for name, kind in (("batch", int), ("lr", _above_zero), ("seed", int), ("keep", float)):
        go.add_argument(f"--{name}", type=kind)
    go.add_argument("--area", type=float, help="smallest share of a picture in a large view")
    go.add_argument("--colours", type=float, help="strength of the changes of colours, 0 to 1")
    go.add_argument("--whiten", type=float, help="of the answers of layers and distil, 0 to 1")
    go.add_argument("--average", type=float, help="momentum of a mean of the weights; 0: none")
    for name, size in zip(_SIZES, EMBEDDED_SIZE, strict=True):
        go.add_argument(f"--{name}", type=_count, help=f"of the transformer; default: {size}")
    go.add_argument("--precision", choices=("fp32", "bf16"))
    go.add_argument("--device", default="cpu")
    go.add_argument("--threads", type=_count, help="they change the last bits; default: torch's")


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number <= _LARGEST:  # nor NaN
        raise ConfigError(f"expected a number above 0 and up to {_LARGEST:g}, got {text}.")
    return number


def _count(text: str) -> int:
    return max(int(text), int(_above_zero(text)))


def _targets(args: argparse.Namespace) -> None:
    _prepare(args.device, args.threads)
    least = EMBEDDED_MODEL["img_size"]
    if not least <= args.size <= MOST_PIXELS:
        raise ConfigError(
            f"the pictures for the student have {least} to {MOST_PIXELS} pixels a side, got "
            f"--size {args.size}."
        )
    teacher = load_backbone(args.teacher_name, args.teacher, args.device, args.teacher_size)
    with storage_errors("create", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    with DirectoryLock.acquire(args.out, "targets"):
        plan = compute(
            args.data, teacher, size=args.size, mirror=args.mirror,
            how=Sitting(args.out, tell=_tell), allow_overlap=args.allow_overlap,
        )  # fmt: skip
    print(f"{plan.count:,} pictures, targets {plan.shape} of {plan.teacher}, in {args.out}")


def _train(args: argparse.Namespace) -> None:
    _prepare(args.device, args.threads)
    if args.targets is None:
        pictures = read_pictures(args.data, EMBEDDED_MODEL["img_size"], "train")
    else:
        pictures = read_targets(args.targets)
    check_disjoint(pictures.classes, allowed=args.allow_overlap)
    if args.hold is not None:
        held = read_pictures(args.hold, int(pictures.images.shape[1]), "train")
        check_disjoint(held.classes, allowed=args.allow_overlap)
        pictures = pictures.holding(held)
    with storage_errors("create", args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    with DirectoryLock.acquire(args.out, "pre-training"):
        if (args.out / CHECKPOINT).exists():
            _refuse_changes(args, load(args.out / CHECKPOINT)[1], len(pictures.images))
            learner, story = resume(args.out, pictures, args.device)
            print(f"resumes at step {story.step} of {story.recipe.steps}", flush=True)
        else:
            learner, story = _new(args, pictures)
        story = train(learner, story, pictures, Sitting(args.out, args.save_every, tell=_tell))
    print(f"step {story.step} of {story.recipe.steps}, saved in {args.out / CHECKPOINT}")


def _new(args: argparse.Namespace, pictures: Pictures) -> tuple[Learner, Story]:
    given = _given(args)
    kind = args.recipe or ("dino" if args.targets is None else "distil")
    model = model_of(*(
        size if getattr(args, name) is None else getattr(args, name)
        for name, size in zip(_SIZES, EMBEDDED_SIZE, strict=True)
    ))  # fmt: skip
    weights = None if args.start is None else _weights(args.start)
    if kind == "layers" and weights is None:
        raise ConfigError(
            "the recipe layers teaches what the blocks of trained weights know; there are none.",
            action="Say which: --start embedded, or a safetensors file.",
        )
    if args.epochs is args.steps is args.minutes is None:
        raise ConfigError(
            "a new pre-training needs its length.", action="Give --epochs, --steps or --minutes."
        )
    recipe = Recipe.of(kind, 1, hold=0.0 if args.hold is None else 1.0, **given)
    if args.minutes is not None:
        trial, _ = begin(replace(recipe, steps=1000), pictures, model, weights, args.device)
        steps = steps_for(trial, pictures, args.minutes)
        print(
            f"{steps} steps fit {args.minutes:g} minutes; --steps {steps} repeats this", flush=True
        )
    else:
        steps = _steps(args, len(pictures.images), recipe.batch) or 0
    return begin(replace(recipe, steps=steps), pictures, model, weights, args.device)


def _steps(args: argparse.Namespace, images: int, batch: int) -> int | None:
    return args.steps if args.epochs is None else max(1, round(args.epochs * images / batch))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {n: getattr(args, n) for n in _CHANGES if getattr(args, n) is not None}


def _refuse_changes(args: argparse.Namespace, story: Story, images: int) -> None:
    """A checkpoint's recipe stays what it was: options that say otherwise are an error."""
    if args.start is not None and backbone_digest(_weights(args.start)) != story.start:
        raise ConfigError(
            f"{args.out} has a pre-training that began from "
            f"{f'the weights {story.start[:12]}' if story.start else 'random weights'}, not from "
            f"{args.start}.",
            action="Leave --start out to continue it, or choose another folder.",
        )
    recipe = story.recipe
    terms = Recipe.of(args.recipe, 1).terms if args.recipe else {}
    wanted = {name: value for name, value in terms.items() if name not in _CHANGES}
    wanted |= _given(args)
    wanted |= {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    steps = _steps(args, images, recipe.batch)
    if steps is not None:
        wanted["steps"] = steps
    sizes = {name: story.model[field] for name, field in _SIZES.items()}
    kept = {**recipe.to_fields(), **sizes}
    other = [f"{n} {v} (asked for: {wanted[n]})" for n, v in kept.items()
             if n in wanted and wanted[n] != v]  # fmt: skip
    if other:
        raise ConfigError(
            f"{args.out} has a pre-training with {', '.join(other)}.",
            action="Leave these options out to continue it, or choose another folder.",
        )


def _weights(name: str) -> dict[str, torch.Tensor]:
    path = embedded_file(".safetensors") if name in EMBEDDED_NAMES else Path(name)
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(
            f"the weights {path} cannot be read ({str(error)[:120]}).",
            action="Give 'embedded' or a safetensors file.",
        ) from error


def _glyphs(args: argparse.Namespace) -> None:
    from pretraining import glyphs  # matplotlib and Pillow are not needed to train

    if args.seed < 0:
        raise ConfigError(f"a seed is at least 0, got {args.seed}.", action="Give another --seed.")
    with storage_errors("create", args.out.parent):
        args.out.parent.mkdir(parents=True, exist_ok=True)
    glyphs.write(args.out, args.count, args.seed)
    print(f"{args.count:,} pictures in {args.out}")


def _card(args: argparse.Namespace) -> None:
    from pretraining import card  # scikit-learn is not needed to train

    _prepare("cpu", args.threads)
    story = blend = None
    if args.blend is not None:
        if args.out is None or args.start is None or not 0 < args.blend < 1:
            raise ConfigError(
                "--blend is a share between 0 and 1 of the result in --out; the rest is of the "
                f"weights in --start, got {args.blend:g}.",
                action="Give all three, or leave --blend out.",
            )
        blend = card.Blend(args.blend, _weights(args.start))
    if args.out is None:
        backbone = card.shipped()
    else:
        backbone, story = card.backbone_of(args.out, blend)
    size = backbone.info.preprocessing.size
    cifar100 = (
        read_pictures(args.cifar100, size, "train", args.per_class),
        read_pictures(args.cifar100, size, "test", card.TEST_PER_CLASS),
    )
    own = None
    if args.data is not None:
        own = tuple(
            read_pictures(args.data, size, part, most)
            for part, most in zip(("train", "test"), card.OWN, strict=True)
        )
    rows = card.measure(backbone, own, cifar100, args.per_class)
    if args.out is not None:
        card.embed(backbone, args.out)
        card.write_card(args.out / f"{EMBEDDED}.md", backbone, story, rows, blend)
        print(f"written: {args.out / EMBEDDED}.md, .safetensors, .digest, .onnx and .probe.npy")
    print(card.card(backbone, story, rows, blend))


def _prepare(device: str, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ConfigError(
            f"there is no device {device!r} here.", action="Give --device cpu, or cuda with a GPU."
        )


def _tell(line: str) -> None:
    print(line, flush=True)
