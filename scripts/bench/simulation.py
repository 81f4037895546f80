"""One method in one process: a server and K clients, without sockets, on real images.

Every payload passes the way that it passes in a federation, through the registry, its schema
and its bytes; only transport, encryption and disks are missing. It is measured as
docs/methods/README.md, "Measures", says: the model is the server's after the last round of a task.

The other scripts of this folder use it::

    tasks = make_tasks([(0, 1), (2, 3)])
    simulation = Simulation.of("pilora", {"preset": "short"}, load_backbone(), clients, seed=0)
    result = simulation.run(tasks, test, rounds=2)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.backbone import Backbone
from fcil_adapters.contract import (
    Context,
    Exchange,
    Hparams,
    Method,
    Part,
    State,
    TaskInfo,
    Update,
)
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.contract.privacy import OFF, Privacy
from fcil_adapters.contract.registry import (
    load_half,
    load_method,
    make_hparams,
    part_faults,
    with_forms,
)
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.worker.evaluation import evaluate
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.rows import Evaluation
from fcil_server.reports.results.metrics import Metrics, compute

MAX_WEIGHT_SHARE = 0.5  # the default of [trust] max_weight_share
_RUN = RunId("simulation")

Parts = Mapping[str, Payload]


@dataclass(frozen=True)
class Images:
    """Pictures in memory, preprocessed for a backbone (`ImageSet`)."""

    pictures: NDArray[np.uint8]  # (N, S, S, 3)
    labels: NDArray[np.int64]  # (N,)

    @property
    def size(self) -> int:
        return int(self.pictures.shape[1])

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.pictures[index]

    def where(self, chosen: NDArray[Any]) -> Images:
        """Return some of them, by a mask or by indices."""
        return Images(self.pictures[chosen], self.labels[chosen])

    def of(self, classes: Sequence[int]) -> Images:
        """Return those of some classes."""
        return self.where(np.isin(self.labels, classes))


@dataclass
class Traffic:
    """Tensor bytes of all clients and rounds; a part that a client holds is not sent again."""

    up: int = 0
    down: int = 0
    held: dict[int, set[str]] = field(default_factory=dict)

    def fetch(self, client: int, parts: Mapping[str, tuple[str, Payload]]) -> None:
        """Count the parts (name -> digest, payload) that a client lacks."""
        known = self.held.setdefault(client, set())
        for digest, payload in parts.values():
            if digest not in known:
                known.add(digest)
                self.down += payload.tensor_bytes


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        metrics: accuracies in percent and forgetting in points
            (`fcil_server.reports.results.metrics`).
        up: tensor bytes of all updates.
        down: tensor bytes that clients fetched for the rounds, without evaluation.
        seconds: wall time.
    """

    metrics: Metrics
    up: int
    down: int
    seconds: float


def _ignore(_: Parts) -> None:
    return None


@dataclass
class Simulation:
    """A federation in one process; state in, state out, as the daemons do it.

    Attributes:
        clients: the train images of each client, of all tasks.
        privacy: clipping and noise of the clients' statistics.
        forms: in which form tensors travel ([wire] half).
        observe: called after each aggregated round with the broadcast of the state that it made.
    """

    method: Method
    hparams: Hparams
    backbone: Backbone
    clients: Sequence[Images]
    seed: int = 0
    privacy: Privacy = OFF
    forms: Forms = EXACT
    observe: Callable[[Parts], None] = _ignore
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.method = with_forms(self.method, self.forms)
        self._learner = load_half(self.method.learner)
        self._model = load_half(self.method.model)
        self.aggregator = load_half(self.method.aggregator)
        self._kept = [State() for _ in self.clients]  # what each learner keeps
        self.state = self.aggregator.init(self._context(TaskInfo(0, ()), "train", 0, 1))

    @classmethod
    def of(
        cls,
        name: str,
        options: Mapping[str, Any],
        backbone: Backbone,
        clients: Sequence[Images],
        /,
        **more: Any,
    ) -> Simulation:
        """Look the method up and build its hyper-parameters."""
        method = load_method(name)
        return cls(method, make_hparams(method, dict(options)), backbone, clients, **more)

    def run(self, tasks: Sequence[TaskInfo], test: Images, rounds: int) -> Result:
        """Run all tasks; after each, test the server's model on the classes seen so far."""
        began = time.monotonic()
        rows: list[Evaluation] = []
        for task in tasks:
            self.run_task(task, rounds)
            rows += self.evaluate(task, test)
        metrics = compute(rows, [task.classes for task in tasks])
        assert metrics is not None, "every task was evaluated"
        return Result(metrics, self.traffic.up, self.traffic.down, time.monotonic() - began)

    def run_task(self, task: TaskInfo, rounds: int) -> None:
        """Open a task and run all its exchanges."""
        opening = self._context(task, "train", 0, rounds)
        self.state = self.aggregator.open_task(opening, self.state)
        declared = self.method.exchanges(self.hparams, self.backbone.info)
        here = (e for e in declared if e.in_task(task.index) and not (e.unlabelled or e.late))
        for exchange in here:
            count = exchange.rounds or rounds
            for index in range(count):
                self._round(exchange, self._context(task, exchange.kind, index, count))

    def evaluate(self, task: TaskInfo, test: Images) -> list[Evaluation]:
        """Test the model that the current broadcast composes."""
        ctx = self._context(task, "evaluate", 0, 1)
        predictor = self._model.compose(ctx, self._payloads(self._parts(ctx)), self.backbone)
        counts = zip(*evaluate(predictor, test.of(task.seen)), strict=True)
        return [
            Evaluation(_RUN, task.index, CENTRAL, int(c), int(right), int(total))
            for c, right, total in counts
        ]

    def _context(self, task: TaskInfo, kind: str, index: int, rounds: int) -> Context:
        return Context(
            kind=kind,
            task=task,
            round=index,
            rounds=rounds,
            hparams=self.hparams,
            backbone_info=self.backbone.info,
            seed=(self.seed,),
            backbone=self.backbone,
            max_weight_share=MAX_WEIGHT_SHARE,
            privacy=self.privacy,
            forms=self.forms,
        )

    def _parts(self, ctx: Context) -> dict[str, tuple[str, Payload]]:
        """Return the broadcast as clients get it, through bytes: name -> digest, payload."""
        received = {}
        schemas = self.method.broadcast(self.hparams, self.backbone.info)
        for part in self.aggregator.broadcast(ctx, self.state):
            data = pack(self.forms.narrow_exactly(part.payload, schemas[part.kind]))
            read = Part(part.name, unpack(data))
            _refuse(part_faults(self.method, self.hparams, self.backbone.info, ctx.task, read))
            received[part.name] = hashlib.sha256(data).hexdigest(), read.payload
        return received

    def _payloads(self, parts: Mapping[str, tuple[str, Payload]]) -> dict[str, Payload]:
        return {name: self.forms.widen(payload) for name, (_, payload) in parts.items()}

    def _round(self, exchange: Exchange, ctx: Context) -> None:
        """Run one exchange with all clients that hold images of the task."""
        parts = self._parts(ctx)
        before = self._payloads(parts)
        sent = []
        for k, images in enumerate(self.clients):
            own = images.of(ctx.task.classes)
            if len(own):
                self.traffic.fetch(k, parts)
                sent.append(Update(_client_id(k), self._upload(exchange, ctx, k, before, own)))
        updates = UpdateList.of(sent)
        if len(updates):
            self.state = self.aggregator.aggregate(ctx, self.state, updates)
            self.observe(self._payloads(self._parts(ctx)))

    def _upload(
        self, exchange: Exchange, ctx: Context, k: int, parts: Parts, own: Images
    ) -> Payload:
        local = replace(ctx, seed=(self.seed, k))
        state, sent = self._learner.run(local, self._kept[k], parts, own)
        if exchange.keeps_state:
            self._kept[k] = state
        payload = unpack(pack(self.forms.narrow(sent, exchange.upload)))
        dims = self.method.dims(self.hparams, self.backbone.info, ctx.task)
        _refuse(exchange.upload.check(payload, dims) or exchange.check(payload, ctx.task))
        self.traffic.up += payload.tensor_bytes
        return self.forms.widen(payload)


def make_tasks(groups: Sequence[Sequence[int]]) -> list[TaskInfo]:
    """Return one task per group of class ids, in order."""
    tasks: list[TaskInfo] = []
    for classes in groups:
        past = tasks[-1].seen if tasks else ()
        tasks.append(TaskInfo(len(tasks), tuple(classes), past))
    return tasks


def _client_id(k: int) -> ClientId:
    return ClientId(f"client{k:03d}")  # equally long, as real ones are


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise SchemaMismatch("; ".join(faults) + ".")
