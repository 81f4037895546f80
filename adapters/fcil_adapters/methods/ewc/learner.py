"""EWC's client half: the task's cross-entropy, held where earlier tasks are sensitive (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fcil_adapters.contract import Array, Context, ImageSet, Payload, Progress, State
from fcil_adapters.methods.ewc.fisher import squared_gradients
from fcil_adapters.methods.ewc.options import EwcHparams
from fcil_adapters.methods.ewc.parts import IMPORTANCE, LARGEST, fisher_name
from fcil_adapters.numerics.class_means import class_positions
from fcil_adapters.numerics.class_reports import tally
from fcil_adapters.numerics.task_parts import find_part
from fcil_adapters.numerics.torch_numpy import to_numpy, to_torch
from fcil_adapters.toolkit.lora.client import LoraSetup, lora_tensors, train_round
from fcil_adapters.toolkit.lora.manifest import LoraBroadcast, read_parts
from fcil_adapters.toolkit.training.optimise import class_counts, schedule_factor
from fcil_adapters.toolkit.training.prefetch import plain_batches


class Learner:
    """Stateless: theta* and F are parts of the broadcast."""

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train, or measure the Fisher information of the trained model."""
        received = read_parts(ctx.hparams, broadcast)
        bench = LoraSetup.of(ctx, received)
        if ctx.kind == "finish":
            return state, Payload(_measured(ctx, bench, data))
        held = Held.of(ctx, bench, received, broadcast)
        return state, Payload(train_round(ctx, bench, data, penalty=held))


class Held:
    """``lambda sum F (theta - theta*)^2`` (Kirkpatrick et al., Eq. 3, without its 1/2).

    Explicit steps of SGD would diverge from the anchor where ``lr lambda F > 1``. So all gradients
    of a parameter are divided by ``1 + 2 lr lambda F``, which is the step that is implicit in the
    penalty: it has the same minimum and is stable for every lambda.
    """

    def __init__(self, weights: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        self.weights = weights  # lambda F
        self.anchor = anchor  # theta*

    @classmethod
    def of(
        cls,
        ctx: Context,
        bench: LoraSetup,
        received: LoraBroadcast,
        broadcast: Mapping[str, Payload],
    ) -> Held | None:
        """Return the penalty from theta* and F; the first task has none."""
        if received.teacher is None:
            return None
        h: EwcHparams = ctx.hparams
        part = find_part(broadcast, IMPORTANCE)
        fisher = {n: part.f32(fisher_name(f"lora.{n}")) for n in bench.lora}
        weights = {n: h.ewc_lambda * to_torch(f, bench.backbone.device) for n, f in fisher.items()}
        rate = h.lr_lora * schedule_factor(h.schedule, ctx.round, ctx.rounds)
        held = cls(weights, lora_tensors(bench, received.teacher[0]))
        for name, parameter in bench.lora.items():
            parameter.register_hook(partial(_divided, by=1 + 2 * rate * weights[name]))  # type: ignore[no-untyped-call]
        return held

    def __call__(self, bench: LoraSetup) -> Tensor:
        """Return the penalty of a step."""
        terms = [
            (self.weights[name] * (p - self.anchor[name]).square()).sum()
            for name, p in bench.lora.items()
        ]
        return torch.stack(terms).sum()


def _divided(grad: Tensor, by: Tensor) -> Tensor:
    return grad / by


def _measured(ctx: Context, bench: LoraSetup, data: ImageSet) -> dict[str, Array]:
    """Return the mean of ``p(y|x) (d log p(y|x))^2`` over this client's images, and the counts."""
    h: EwcHparams = ctx.hparams
    counts = class_counts(data, ctx.task.classes)
    first = len(bench.classes) - len(ctx.task.classes)
    rows = first + class_positions(data.labels, ctx.task.classes)  # (N,)
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in bench.lora.items()}
    for index, pixels in plain_batches(data, ctx.micro_batch or h.batch_size, ctx.device):
        columns = to_torch(rows[index], ctx.device)
        for name, squares in squared_gradients(bench, pixels.float(), columns).items():
            total[name] += squares
        ctx.progress(Progress(int(index[-1]) + 1, len(data)))
    return {
        **{
            fisher_name(f"lora.{n}"): to_numpy((t / max(len(data), 1)).clamp(max=LARGEST))
            for n, t in total.items()
        },
        **tally(ctx.task.classes, counts),
    }
