"""iCaRL+FL: exemplars that stay on the device, distillation, and the nearest mean of features.

Sylvestre-Alvise Rebuffi, Alexander Kolesnikov, Georg Sperl, Christoph H. Lampert: iCaRL:
Incremental Classifier and Representation Learning. CVPR 2017. https://arxiv.org/abs/1611.07725

Manifest (no torch). NOTES.md leads from the equations to the functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fcil_adapters.contract import (
    BackboneInfo,
    Cadence,
    Exchange,
    Kind,
    Payload,
    PayloadSchema,
    TaskInfo,
    TensorSpec,
    mean_only,
)
from fcil_adapters.methods.icarl.options import IcarlHparams
from fcil_adapters.methods.icarl.parts import MEANS
from fcil_adapters.numerics.class_reports import count_faults, count_spec, tally_specs
from fcil_adapters.numerics.task_parts import CURRENT
from fcil_adapters.toolkit.lora.manifest import broadcast_schemas, lora_method, train_exchange

_LONGEST = 1.001  # length 1 with float32's rounding


def exchanges(h: IcarlHparams, backbone: BackboneInfo) -> tuple[Exchange, ...]:
    """Return the training rounds, and one that chooses exemplars and sends class means."""

    def check(payload: Payload, task: TaskInfo) -> list[str]:
        return count_faults(payload, task) + _mean_faults(h, payload, task)

    told = PayloadSchema(
        (
            _means("owned"),
            count_spec("owned", "owned"),
            count_spec("images", "owned"),
            *tally_specs(),
        ),
        at_most=(("owned", "seen"),),
    )
    return (
        train_exchange("icarl", h, backbone, averaged=True),
        Exchange("finish", told, rounds=1, check=check, keeps_state=True),
    )


def broadcast(h: IcarlHparams, backbone: BackboneInfo) -> Mapping[str, PayloadSchema]:
    """Return the shared parts, and the class means once there are any."""
    means = PayloadSchema(
        (_means("known"), count_spec("classes", "known")), at_most=(("known", "seen"),)
    )
    return {**broadcast_schemas("icarl", h, backbone), MEANS: means}


def _means(rows: str) -> TensorSpec:
    """Return the spec of means of features of length 1."""
    return TensorSpec("means", Kind.PROTOTYPE, (rows, "d"), exact=True, max_abs=_LONGEST)


def _mean_faults(h: IcarlHparams, payload: Payload, task: TaskInfo) -> list[str]:
    """Return how the sent means contradict the task."""
    owned, images = payload.i64("owned").tolist(), payload.i64("images").tolist()
    faults = []
    places = {c: i for i, c in enumerate(task.seen)}
    rows = [places.get(c, -1) for c in owned]
    if -1 in rows or sorted(set(rows)) != rows:
        faults.append(f"'owned': expected seen classes in their order, each once, got {owned[:20]}")
    if any(n < h.min_count_upload for n in images):
        faults.append(f"'images': expected at least {h.min_count_upload} behind each mean")
    most = dict(zip(task.classes, payload.i64("count").tolist(), strict=False))
    if any(n > most.get(c, h.memory) for c, n in zip(owned, images, strict=True)):
        faults.append(
            "'images': expected no more than a class of the task has ('count'), and no more "
            f"exemplars of a past class than the {h.memory} of the memory"
        )
    if (np.linalg.norm(payload.f32("means"), axis=1) > _LONGEST).any():
        faults.append("'means': expected means of features of length 1, got a longer one")
    return faults


METHOD = lora_method(
    "icarl",
    "iCaRL+FL: exemplars on the device and nearest class means, on LoRA",
    "S.-A. Rebuffi, A. Kolesnikov, G. Sperl, C. H. Lampert. CVPR 2017. "
    "https://arxiv.org/abs/1611.07725",
    IcarlHparams,
    learner="fcil_adapters.methods.icarl.learner:Learner",
    aggregator="fcil_adapters.methods.icarl.aggregator:Aggregator",
    model="fcil_adapters.methods.icarl.model:Model",
    exchanges=exchanges,
    broadcast=broadcast,
    averagings=mean_only,
    cadence={CURRENT: Cadence.LEARNED, MEANS: Cadence.FINISHED},
    exemplars=lambda h: h.memory,
)
