"""The contract of a method: manifest, learner, aggregator, model.

A method is one folder with a manifest (`Method`, no torch) and three halves that workers
load by name. State goes in and comes out; nothing hides on ``self`` between rounds. What any
method may use or declare lies here too: noise on statistics (`privacy`), exemplars, forgetting.

The smallest method, whole (counts samples, needs no backbone)::

    class Learner:
        def run(self, ctx, state, broadcast, data):
            n = np.array([len(data)], np.int64)
            return state, Payload({"n": n})

    class Aggregator:
        def init(self, ctx):
            return State({"total": np.zeros(1, np.int64)})
        def open_task(self, ctx, state):
            return state
        def aggregate(self, ctx, state, updates):
            total = state.i64("total") + sum(u.payload.i64("n") for u in updates)
            return State({"total": total})
        def broadcast(self, ctx, state):
            return (Part("current", state),)

The way of one round: the server's worker calls ``broadcast(state)``; each asked client
fetches the parts it lacks, its worker calls ``Learner.run``; the payload is checked against
the exchange's upload schema on both sides; the server's worker calls ``aggregate`` with the
accepted updates in ClientId order.
"""

from __future__ import annotations

from fcil_adapters.contract.backbone_info import BackboneInfo, Preprocessing
from fcil_adapters.contract.context import Context, Hparams, Progress, State, TaskInfo
from fcil_adapters.contract.halves import (
    Aggregator,
    Learner,
    Model,
    Part,
    Predictor,
    Update,
    Updates,
)
from fcil_adapters.contract.image_set import ImageSet
from fcil_adapters.contract.manifest import Exchange, Method

__all__ = [
    "Aggregator",
    "BackboneInfo",
    "Context",
    "Exchange",
    "Hparams",
    "ImageSet",
    "Learner",
    "Method",
    "Model",
    "Part",
    "Predictor",
    "Preprocessing",
    "Progress",
    "State",
    "TaskInfo",
    "Update",
    "Updates",
]
