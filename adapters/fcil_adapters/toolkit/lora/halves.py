"""Halves that methods with LoRA and a linear head share, whole (torch; `lora.manifest`).

A manifest names them where a method has none of its own; `manifest.lora_method` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fcil_adapters.backbones.backbone import Backbone, cls_features
from fcil_adapters.contract import (
    Array,
    Context,
    ImageSet,
    Part,
    Payload,
    Predictor,
    State,
    Updates,
)
from fcil_adapters.toolkit.heads.rows import HeadRows
from fcil_adapters.toolkit.heads.scorer import Head, Scorer
from fcil_adapters.toolkit.lora.client import LoraSetup, train_round
from fcil_adapters.toolkit.lora.manifest import read_parts
from fcil_adapters.toolkit.lora.server import (
    average_round,
    first_state,
    open_task,
    parts_of,
    start_of,
)
from fcil_adapters.toolkit.lora.views import merged_view


class LoraLearner:
    """The learner of methods that train by cross-entropy alone.

    Stateless: all that a round starts from is in the broadcast.
    """

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        """Train; a task of a lone class is answered with its mean feature."""
        bench = LoraSetup.of(ctx, read_parts(ctx.hparams, broadcast))
        return state, Payload(train_round(ctx, bench, data))


class LoraAggregator:
    """The aggregator of methods that differ in their losses alone; the state is `lora.server`'s."""

    def init(self, ctx: Context) -> State:
        """Return the state before the first task."""
        del ctx
        return first_state()

    def open_task(self, ctx: Context, state: State) -> State:
        """Draw the task's head rows, and at first the LoRA."""
        return open_task(ctx, state)

    def start(self, ctx: Context, state: State) -> dict[str, Array]:
        """Return the LoRA and rows that clients train."""
        return start_of(ctx, state)

    def aggregate(self, ctx: Context, state: State, updates: Updates) -> State:
        """Average LoRA and the head's rows with the clients' weights."""
        return average_round(ctx, state, updates)

    def broadcast(self, ctx: Context, state: State) -> tuple[Part, ...]:
        """Return the room's parts."""
        return parts_of(ctx, state)


class LinearModel:
    """The model of methods that classify with the head as it is trained."""

    def compose(
        self, ctx: Context, broadcast: Mapping[str, Payload], backbone: Backbone
    ) -> Predictor:
        """Merge LoRA into a view; candidates are the classes that anybody had."""
        received = read_parts(ctx.hparams, broadcast)
        view = merged_view(backbone, ctx.hparams, received.lora)
        head = Head.linear(HeadRows.joined(received.tasks), backbone.device)
        return view_scorer(ctx, backbone, view, head)


def view_scorer(ctx: Context, backbone: Backbone, view: Any, head: Head) -> Scorer:
    """Return the classifier that puts a head on a view's features."""

    def features(pixels: Tensor) -> Tensor:
        return cls_features(view, backbone.normalise(pixels))

    def score(pixels: Tensor) -> Tensor:
        return head.score(features(pixels))

    return Scorer(head.classes, score, ctx.micro_batch, features, head.linear_layer)
