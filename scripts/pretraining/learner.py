"""Student, teacher and optimiser: one step of a pre-training, a function of its number."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcil_protocol.errors import RunFailed
from pretraining.answers import Answers, answers_loss, depths
from pretraining.recipe import Recipe
from pretraining.terms import (
    DinoHead,
    class_loss,
    dino_loss,
    follow,
    moved_centre,
    spread_loss,
)
from pretraining.views import turn, view

_LARGEST_SEED = 2**63
_HELD = 2**61  # added to the seeds of held pictures, so that they are not those of a step's views
_PASS = 256  # pictures in a pass without gradient


class Learner:
    """A backbone that learns, and all that a step changes.

    Attributes:
        student: backbone and heads, by name.
        teacher: backbone and heads that follow the student: DINO's teacher, or the mean of the
            weights.
        guide: the map to the answers that the student predicts, the frozen backbone whose blocks
            they come from, and the frozen starting weights that say what is held; empty in recipes
            without these.
        step: number of the next step; with the recipe's seed it decides all chance.
    """

    def __init__(
        self, vit: nn.Module, classes: int, recipe: Recipe, device: str, targets: int = 0
    ) -> None:
        """Begin with a backbone; ``targets`` is the width of a teacher's features, for distil."""
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        width = int(vit.embed_dim)
        for block in vit.blocks:
            block.attn.fused_attn = device != "cpu"  # its backward in bf16 is slow on processors
        modules: dict[str, nn.Module] = {"vit": vit}
        if recipe.dino:
            modules["dino"] = DinoHead(width, recipe.outputs)
        if recipe.classes:
            modules["classes"] = nn.Linear(width, classes * (4 if recipe.rotations else 1))
        self.student = nn.ModuleDict(modules).to(device)
        self.teacher = copy.deepcopy(self.student).requires_grad_(requires_grad=False)
        self.guide = nn.ModuleDict()
        if recipe.layers:
            seen = depths(vit, torch.zeros(1, 3, *vit.patch_embed.img_size, device=device))
            targets = sum(part.shape[1] for part in seen)
            self.guide["vit"] = copy.deepcopy(vit)
        if recipe.hold:
            self.guide["start"] = copy.deepcopy(vit)
        if targets:
            self.guide["answers"] = Answers(targets, width)
        self.guide.to(device).requires_grad_(requires_grad=False)
        self.centre = torch.zeros(recipe.outputs, device=device)
        self.optimiser = torch.optim.AdamW(self._groups(), lr=recipe.lr)
        self.step = 0

    def _groups(self) -> list[dict[str, object]]:
        own = list(self.student.parameters())
        return [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": self.recipe.weight_decay},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def look(self, pictures: Tensor, targets: Tensor | None) -> None:
        """Make the map to the answers from pictures (N, S, S, 3), before the first step."""
        passes = [_values(p, self.device) for p in pictures.split(_PASS)]
        with torch.no_grad():
            if targets is None:
                parts = zip(*(self._depths(x) for x in passes), strict=True)
                seen = [torch.cat(part) for part in parts]
                features, most = seen[-1], seen[-1].shape[1]
            else:
                seen = [targets[:, 0].to(self.device).float()]
                features = torch.cat([self._features(x, 1.0, None) for x in passes])
                most = features.shape[1] - 1  # the final norm takes one direction away
            self.guide["answers"].fit(seen, features, most, self.recipe.whiten)

    def learn(
        self,
        pictures: Tensor,
        labels: Tensor,
        targets: Tensor | None = None,
        held: Tensor | None = None,
    ) -> dict[str, float]:
        """Take one step and return its losses.

        Args:
            pictures: (B, S, S, 3) uint8.
            labels: (B,).
            targets: a teacher's features (B, 1 or 2, D) of the pictures, and of the mirrored ones.
            held: (H, S, S, 3) uint8, pictures whose features are to stay.
        """
        r = self.recipe
        dice = generator(r.seed, self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = r.rate(self.step)
        answers = None if targets is None else self._answers_to(targets)
        with torch.autocast(
            torch.device(self.device).type, torch.bfloat16, enabled=r.precision == "bf16"
        ):
            losses = self._losses(pictures, labels, answers, dice)
            if held is not None:
                losses["hold"] = self._hold(held, dice)
        total = torch.stack([getattr(r, name) * loss for name, loss in losses.items()]).sum()
        if not torch.isfinite(total):
            raise RunFailed(
                f"the loss is not finite at step {self.step}.",
                action="Begin in another folder with a smaller --lr.",
            )
        self.optimiser.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), r.clip)
        self.optimiser.step()
        momentum = r.teacher_momentum(self.step)
        follow(self.teacher.parameters(), self.student.parameters(), momentum)
        self.step += 1
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def _answers_to(self, targets: Tensor) -> Tensor:
        """Return the answers (B, 1 or 2, d) to stored features, in float32 in any precision."""
        numbers = targets.to(self.device, torch.float32)
        found: Tensor = self.guide["answers"]([numbers.flatten(0, 1)])
        return found.unflatten(0, targets.shape[:2])

    def _losses(
        self, pictures: Tensor, labels: Tensor, answers: Tensor | None, dice: torch.Generator
    ) -> dict[str, Tensor]:
        r = self.recipe
        images = _values(pictures, self.device)
        if r.classes and r.rotations:
            turns = torch.randint(4, (len(images),), generator=dice).to(self.device)
            images, labels = turn(images, turns), labels.to(self.device) * 4 + turns
        size = self.student["vit"].patch_embed.img_size[0]
        views = [view(images, size, (r.area, 1.0), dice, r.colours) for _ in range(r.large)]
        large = [seen for seen, _ in views]
        seen = [self._features(x, r.patches_kept(self.step), dice) for x in large]  # (B, d) each
        losses = {}
        if r.layers:
            with torch.no_grad():
                own = [self.guide["answers"](self._depths(x)) for x in large]
            losses["layers"] = answers_loss(torch.cat(seen).float(), torch.cat(own))
        if answers is not None:
            rows, last = torch.arange(len(images)), answers.shape[1] - 1
            chosen = [answers[rows, mirrored.long() * last] for _, mirrored in views]
            losses["distil"] = answers_loss(torch.cat(seen).float(), torch.cat(chosen))
        if r.classes:
            losses["classes"] = class_loss(
                [self.student["classes"](f).float() for f in seen], labels.to(self.device),
                r.smoothing,
            )  # fmt: skip
        if r.spread:
            losses["spread"] = spread_loss(*(f.float() for f in seen))
        if r.dino:
            small = [
                view(images, size // 2, (0.1, r.area), dice, r.colours)[0] for _ in range(r.small)
            ]
            seen += [self._features(x, 1.0, dice) for x in small]
            losses["dino"] = self._dino(large, seen)
        return losses

    def _hold(self, held: Tensor, dice: torch.Generator) -> Tensor:
        r = self.recipe
        size = self.student["vit"].patch_embed.img_size[0]
        seen, _ = view(_values(held, self.device), size, (r.area, 1.0), dice, r.colours)
        with torch.no_grad():
            before = features(self.guide["start"], normalised(seen)).float()
        now = self._features(seen, r.patches_kept(self.step), dice).float()
        return answers_loss(now, before)

    def _dino(self, large: list[Tensor], seen: list[Tensor]) -> Tensor:
        r = self.recipe
        with torch.no_grad():
            targets = [
                self.teacher["dino"](features(self.teacher["vit"], normalised(x))).float()
                for x in large
            ]
        outputs = [self.student["dino"](f).float() for f in seen]
        temperatures = (r.student_temperature, r.sharpness(self.step))
        loss = dino_loss(outputs, targets, self.centre, temperatures)
        self.centre = moved_centre(self.centre, targets, r.centring)
        return loss

    def _depths(self, images: Tensor) -> list[Tensor]:
        return depths(self.guide["vit"], normalised(images))

    def _features(self, images: Tensor, keep: float, dice: torch.Generator | None) -> Tensor:
        return features(self.student["vit"], normalised(images), keep, dice)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a checkpoint needs, by name; `restore` takes it."""
        found = {f"student.{k}": v for k, v in self.student.state_dict().items()}
        found |= {f"teacher.{k}": v for k, v in self.teacher.state_dict().items()}
        for name, p in self.student.named_parameters():
            found |= {
                f"optimiser.{name}.{k}": v
                for k, v in self.optimiser.state[p].items()
                if isinstance(v, Tensor)
            }
        found |= {f"guide.{k}": v for k, v in self.guide.state_dict().items()}
        return {**found, "centre": self.centre}

    def restore(self, found: Mapping[str, Tensor], step: int) -> None:
        """Go on where `tensors` was taken."""
        modules = {"student": self.student, "teacher": self.teacher, "guide": self.guide}
        for name, module in modules.items():
            module.load_state_dict(_under(found, f"{name}."))
        for name, p in self.student.named_parameters():
            state = _under(found, f"optimiser.{name}.")
            if state:
                # AdamW counts its steps on the processor, whatever device the weights are on.
                self.optimiser.state[p] = {
                    k: v if k == "step" else v.to(self.device) for k, v in state.items()
                }
        self.centre = found["centre"].to(self.device)
        self.step = step


def features(
    vit: nn.Module, x: Tensor, keep: float = 1.0, dice: torch.Generator | None = None
) -> Tensor:
    """Return the class token after the final norm of normalised images (B, 3, s, s): (B, d).

    Smaller images than the model's have their positions interpolated; with ``keep`` below 1 a
    random share of the patches is seen, each image's own.
    """
    patches = vit.patch_embed.proj(x)  # (B, d, h, w)
    positions = vit.pos_embed[:, 1:]  # (1, N, d)
    side = round(positions.shape[1] ** 0.5)
    if patches.shape[-1] != side:
        grid = positions.transpose(1, 2).unflatten(2, (side, side))
        resized = functional.interpolate(grid, patches.shape[-2:], mode="bicubic")
        positions = resized.flatten(2).transpose(1, 2)
    tokens = patches.flatten(2).transpose(1, 2) + positions  # (B, n, d)
    if keep < 1:
        order = torch.rand(tokens.shape[:2], generator=dice).argsort(1).to(x.device)
        order = order[:, : max(1, round(keep * tokens.shape[1]))]
        tokens = tokens.gather(1, order.unsqueeze(2).expand(-1, -1, tokens.shape[2]))
    first = (vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1)
    return vit.norm(vit.blocks(torch.cat([first, tokens], 1)))[:, 0]


def _values(pictures: Tensor, device: str) -> Tensor:
    """Turn (B, S, S, 3) uint8 into (B, 3, S, S) in [0, 1]."""
    return pictures.to(device, torch.float32).permute(0, 3, 1, 2) / 255


def normalised(images: Tensor) -> Tensor:
    """Turn values in [0, 1] into the embedded backbone's input."""
    return (images - 0.5) / 0.5


def generator(seed: int, step: int) -> torch.Generator:
    """Return the chance of one step: what came before does not change it."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step * 2 + 1) % _LARGEST_SEED)


def batches(count: int, recipe: Recipe, step: int) -> Iterator[Tensor]:
    """Yield the rows of each step's images from a step on; each pass has its own order."""
    per_pass = max(1, count // recipe.batch)
    order = None
    for number in range(step, recipe.steps):
        epoch, place = divmod(number, per_pass)
        if order is None or place == 0:
            dice = torch.Generator().manual_seed((recipe.seed * 1_000_003 + epoch * 2) % 2**63)
            order = torch.randperm(count, generator=dice)
        yield order[place * recipe.batch : (place + 1) * recipe.batch]


def held_rows(count: int, recipe: Recipe, step: int) -> Tensor:
    """Return the rows of a step's held pictures, drawn of so many with repetition."""
    seed = (_HELD + recipe.seed * 1_000_003 + step) % _LARGEST_SEED
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(count, (recipe.held,), generator=dice)


def _under(found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
