"""The view of all tasks' LoRA, and a pass that describes the inputs of its layers (torch)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import Array, Context, ImageSet, Payload, Progress
from fcil_adapters.methods.lorm.merging import pack_triangle, root_of, task_shares
from fcil_adapters.methods.lorm.options import LormHparams
from fcil_adapters.methods.lorm.parts import HEAD_ROOT, TaskLora, no_roots, read_tasks, root_names
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.layer import LoRALinear, adapted_layers
from fcil_adapters.toolkit.lora.low_rank import Change, Changes
from fcil_adapters.toolkit.lora.manifest import places
from fcil_adapters.toolkit.lora.tensors import module_of, module_shape
from fcil_adapters.toolkit.lora.views import changed_view
from fcil_adapters.toolkit.training.prefetch import plain_batches


def merged_tasks_view(backbone: Backbone, h: LormHparams, tasks: Sequence[TaskLora]) -> Any:
    """Return a view with the merge of the tasks' LoRA: with this, images are classified.

    Tasks that trained nothing are left out.
    """
    trained = [task for task in tasks if task.trained]
    device = backbone.device

    def factor(task: TaskLora, name: str) -> Tensor:
        return to_torch(task.lora[f"lora.{name}"], device, torch.float64)

    def change(place: str) -> Tensor:
        out, width = module_shape(module_of(place), backbone.info)
        total = torch.zeros((out, width), dtype=torch.float64, device=device)
        squares = [
            None if t.squares is None else to_torch(t.squares[place], device) for t in trained
        ]
        for task, share in zip(trained, task_shares(squares), strict=True):
            total += factor(task, f"{place}.B") @ (factor(task, f"{place}.A") * share.to(device))
        return total

    return changed_view(backbone, h, change)


def weight_changes(ctx: Context, broadcast: Mapping[str, Payload]) -> Changes:
    """Return the merge of the tasks' LoRA as pairs, with each task's share in its A."""
    h: LormHparams = ctx.hparams
    tasks = read_tasks(h, broadcast)
    trained = [task for task in tasks if task.trained]
    found: dict[str, Change] = {}
    for place in places(h):
        squares = [None if t.squares is None else to_torch(t.squares[place]) for t in trained]
        shares = task_shares(squares).numpy()
        pairs = [
            ((t.lora[f"lora.{place}.A"] * share).astype(np.float32), t.lora[f"lora.{place}.B"])
            for t, share in zip(trained, shares, strict=True)
        ]
        untrained = (tasks[-1].lora[f"lora.{place}.A"], tasks[-1].lora[f"lora.{place}.B"])
        found[place] = Change(tuple(pairs) or (untrained,))
    return Changes(h.scale, found)


def input_roots(
    ctx: Context,
    tasks: Sequence[TaskLora],
    data: ImageSet,
    *,
    factor: str,
    head: bool,
    report: bool,
) -> dict[str, Array]:
    """Return the roots of the mean products of layers' inputs over all tokens of all images.

    Zeros for too few images, and in a task of a single class, which trains nothing.

    Args:
        ctx: options, backbone, micro-batch and progress.
        tasks: the last one is the current one, with the LoRA whose merge is looked through.
        data: the images, unaugmented.
        factor: ``B``: products of the r inputs A x of B; ``A``: squares of the inputs x of A.
        head: True to add the products of the features.
        report: True to report to the context's progress.
    """
    h: LormHparams = ctx.hparams
    names = (*root_names(h, factor), *((HEAD_ROOT,) if head else ()))
    if h.single_column(ctx.task) or len(data) < max(h.min_count_upload, 1):
        return dict(no_roots(h, ctx.backbone_info, names))
    view = merged_tasks_view(ctx.backbone, h, tasks)
    sums = _Sums(factor, h, tasks[-1], ctx.device)
    features = torch.zeros((), dtype=torch.float64, device=ctx.device)
    with _watched(view, h, sums):
        for index, pixels in plain_batches(data, ctx.micro_batch or h.batch_size, ctx.device):
            with torch.no_grad():
                f = cls_features(view, ctx.backbone.normalise(pixels)).double()  # (b, d)
            features = features + f.mT @ f
            if report:
                ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    roots = sums.roots()
    if head:
        roots[HEAD_ROOT] = pack_triangle(root_of(damped(features / len(data), h.head_alpha)))
    return {name: to_numpy(roots[name]) for name in names}


def damped(gram: Tensor, alpha: float) -> Tensor:
    """Return ``alpha G + (1 - alpha) diag(G)``."""
    return alpha * gram + (1 - alpha) * gram.diagonal().diag()


class _Sums:
    """Sums over tokens of the products that a factor's round needs, for each place."""

    def __init__(self, factor: str, h: LormHparams, task: TaskLora, device: str) -> None:
        self._factor = factor
        self._A: Mapping[str, Tensor] = {
            place: to_torch(task.lora[f"lora.{place}.A"], device) for place in places(h)
        }
        self._sums: dict[str, Tensor] = {}
        self._tokens: Counter[str] = Counter()

    def add(self, place: str, x: Tensor) -> None:
        """Add the inputs (b, tokens, in) of a place."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if self._factor == "B":
            low = functional.linear(rows, self._A[place]).double()  # (rows, r)
            found = low.mT @ low
        else:
            found = rows.square().sum(0, dtype=torch.float64)
        self._sums[place] = self._sums[place] + found if place in self._sums else found
        self._tokens[place] += len(rows)

    def roots(self) -> dict[str, Tensor]:
        """Return the roots of the means."""
        means = {place: total / self._tokens[place] for place, total in self._sums.items()}
        return {
            f"root.{place}.{self._factor}": (
                pack_triangle(root_of(mean)) if self._factor == "B" else mean.sqrt()
            )
            for place, mean in means.items()
        }


@contextmanager
def _watched(view: Any, h: LormHparams, sums: _Sums) -> Iterator[None]:
    """Add the inputs of all adapted layers to the sums.

    The last block's MLP has readers for the class token alone, and computes a few others only to
    fill a batch (`backbone.leading_tokens`): those are no inputs.
    """
    last, read = len(view.blocks) - 1, view.num_prefix_tokens

    def hook(block: int, layer: LoRALinear) -> Any:
        own = [f"{block}.{module}" for module in layer.slices if module in h.modules]
        unread = block == last and own[0].endswith(("fc1", "fc2"))

        def note(_layer: Any, given: Any) -> None:
            for place in own:
                sums.add(place, given[0][:, :read] if unread else given[0])

        return layer.register_forward_pre_hook(note)

    hooks = [hook(block, layer) for block, layer in adapted_layers(view, h.blocks)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
