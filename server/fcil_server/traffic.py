"""What a method sends, in bytes of tensors, told from its manifest before anything runs.

Schemas say what may travel and how large; the manifest's ``cadence`` says how often, and its
``largest`` what bounds leave open. Envelopes, names and the link come on top: what a run really
sent is in its ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fcil_adapters.cadence import Cadence, Largest
from fcil_adapters.contract import BackboneInfo, Method, TaskInfo
from fcil_protocol.errors import ConfigError
from fcil_protocol.schema import PayloadSchema, TensorSpec
from fcil_protocol.wellknown import EVALUATE, EVALUATE_SCHEMA
from fcil_server.plan import task_steps


@dataclass(frozen=True)
class Setting:
    """The task that is looked at.

    Attributes:
        classes: c, of this task and of each earlier one.
        past: classes of all earlier tasks; what does not fill a task was a smaller first one.
        clients: K, how many answer each round.
        rounds: training rounds per task.
        evaluate: whether clients evaluate the model after the task.
    """

    backbone: BackboneInfo
    classes: int = 10
    past: int = 0
    clients: int = 10
    rounds: int = 5
    evaluate: bool = True

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """All tasks up to this one."""
        full, rest = divmod(self.past, self.classes)
        sizes = [*([rest] if rest else []), *[self.classes] * (full + 1)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(
            TaskInfo(i, tuple(range(start, start + size)), tuple(range(start)))
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )


@dataclass(frozen=True)
class Size:
    """Bytes by payload kind; ``exact`` or the largest possible."""

    kinds: Mapping[str, int]
    exact: bool = True

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())

    def __add__(self, other: Size) -> Size:
        kinds = Counter(self.kinds)
        kinds.update(other.kinds)
        # Nothing at all takes no part in how exact a sum is.
        exact = all(size.exact for size in (self, other) if size.bytes)
        return Size(dict(kinds), exact)

    def times(self, count: int, per: int = 1) -> Size:
        """Return the bytes of ``count / per`` of them."""
        kinds = {kind: round(count * size / per) for kind, size in self.kinds.items()}
        return Size({kind: size for kind, size in kinds.items() if size}, self.exact)

    def fields(self) -> dict[str, Any]:
        """Return plain data."""
        return {"bytes": self.bytes, "at_most": not self.exact, "kinds": dict(self.kinds)}


NOTHING = Size({})


@dataclass(frozen=True)
class Upload:
    """What one client sends in one round of an exchange, of which a task has ``rounds``."""

    exchange: str
    rounds: int
    size: Size


@dataclass(frozen=True)
class Download:
    """One kind of broadcast part, for one client.

    Attributes:
        each: one such part.
        task: all that are fetched in this task by a client that was there before.
        missed: what a client that joins in this task fetches besides.
        every: for a base, after how many rounds it replaces the log.
    """

    part: str
    cadence: Cadence
    each: Size
    task: Size
    missed: Size
    every: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Tensor bytes of one client in one task.

    Attributes:
        up: in the order of the task.
        round: what a client sends in the largest round and fetches on average in a round.
        task: what a client that was there before sends and fetches.
        missed: what a client that joins in this task fetches besides.

    Logs and bases are those of logs as large as they can get.
    """

    up: tuple[Upload, ...]
    down: tuple[Download, ...]
    round: tuple[Size, Size]
    task: tuple[Size, Size]
    missed: Size


def predict(method: Method, hparams: Any, setting: Setting) -> Traffic:
    """Compute a method's traffic.

    Raises:
        ConfigError: the options do not fit the backbone, or a schema leaves a size without bound.
    """
    now = setting.tasks[-1]
    bounds = method.largest(hparams, setting.backbone, now, setting.clients)
    dims = method.dims(hparams, setting.backbone, now)
    exchanges = method.exchanges(hparams, setting.backbone)
    steps = Counter(s.kind for s in task_steps(exchanges, setting.rounds, evaluate=False))
    up = [Upload(e.kind, steps[e.kind], _size(e.upload, dims, bounds)) for e in exchanges]
    largest = max((upload.size for upload in up), key=lambda size: size.bytes)
    if setting.evaluate:
        up.append(Upload(EVALUATE, 1, _size(EVALUATE_SCHEMA, {"seen": len(now.seen)}, Largest())))
    down = _Broadcast(method, hparams, setting, bounds).downloads(steps.total())
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


def _size(schema: PayloadSchema, dims: Mapping[str, int], bounds: Largest) -> Size:
    kinds: Counter[str] = Counter()
    exact = True
    for spec in schema.tensors:
        if spec.name not in bounds.without_tensors:
            alone = PayloadSchema((spec,), at_most=schema.at_most)
            try:
                kinds[spec.kind.value] += alone.max_bytes({**bounds.sizes, **dims})
            except KeyError as error:
                raise ConfigError(
                    f"tensor {spec.name!r}: nothing bounds the size {error} in its schema.",
                    action="Name it in the method's dims, or in the schema's at_most.",
                ) from error
            exact &= _is_fixed(spec, dims)
    return Size({kind: size for kind, size in kinds.items() if size}, exact)


def _is_fixed(spec: TensorSpec, dims: Mapping[str, int]) -> bool:
    return not spec.optional and all(isinstance(s, int) or s in dims for s in spec.shape)


class _Broadcast:
    """The parts of one method in one setting."""

    def __init__(self, method: Method, hparams: Any, setting: Setting, bounds: Largest) -> None:
        self._method = method
        self._hparams = hparams
        self._setting = setting
        self._bounds = bounds
        self._schemas = {
            kind: schema
            for kind, schema in method.broadcast(hparams, setting.backbone).items()
            if kind not in bounds.without_parts
        }
        self._every = self._rounds_to_base()

    def downloads(self, rounds: int) -> tuple[Download, ...]:
        """Return every kind of part; a task has so many rounds besides its evaluation."""
        return tuple(self._download(kind, rounds) for kind in self._schemas)

    def _cadence(self, kind: str) -> Cadence:
        return self._method.cadence.get(kind, Cadence.ROUND)

    def _each(self, kind: str) -> Size:
        """Return one part's size; of a finished task, one as large as this."""
        task = self._setting.tasks[-1]
        if self._cadence(kind) is Cadence.TASK:
            return self._finished(kind, len(task.classes))
        dims = self._method.dims(self._hparams, self._setting.backbone, task)
        return _size(self._schemas[kind], dims, self._bounds)

    def _finished(self, kind: str, classes: int) -> Size:
        """Return the part of a finished task, as if it were the only one: then bounds are met."""
        after = TaskInfo(1, self._setting.tasks[-1].classes, tuple(range(classes)))
        dims = self._method.dims(self._hparams, self._setting.backbone, after)
        return Size(_size(self._schemas[kind], dims, self._bounds).kinds)

    def _rounds_to_base(self) -> int | None:
        """Return after how many rounds a base replaces the log; None if there is no base."""
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
        if cadence is Cadence.COUNTED:
            return Download(kind, cadence, each, each.times(rounds), self._before(kind))
        fetched, missed = self._counts(cadence, rounds)
        return Download(kind, cadence, each, each.times(fetched), each.times(missed), every)

    def _before(self, kind: str) -> Size:
        """Return the part as the last task left it, of which all were told when it was tested."""
        if len(self._setting.tasks) == 1 or not self._setting.evaluate:
            return NOTHING
        task = self._setting.tasks[-2]
        dims = self._method.dims(self._hparams, self._setting.backbone, task)
        return _size(self._schemas[kind], dims, self._bounds)

    def _counts(self, cadence: Cadence, rounds: int) -> tuple[int, int]:
        """Return how many parts this task brings, and how many of earlier tasks still count."""
        first = len(self._setting.tasks) == 1
        before = rounds * (len(self._setting.tasks) - 1)
        every = self._every
        bases = (before + rounds) // every - before // every if every else 0
        match cadence:
            case Cadence.LOG:
                return rounds - bases, before % every if every else before
            case Cadence.BASE:
                return bases, int(every is not None and before >= every)
            case Cadence.OPENING:
                return int(not first), 0
            case Cadence.RUN:
                return int(first), int(not first)
            case _:
                return rounds + self._setting.evaluate, 0


def _average(down: tuple[Download, ...]) -> Size:
    """Return what a round brings on average, over many rounds."""
    every = next((d.every for d in down if d.every), None)
    total = NOTHING
    for one in down:
        if one.cadence in (Cadence.ROUND, Cadence.COUNTED):
            total += one.each
        elif one.cadence is Cadence.LOG:
            total += one.each.times(every - 1, every) if every else one.each
        elif one.cadence is Cadence.BASE:
            total += one.each.times(1, one.every or 1)
    return total
