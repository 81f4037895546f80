"""FedProto: clients' features are pulled to the class means of all clients.

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang, Chengqi Zhang: FedProto:
Federated Prototype Learning across Heterogeneous Clients. AAAI 2022.
https://arxiv.org/abs/2105.00243

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Kind,
    Payload,
    PayloadSchema,
    Statistic,
    TaskInfo,
    TensorSpec,
    mean_only,
)
from fcil_adapters.methods.fedproto.options import FedprotoHparams
from fcil_adapters.methods.fedproto.parts import PROTO
from fcil_adapters.numerics.class_reports import count_spec
from fcil_adapters.toolkit.lora.manifest import (
    broadcast_schemas,
    lora_method,
    lora_statistics,
    train_exchange,
)


def exchanges(h: FedprotoHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds; each upload has the class means of the client's images too."""

    def check(payload: Payload, task: TaskInfo) -> list[str]:
        told = zip(task.classes, payload.i64("count").tolist(), strict=False)
        expected = [c for c, count in told if count >= h.min_count_upload]
        got = payload.i64("owned").tolist()
        if got == expected:
            return []
        return [f"'owned': expected the classes with enough images, {expected}, got {got[:20]}"]

    more = (
        TensorSpec("proto", Kind.PROTOTYPE, ("owned", "d"), exact=True),
        count_spec("owned", "owned"),
    )
    at_most = (("owned", "c"),)
    return (
        train_exchange(
            "fedproto",
            h,
            backbone,
            more=more,
            at_most=at_most,
            check=check,
            averaged=True,
            weights={"proto": "described"},
        ),
    )


def broadcast(h: FedprotoHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the shared parts, and the prototypes of each task."""
    proto = TensorSpec("proto", Kind.PROTOTYPE, ("own", "d"), exact=True)
    schema = PayloadSchema(
        (proto, count_spec("classes", "own"), count_spec("seen", "own")),
        at_most=(("own", "seen"),),
    )
    return {**broadcast_schemas("fedproto", h, backbone), PROTO: schema}


def statistics(h: FedprotoHparams, kind: str, task: TaskInfo) -> tuple[Statistic, ...]:
    """Return the protected statistics: the class means."""
    return (*lora_statistics(h, kind, task), Statistic("class prototypes", ("proto",)))


METHOD = lora_method(
    "fedproto",
    "FedProto: federated prototypes, on LoRA",
    "Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. AAAI 2022. "
    "https://arxiv.org/abs/2105.00243",
    FedprotoHparams,
    learner="fcil_adapters.methods.fedproto.learner:Learner",
    aggregator="fcil_adapters.methods.fedproto.aggregator:Aggregator",
    model="fcil_adapters.methods.fedproto.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    statistics=statistics,
    averagings=mean_only,
    cadence={PROTO: Cadence.OWN},
)
