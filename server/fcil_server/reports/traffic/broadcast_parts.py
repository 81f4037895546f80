"""Broadcast parts that one client fetches in one task, by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fcil_adapters.contract import BackboneInfo, Method, TaskInfo
from fcil_adapters.contract.traffic import Cadence, Largest
from fcil_server.reports.traffic.sizes import NOTHING, Size, size_of

TRAIN, FINISH = "train", "finish"


@dataclass(frozen=True)
class TrafficSetting:
    """The task of a prediction.

    Attributes:
        classes: c, of this task and of each earlier one.
        past: classes of all earlier tasks; a remainder was a smaller first task.
        earlier: classes of each earlier task, if they are known; ``past`` is their sum then.
        clients: K, number of clients that answer each round.
        rounds: training rounds per task.
        evaluate: True if clients evaluate the model after the task.
    """

    backbone: BackboneInfo
    classes: int = 10
    past: int = 0
    clients: int = 10
    rounds: int = 5
    evaluate: bool = True
    earlier: tuple[int, ...] | None = None

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """All tasks up to this one."""
        full, rest = divmod(self.past, self.classes)
        sizes = [*([rest] if rest else []), *[self.classes] * (full + 1)]
        if self.earlier is not None:
            sizes = [*self.earlier, self.classes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            TaskInfo(i, tuple(range(start, start + size)), tuple(range(start)))
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )


@dataclass(frozen=True)
class Download:
    """One kind of broadcast part, for one client.

    Attributes:
        each: one such part.
        task: all that an earlier client fetches in this task.
        missed: additional ones of a client that joins in this task.
        every: for a base, the number of rounds after which it replaces the log.
    """

    part: str
    cadence: Cadence
    each: Size
    task: Size
    missed: Size
    every: int | None = None


class BroadcastParts:
    """The parts of one method in one setting."""

    def __init__(
        self, method: Method, hparams: Any, setting: TrafficSetting, bounds: Largest, trained: int
    ) -> None:
        self._method = method
        self._trained = trained  # training rounds of a task
        self._hparams = hparams
        self._setting = setting
        self._bounds = bounds
        self._schemas = {
            kind: schema
            for kind, schema in method.broadcast(hparams, setting.backbone).items()
            if kind not in bounds.without_parts
        }
        self._every = self._rounds_to_base()
        exchanges = method.exchanges(hparams, setting.backbone)
        own = [e.kind for e in exchanges if not (e.unlabelled or e.late)]
        self._ends_trained = own[-1] == TRAIN
        later = [e for e in exchanges if e.unlabelled and setting.evaluate]
        self._later = {e.kind: e.rounds or setting.rounds for e in later}  # kind -> rounds

    def downloads(self, rounds: int) -> tuple[Download, ...]:
        """Return every kind of part, for ``rounds`` rounds of a task besides its evaluation."""
        return tuple(self._download(kind, rounds) for kind in self._schemas)

    def _cadence(self, kind: str) -> Cadence:
        return self._method.cadence.get(kind, Cadence.ROUND)

    def _each(self, kind: str) -> Size:
        """Return one part's size; of a finished task, one as large as this."""
        task = self._setting.tasks[-1]
        if self._cadence(kind) in {Cadence.OWN, Cadence.CLOSED}:
            return self._of_task(kind, task)
        if self._cadence(kind) is Cadence.TASK:
            return self._finished(kind, len(task.classes))
        dims = self._method.dims(self._hparams, self._setting.backbone, task)
        return size_of(self._schemas[kind], dims, self._bounds)

    def _finished(self, kind: str, classes: int) -> Size:
        """Return the part of a finished task, as if it were the only one, with bounds reached."""
        after = TaskInfo(1, self._setting.tasks[-1].classes, tuple(range(classes)))
        dims = self._method.dims(self._hparams, self._setting.backbone, after)
        return replace(size_of(self._schemas[kind], dims, self._bounds), exact=True)

    def _of_task(self, kind: str, task: TaskInfo) -> Size:
        """Return the part of a task, as if it were the first, with bounds reached."""
        alone = TaskInfo(0, task.classes)
        dims = self._method.dims(self._hparams, self._setting.backbone, alone)
        return replace(size_of(self._schemas[kind], dims, self._bounds), exact=True)

    def fetched(self, step: int, before: str | None) -> Iterator[Size]:
        """Yield the parts that an earlier client fetches at a step of a task.

        Args:
            step: from 0 within the task.
            before: the kind of the round before; None at the first step.
        """
        first, trained = len(self._setting.tasks) == 1, before == TRAIN
        left = not first and not self._setting.evaluate  # the last task's end left parts unfetched
        unfetched = left and self._ends_trained
        logs = []
        for kind in self._schemas:
            match self._cadence(kind):
                case Cadence.ROUND | Cadence.OWN:
                    yield self._each(kind)
                    if self._cadence(kind) is Cadence.OWN and step == 0 and left:
                        yield self._of_task(kind, self._setting.tasks[-2])
                case Cadence.TRAINED if trained or (step == 0 and (first or unfetched)):
                    yield self._each(kind)
                case Cadence.COUNTED if trained or before in self._later:
                    yield self._each(kind)
                case Cadence.COUNTED if step == 0 and left:
                    yield self._before(kind)
                case Cadence.LOG if self._every != 1 and (trained or (step == 0 and left)):
                    logs.append(self._each(kind))
                case Cadence.BASE if self._has_base and (trained or (step == 0 and left)):
                    logs.append(self._each(kind))
                case Cadence.TASK if step == 0 and not first:
                    yield self._finished(kind, len(self._setting.tasks[-2].classes))
                case Cadence.FINISHED | Cadence.CLOSED if before == FINISH:
                    yield self._each(kind)
                case Cadence.FINISHED if before in self._later:
                    yield self._each(kind)
                case Cadence.FINISHED if step == 0 and left:
                    yield self._before(kind)
                case Cadence.CLOSED if step == 0 and left:
                    yield self._of_task(kind, self._setting.tasks[-2])
                case Cadence.LEARNED if step == 0 or trained:
                    yield self._each(kind)
                case Cadence.OPENING if step == 0:
                    yield self._each(kind)
                case Cadence.RUN if step == 0 and first:
                    yield self._each(kind)
                case _:
                    pass
        if logs:  # a base replaces the log
            yield max(logs, key=lambda size: size.bytes)

    @property
    def _has_base(self) -> bool:
        """True if a base replaces the log by the end of this task."""
        rounds = self._trained * len(self._setting.tasks)
        return self._every is not None and rounds >= self._every

    def _rounds_to_base(self) -> int | None:
        """Return the number of rounds after which a base replaces the log; None without a base."""
        kinds = {c: [k for k in self._schemas if self._cadence(k) is c] for c in Cadence}
        base, log = (
            sum(self._each(kind).bytes for kind in kinds[c]) for c in (Cadence.BASE, Cadence.LOG)
        )
        if not base:
            return None
        return math.ceil(base / log) if log else 1

    def _download(self, kind: str, rounds: int) -> Download:
        cadence, each = self._cadence(kind), self._each(kind)
        every = self._every if cadence is Cadence.BASE else None
        if cadence is Cadence.TASK:
            tasks = [self._finished(kind, len(t.classes)) for t in self._setting.tasks[:-1]]
            last, earlier = sum(tasks[-1:], NOTHING), sum(tasks[:-1], NOTHING)
            return Download(kind, cadence, each, last, earlier)
        if cadence is Cadence.OWN:
            past = [self._of_task(kind, t) for t in self._setting.tasks[:-1]]
            whole = each.times(rounds + self._setting.evaluate)
            if past and not self._setting.evaluate:  # as of the last task's end
                whole += past.pop()
            return Download(kind, cadence, each, whole, sum(past, NOTHING))
        if cadence is Cadence.CLOSED:
            closed = [self._of_task(kind, t) for t in self._setting.tasks[:-1]]
            if self._setting.evaluate:
                return Download(kind, cadence, each, each, sum(closed, NOTHING))
            last, earlier = sum(closed[-1:], NOTHING), sum(closed[:-1], NOTHING)
            return Download(kind, cadence, each, last, earlier)
        if cadence in {Cadence.COUNTED, Cadence.FINISHED}:
            rounds = 1 + sum(self._later.values()) if cadence is Cadence.FINISHED else rounds
            last = self._before(kind) if len(self._setting.tasks) > 1 else NOTHING
            if self._setting.evaluate:
                return Download(kind, cadence, each, each.times(rounds), last)
            return Download(kind, cadence, each, each.times(rounds - 1) + last, NOTHING)
        fetched, missed = self._counts(cadence, rounds)
        return Download(kind, cadence, each, each.times(fetched), each.times(missed), every)

    def _before(self, kind: str) -> Size:
        """Return a part as of the end of the last task."""
        task = self._setting.tasks[-2]
        dims = self._method.dims(self._hparams, self._setting.backbone, task)
        return size_of(self._schemas[kind], dims, self._bounds)

    def _counts(self, cadence: Cadence, rounds: int) -> tuple[int, int]:
        """Return the number of parts of this task, and of earlier ones' that still count."""
        first = len(self._setting.tasks) == 1
        before = rounds * (len(self._setting.tasks) - 1)
        every = self._every
        bases = (before + rounds) // every - before // every if every else 0
        match cadence:
            case Cadence.LOG:
                return rounds - bases, before % every if every else before
            case Cadence.BASE:
                return bases, int(every is not None and before >= every)
            case Cadence.TRAINED:
                # A round after the last training fetches the next task's starting point.
                follows = self._setting.evaluate or not self._ends_trained
                return self._trained + (follows and first), int(follows and not first)
            case Cadence.LEARNED:
                # The last training round's part is fetched if a round follows.
                ends = self._ends_trained and not self._setting.evaluate
                return self._trained + (not ends), 0
            case Cadence.OPENING:
                return 1, 0
            case Cadence.RUN:
                return int(first), int(not first)
            case _:
                return rounds + self._setting.evaluate, 0
