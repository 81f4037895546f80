"""A method of the tests: two tensors that may travel as halves and a mean that may not; numpy."""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Exchange, Hparams, Method, Part, State
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec

NUMBERS = (
    TensorSpec("lora.x", Kind.LORA, (4,), max_abs=1e30),
    TensorSpec("mean", Kind.PROTOTYPE, (2,), exact=True),
)


class Options(Hparams):
    """What the learner says."""

    value: float = 1 / 3


class Learner:
    def run(self, ctx, state, broadcast, data):
        del data
        start = broadcast["current"].f32("lora.x") if broadcast else np.zeros(4, np.float32)
        moved = start + np.float32(ctx.hparams.value)
        mean = np.full(2, 1 / 3, np.float32)
        return state, Payload({"lora.x": moved, "mean": mean, "n": np.array([3])})


class Aggregator:
    def init(self, ctx):
        del ctx
        return State({"lora.x": np.zeros(4, np.float32), "mean": np.zeros(2, np.float32)})

    def open_task(self, ctx, state):
        del ctx
        return state

    def aggregate(self, ctx, state, updates):
        del state
        sent = [u.payload for u in updates]
        mean = {n: np.mean([p.f32(n) for p in sent], axis=0) for n in ("lora.x", "mean")}
        return State({**mean, "lora.x": ctx.forms.commit(Kind.LORA, mean["lora.x"])})

    def broadcast(self, ctx, state):
        del ctx
        return (Part("current", state),)


class Careless(Aggregator):
    """It does not commit what it broadcasts."""

    def aggregate(self, ctx, state, updates):
        del ctx
        (sent,) = (u.payload for u in updates)
        return State({**state.tensors, "lora.x": sent.f32("lora.x") / np.float32(3)})


def _exchanges(_hparams, _backbone):
    n = TensorSpec("n", Kind.COUNT, (1,), dtype="I64", non_negative=True)
    return (Exchange("train", PayloadSchema((*NUMBERS, n))),)


METHOD = Method(
    name="half_method",
    version="1",
    title="A method of the tests",
    citation="none",
    hparams=Options,
    exchanges=_exchanges,
    broadcast=lambda _h, _b: {"current": PayloadSchema(NUMBERS)},
    dims=lambda _h, _b, _t: {},
    learner="adapters.half_method:Learner",
    aggregator="adapters.half_method:Aggregator",
    model="adapters.half_method:Learner",
    needs_backbone=False,
    half=(Kind.LORA,),
)
