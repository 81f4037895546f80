"""The contrast between the round's server and the previous task's (torch).

Halbe et al.'s form of Fed-CPrompt's loss: the anchor is a client's logits, the positive those of
the server at the start of the round, the negative those of the server at the end of the previous
task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.methods.fed_cprompt.options import FedCPromptHparams
from fcil_adapters.numerics.torch_numpy import to_torch
from fcil_adapters.toolkit.heads.rows import F32
from fcil_adapters.toolkit.prompts.client import (
    Features,
    PromptSetup,
    component_features,
    own_cross_entropy,
)
from fcil_adapters.toolkit.prompts.parts import PromptModel
from fcil_adapters.toolkit.prompts.pools import TaskPrompts
from fcil_adapters.toolkit.prompts.prefix import Queries
from fcil_adapters.toolkit.training.optimise import Batch, MicroBatch


@dataclass(frozen=True)
class Teacher:
    """A fixed model: features and the head's rows of all seen classes, (C, d) and (C,).

    Its features are rounded like the client's own: otherwise the scale of the contrast would turn
    differences of mixed precision into a distance.
    """

    backbone: Backbone
    features: Features
    weight: Tensor
    bias: Tensor

    def logits(self, pixels: Tensor, queries: Tensor) -> Tensor:
        """Return scores (b, C), without a gradient."""
        with torch.no_grad():
            with self.backbone.training():
                features = self.features(pixels, queries)
            return functional.linear(features.float(), self.weight, self.bias)


def gap(h: FedCPromptHparams, local: Tensor, server: Tensor, previous: Tensor) -> Tensor:
    """Return ``sum_b (near ||l - s||^2 - far ||l - p||^2)`` over logits (b, C)."""
    return h.near * (local - server).square().sum() - h.far * (local - previous).square().sum()


@dataclass(frozen=True)
class Contrast:
    """``relu(gap + margin)`` over an entire batch, in addition to the cross-entropy.

    Attributes:
        server, previous: the two teachers.
        past_weight, past_bias: the head's fixed rows of past classes.
    """

    h: FedCPromptHparams
    server: Teacher
    previous: Teacher
    past_weight: Tensor
    past_bias: Tensor

    @classmethod
    def of(
        cls, bench: PromptSetup, h: FedCPromptHparams, start: PromptModel, first: Sequence[F32]
    ) -> Contrast:
        """Build the teachers from a broadcast.

        Args:
            bench: of the round.
            h: the options.
            start: the broadcast, of a task t >= 1.
            first: first weight (c, d) and bias (c,) of the task's classes.
        """
        device, c = bench.backbone.device, len(bench.bias)
        weight, bias = (to_torch(array, device) for array in (start.head.weight, start.head.bias))
        past_weight, past_bias = weight[:-c], bias[:-c]
        before = [
            torch.cat([past, to_torch(rows, device)])
            for past, rows in zip((past_weight, past_bias), first, strict=True)
        ]
        same = bench.backbone
        server = Teacher(same, _fixed(same, h, start.prompts), weight, bias)
        previous = Teacher(same, _fixed(same, h, start.prompts[:-1]), before[0], before[1])
        return cls(h, server, previous, past_weight, past_bias)

    def add(self, bench: PromptSetup, batch: Batch, queries: Queries) -> None:
        """Add the gradient of the entire objective of one batch.

        The hinge is over the batch's sum: where a batch passes in pieces, a pass without a gradient
        first finds out if it is active.
        """
        pieces = list(batch.pieces())
        alone = len(pieces) == 1
        opened = alone or self._total(bench, pieces, queries) + self.h.margin > 0
        for piece in pieces:
            asked = queries.of(piece.index, piece.pixels)  # (b, d)
            features = bench.prompted(piece, asked)
            logits = bench.logits(features)
            batch.scored(logits, piece)
            loss = own_cross_entropy(logits, piece.rows) / len(batch)
            if opened:
                apart = self._gap(bench, piece, asked, features)
                apart = apart + self.h.margin * len(piece.index) / len(batch)
                loss = loss + self.h.contrast * (torch.relu(apart) if alone else apart)
            batch.backward(loss)

    def _gap(
        self, bench: PromptSetup, piece: MicroBatch, asked: Tensor, features: Tensor
    ) -> Tensor:
        """Return `gap` of some images with features (b, d)."""
        past = functional.linear(features, self.past_weight, self.past_bias)
        local = torch.cat([past, bench.logits(features)], dim=1)  # (b, C)
        server, previous = (
            teacher.logits(piece.pixels, asked) for teacher in (self.server, self.previous)
        )
        return gap(self.h, local, server, previous)

    def _total(self, bench: PromptSetup, pieces: Sequence[MicroBatch], queries: Queries) -> float:
        total = 0.0
        with torch.no_grad():
            for piece in pieces:
                asked = queries.of(piece.index, piece.pixels)
                total += self._gap(bench, piece, asked, bench.prompted(piece, asked)).item()
        return total


def _fixed(
    backbone: Backbone, h: FedCPromptHparams, prompts: Sequence[Mapping[str, F32]]
) -> Features:
    """Return the features with the fixed components of some tasks."""
    whole = TaskPrompts.of(prompts, backbone.device).whole
    fixed = {name: tensor.detach() for name, tensor in whole.items()}
    return component_features(backbone, h, lambda: fixed)
