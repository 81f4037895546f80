"""Prediction of a method's tensor bytes from its manifest, before any run.

Schemas give the tensors and their sizes; the manifest's ``cadence`` gives their frequency, and its
``largest`` the sizes that bounds leave open. Envelopes, names and the link come on top: the ledger
has the real bytes of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fcil_adapters.contract import Exchange, Method
from fcil_adapters.contract.traffic import Cadence, Largest
from fcil_protocol.payloads.builtin import EVALUATE, EVALUATE_SCHEMA
from fcil_server.reports.traffic.broadcast_parts import (
    TRAIN,
    BroadcastParts,
    Download,
    TrafficSetting,
)
from fcil_server.reports.traffic.sizes import NOTHING, Size, size_of
from fcil_server.rounds.schedule import task_steps


@dataclass(frozen=True)
class PredictedUpload:
    """One client's upload in one round of an exchange, of which a task has ``rounds``."""

    exchange: str
    rounds: int
    size: Size


@dataclass(frozen=True)
class Traffic:
    """Tensor bytes of one client in one task.

    Attributes:
        up: in the order of the task.
        round: upload in the largest round, and average download per round.
        task: upload and download of an earlier client.
        missed: additional download of a client that joins in this task.

    Logs and bases are those of logs as large as possible.
    """

    up: tuple[PredictedUpload, ...]
    down: tuple[Download, ...]
    round: tuple[Size, Size]
    task: tuple[Size, Size]
    missed: Size


def predict(method: Method, hparams: Any, setting: TrafficSetting) -> Traffic:
    """Compute a method's traffic.

    Raises:
        ConfigError: the options do not fit the backbone, or a schema leaves a size without bound.
    """
    now = setting.tasks[-1]
    bounds = method.largest(hparams, setting.backbone, now, setting.clients)
    dims = method.dims(hparams, setting.backbone, now)
    exchanges = _exchanges(method, hparams, setting)
    steps = Counter(
        s.kind
        for s in task_steps(exchanges, setting.rounds, task=now.index, evaluate=setting.evaluate)
    )
    tests = steps.pop(EVALUATE, 0)
    up = [
        PredictedUpload(e.kind, steps[e.kind], size_of(e.upload, dims, bounds))
        for e in exchanges
        if steps[e.kind]
    ]
    largest = max((upload.size for upload in up), key=lambda size: size.bytes)
    if tests:
        results = size_of(EVALUATE_SCHEMA, {"seen": len(now.seen)}, Largest())
        up.append(PredictedUpload(EVALUATE, tests, results))
    down = BroadcastParts(method, hparams, setting, bounds, steps[TRAIN]).downloads(steps.total())
    return Traffic(
        up=tuple(up),
        down=down,
        round=(largest, _average(down)),
        task=(
            sum((u.size.times(u.rounds) for u in up), NOTHING),
            sum((d.task for d in down), NOTHING),
        ),
        missed=sum((d.missed for d in down), NOTHING),
    )


@dataclass(frozen=True)
class RoundTraffic:
    """One client's upload and downloads in one round, as payloads."""

    kind: str
    round: int
    up: Size
    down: tuple[Size, ...]


def task_rounds(method: Method, hparams: Any, setting: TrafficSetting) -> Iterator[RoundTraffic]:
    """Yield every round of a task, for an earlier client.

    Raises:
        ConfigError: as `predict`.
    """
    now = setting.tasks[-1]
    bounds = method.largest(hparams, setting.backbone, now, setting.clients)
    dims = method.dims(hparams, setting.backbone, now)
    exchanges = _exchanges(method, hparams, setting)
    up = {e.kind: size_of(e.upload, dims, bounds) for e in exchanges}
    up[EVALUATE] = size_of(EVALUATE_SCHEMA, {"seen": len(now.seen)}, Largest())
    steps = task_steps(exchanges, setting.rounds, task=now.index, evaluate=setting.evaluate)
    trained = sum(step.kind == TRAIN for step in steps)
    broadcast = BroadcastParts(method, hparams, setting, bounds, trained)
    before = None
    for number, step in enumerate(steps):
        down = tuple(broadcast.fetched(number, before))
        yield RoundTraffic(step.kind, step.round, up[step.kind], down)
        before = step.kind


def _exchanges(method: Method, hparams: Any, setting: TrafficSetting) -> list[Exchange]:
    """Return the exchanges that the setting's task has."""
    task = setting.tasks[-1].index
    return [e for e in method.exchanges(hparams, setting.backbone) if e.in_task(task)]


# Parts that every round renews.
_EACH = frozenset({Cadence.ROUND, Cadence.OWN, Cadence.TRAINED, Cadence.COUNTED, Cadence.LEARNED})


def _average(down: tuple[Download, ...]) -> Size:
    """Return the average download of a round, over many rounds."""
    every = next((d.every for d in down if d.every), None)
    total = NOTHING
    for one in down:
        if one.cadence in _EACH:
            total += one.each
        elif one.cadence is Cadence.LOG:
            total += one.each.times(every - 1, every) if every else one.each
        elif one.cadence is Cadence.BASE:
            total += one.each.times(1, one.every or 1)
    return total
