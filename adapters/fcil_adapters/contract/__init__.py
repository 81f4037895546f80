"""The contract of a method: manifest, learner, aggregator, model.

A method is one folder with a manifest (`Method`, no torch) and three halves that workers
load by name. State goes in and comes out; nothing hides on ``self`` between rounds. What any
method may use or declare lies here too: noise on statistics (`privacy`), exemplars,
unlabelled images, forgetting.

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

An author imports from here alone, beside the shared modules of `fcil_adapters.toolkit` and
`fcil_adapters.numerics`; what the daemons and workers need of methods is in the modules below.

The way of one round: the server's worker calls ``broadcast(state)``; each asked client
fetches the parts it lacks, its worker calls ``Learner.run``; the payload is checked against
the exchange's upload schema on both sides; the server's worker calls ``aggregate`` with the
accepted updates in ClientId order.
"""

from __future__ import annotations

from fcil_adapters.contract.averaging import (
    Additive,
    AveragingRule,
    Sums,
    SumSpec,
    every_rule,
    mean_only,
)
from fcil_adapters.contract.backbone_info import BackboneInfo, Preprocessing
from fcil_adapters.contract.context import (
    Context,
    Hparams,
    Progress,
    State,
    TaskInfo,
    TrainingMetrics,
)
from fcil_adapters.contract.exemplars import (
    Exemplars,
    Joined,
    class_share,
    herd,
    with_exemplars,
)
from fcil_adapters.contract.forgetting import separable
from fcil_adapters.contract.halves import (
    Aggregator,
    AveragingAggregator,
    Learner,
    Model,
    Part,
    Predictor,
    Update,
    Updates,
)
from fcil_adapters.contract.late_images import (
    LateHparams,
    check_of_all_classes,
    classes_of,
    late_cap_ignored_reason,
    tasks_of,
    weight_cap,
)
from fcil_adapters.contract.local_images import ImageSet, with_counted
from fcil_adapters.contract.manifest import Exchange, Method, can_start
from fcil_adapters.contract.privacy import Privacy, Statistic
from fcil_adapters.contract.traffic import Cadence, Claim, Economy, Largest
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, MetaSpec, PayloadSchema, TensorSpec

__all__ = [
    "Additive",
    "Aggregator",
    "Array",
    "AveragingAggregator",
    "AveragingRule",
    "BackboneInfo",
    "Cadence",
    "Claim",
    "Context",
    "Economy",
    "Exchange",
    "Exemplars",
    "Hparams",
    "ImageSet",
    "Joined",
    "Kind",
    "Largest",
    "LateHparams",
    "Learner",
    "MetaSpec",
    "Method",
    "Model",
    "Part",
    "Payload",
    "PayloadSchema",
    "Predictor",
    "Preprocessing",
    "Privacy",
    "Progress",
    "State",
    "Statistic",
    "SumSpec",
    "Sums",
    "TaskInfo",
    "TensorSpec",
    "TrainingMetrics",
    "Update",
    "Updates",
    "can_start",
    "check_of_all_classes",
    "class_share",
    "classes_of",
    "every_rule",
    "herd",
    "late_cap_ignored_reason",
    "mean_only",
    "separable",
    "tasks_of",
    "weight_cap",
    "with_counted",
    "with_exemplars",
]
