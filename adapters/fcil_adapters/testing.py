"""A federation in one process, with a toy backbone and toy images: for the tests of methods.

Nothing of it is used in production. It finds most mistakes of a method in seconds, since every
payload passes its schema and its form as bytes::

    clients = [toy_images({0: 20, 1: 9}, seed=1), toy_images({0: 4, 2: 30}, seed=2)]
    federation = ToyFederation(METHOD, METHOD.hparams(), toy_backbone(), clients)
    for task in make_tasks([0, 1], [2]):
        federation.run(task, rounds=2)
    federation.predictor().logits(clients[0].pictures)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fcil_adapters.backbones.backbone import Backbone, wrap_backbone
from fcil_adapters.contract import (
    Context,
    Exchange,
    Method,
    Predictor,
    Preprocessing,
    Progress,
    State,
    TaskInfo,
    Update,
)
from fcil_adapters.contract.averaging import PLAIN, Averaging
from fcil_adapters.contract.forgetting import classes_with_images
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.contract.halves import learned
from fcil_adapters.contract.late_images import classes_of
from fcil_adapters.contract.local_images import as_digests, counted_digests, with_described
from fcil_adapters.contract.manifest_checks import check_manifest
from fcil_adapters.contract.privacy import OFF, Privacy
from fcil_adapters.contract.registry import load_half, load_method, make_hparams, with_forms
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Payload, pack, unpack

SIZE, DIM = 16, 16  # pixels of the toy images' sides, width of the toy backbone's features


def toy_backbone(seed: int = 0) -> Backbone:
    """Return a two-block transformer with seeded random weights; its features tell colours."""
    # After `backbone` has prepared its import.
    from timm.models.vision_transformer import VisionTransformer

    module = VisionTransformer(
        img_size=SIZE, patch_size=8, embed_dim=DIM, depth=2, num_heads=2, num_classes=0
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            start = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(start + 0.3 * torch.randn(parameter.shape, generator=generator))
    preprocessing = Preprocessing(SIZE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return wrap_backbone(module, "toy", preprocessing)


@dataclass(frozen=True)
class ToyImages:
    """An `ImageSet` in memory."""

    pictures: NDArray[np.uint8]  # (N, S, S, 3)
    labels: NDArray[np.int64]  # (N,)

    @property
    def size(self) -> int:
        """S, the side of a picture."""
        return int(self.pictures.shape[1])

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return pictures by their places."""
        return self.pictures[index]

    def of(self, classes: Sequence[int]) -> ToyImages:
        """Return the images of some classes."""
        chosen = np.isin(self.labels, classes)
        return ToyImages(self.pictures[chosen], self.labels[chosen])


def toy_images(counts: Mapping[int, int], seed: int = 0) -> ToyImages:
    """Return noisy pictures, ``counts[c]`` of class c; each has its own pattern of four colours."""
    rng = np.random.default_rng(seed)
    pictures, labels = [], []
    for c, count in counts.items():
        pattern = np.random.default_rng(1000 + c).integers(30, 226, (2, 2, 3))
        base = pattern.repeat(SIZE // 2, axis=0).repeat(SIZE // 2, axis=1)
        noise = rng.normal(0, 8, (count, SIZE, SIZE, 3))
        pictures.append(np.clip(base + noise, 0, 255).astype(np.uint8))
        labels.append(np.full(count, c, dtype=np.int64))
    if not labels:
        return ToyImages(np.zeros((0, SIZE, SIZE, 3), np.uint8), np.zeros(0, np.int64))
    return ToyImages(np.concatenate(pictures), np.concatenate(labels))


def make_tasks(*tasks: Sequence[int]) -> list[TaskInfo]:
    """Return tasks that follow each other, by their classes."""
    past: tuple[int, ...] = ()
    made = []
    for index, classes in enumerate(tasks):
        made.append(TaskInfo(index, tuple(classes), past))
        past += tuple(classes)
    return made


def client_id(k: int) -> ClientId:
    """Return the id of client k, k < 676; they sort as their numbers do."""
    if k < 10:
        return ClientId("abcdefghij"[k] * 26)
    return ClientId(f"k{chr(97 + k // 26)}{chr(97 + k % 26)}".ljust(26, "a"))


@dataclass
class ToyFederation:
    """Clients and a server in one process; every payload passes its schema and its bytes.

    Attributes:
        hparams: the method's options, as the server's configuration would set them.
        clients: the images of each; a round hands out those of its task alone.
        unlabelled: further images of each, for rounds of such (`Exchange.unlabelled`); empty: none
            of these rounds takes place.
        asleep: positions of the clients that take no part for now.
        seed: of all that is drawn.
        micro_batch, max_weight_share, averaging, privacy: as in `contract.Context`.
        forms: what travels in half precision.
        state: the server's, so far.
        progress: the learners' progress reports.
    """

    method: Method
    hparams: Any
    backbone: Backbone
    clients: Sequence[ToyImages]
    unlabelled: Sequence[ToyImages] = ()
    seed: int = 0
    micro_batch: int | None = None
    max_weight_share: float = 1.0
    averaging: Averaging = PLAIN
    privacy: Privacy = OFF
    forms: Forms = EXACT
    state: State = field(init=False)
    progress: list[Progress] = field(default_factory=list)
    asleep: set[int] = field(default_factory=set)
    _counted: dict[int, State] = field(default_factory=dict)  # states that name counted images

    def __post_init__(self) -> None:
        check_manifest(self.method, self.backbone.info, self.hparams)
        self.method = with_forms(self.method, self.forms)
        self.learner = load_half(self.method.learner)
        self.aggregator = load_half(self.method.aggregator)
        self.model = load_half(self.method.model)
        self.task = TaskInfo(0, ())
        self.state = self.aggregator.init(self.context("train"))

    @classmethod
    def of(
        cls, name: str, clients: Sequence[ToyImages], backbone: Backbone | None = None, /, **kw: Any
    ) -> ToyFederation:
        """Return a federation with an installed method, by name; other names are its options."""
        settings = (
            "unlabelled",
            "seed",
            "micro_batch",
            "max_weight_share",
            "averaging",
            "privacy",
            "forms",
        )
        extra = {k: kw.pop(k) for k in settings if k in kw}
        method = load_method(name)
        return cls(method, make_hparams(method, kw), backbone or toy_backbone(), clients, **extra)

    def context(self, kind: str, round_: int = 0, rounds: int = 1) -> Context:
        """Return what the server's halves are given in a round of this kind."""
        return Context(
            kind=kind,
            task=self.task,
            round=round_,
            rounds=rounds,
            hparams=self.hparams,
            backbone_info=self.backbone.info,
            seed=(self.seed,),
            backbone=self.backbone,
            micro_batch=self.micro_batch,
            max_weight_share=self.max_weight_share,
            averaging=self.averaging,
            privacy=self.privacy,
            forms=self.forms,
            progress=self.progress.append,
        )

    @property
    def dims(self) -> dict[str, int]:
        """The values of the schemas' known symbols in the current task."""
        return self.method.dims(self.hparams, self.backbone.info, self.task)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The kinds of rounds of the current task, in order."""
        here = (e for e in self._declared if e.in_task(self.task.index) and not e.late)
        return tuple(e for e in here if self.unlabelled or not e.unlabelled)

    @property
    def _declared(self) -> tuple[Exchange, ...]:
        return self.method.exchanges(self.hparams, self.backbone.info)

    def open(self, task: TaskInfo) -> None:
        """Open a task, without a round of it."""
        self.task = task
        self.state = self.aggregator.open_task(self.context("train"), self.state)

    def parts(self) -> dict[str, Payload]:
        """Return the broadcast as a client gets it: through bytes, and as its schema says.

        Raises:
            AssertionError: a part breaks its schema.
        """
        schemas = self.method.broadcast(self.hparams, self.backbone.info)
        received = {}
        for part in self.aggregator.broadcast(self.context("train"), self.state):
            schema = schemas[part.kind]
            payload = unpack(pack(self.forms.narrow_exactly(part.payload, schema)))
            _check(f"part {part.name!r}", schema.check(payload, self.dims))
            received[part.name] = self.forms.widen(payload)
        return received

    def upload(self, kind: str, k: int, round_: int = 0, rounds: int = 1) -> Payload:
        """Return what client k sends, checked by the exchange's schema and rules.

        Raises:
            AssertionError: it breaks them.
        """
        exchange = next(e for e in self._declared if e.kind == kind)
        ctx = replace(self.context(kind, round_, rounds), seed=(self.seed, k))
        if exchange.unlabelled:
            sent = self._from_unlabelled(ctx, k)
        elif exchange.counts_once:
            sent = self._from_uncounted(ctx, exchange, k)
        else:
            own = self.clients[k].of(self.task.classes)
            _, sent = self._learn(ctx, State(), own)
        payload = unpack(pack(self.forms.narrow(sent, exchange.upload)))
        _check(f"upload of client {k}", exchange.upload.check(payload, self.dims))
        _check(f"upload of client {k}", exchange.check(payload, self.task))
        return self.forms.widen(payload)

    def _learn(self, ctx: Context, state: State, images: ToyImages) -> tuple[State, Payload]:
        """Let the learner work, and check that it returns a state and a payload."""
        result = self.learner.run(ctx, state, self.parts(), images)
        return learned(self.method.name, result)

    def _from_unlabelled(self, ctx: Context, k: int) -> Payload:
        """Have client k look at its unlabelled images, each until it is counted."""
        state = self._counted.get(k, State())
        offered, used = self.unlabelled[k], counted_digests(state)
        digests = [sha256(one.tobytes()).hexdigest() for one in offered.pictures]
        free = [i for i, digest in enumerate(digests) if digest not in used]
        images = ToyImages(offered.pictures[free], np.full(len(free), -1, dtype=np.int64))
        ctx = replace(ctx, digests=as_digests([digests[i] for i in free]))
        self._counted[k], sent = self._learn(ctx, state, images)
        return sent

    def _from_uncounted(self, ctx: Context, exchange: Exchange, k: int) -> Payload:
        """Have client k look at its images that are not counted yet, as its worker does."""
        state = self._counted.get(k, State())
        classes = classes_of(exchange.kind, self.task)
        own, used = self.clients[k].of(classes), counted_digests(state)
        digests = [sha256(one.tobytes()).hexdigest() for one in own.pictures]
        new = [i for i, digest in enumerate(digests) if digest not in used]
        enough = np.flatnonzero(np.bincount(own.labels[new]) >= exchange.least_images)
        new = [i for i in new if own.labels[i] in enough]
        state, sent = self._learn(ctx, state, ToyImages(own.pictures[new], own.labels[new]))
        described, seen = classes_with_images(sent, classes), as_digests([digests[i] for i in new])
        self._counted[k] = with_described(state, described, own.labels[new], seen)
        return sent

    def aggregate(self, kind: str, updates: UpdateList, round_: int = 0, rounds: int = 1) -> State:
        """Return the state that updates lead to; that of the federation stays."""
        ctx = self.context(kind, round_, rounds)
        after: State = self.aggregator.aggregate(ctx, self.state, updates)
        return after

    def round(
        self,
        kind: str = "train",
        round_: int = 0,
        rounds: int = 1,
        alter: Callable[[Payload], Payload] = lambda payload: payload,
    ) -> None:
        """Run one round with all clients; the state stays if no client has a sample.

        Args:
            kind: of the exchange.
            round_: its index.
            rounds: how many there are.
            alter: changes each upload on its way.
        """
        sent = [
            Update(client_id(k), alter(self.upload(kind, k, round_, rounds)))
            for k in range(len(self.clients))
            if k not in self.asleep
        ]
        updates = UpdateList.of(sent)
        if len(updates):
            self.state = self.aggregate(kind, updates, round_, rounds)

    def run(self, task: TaskInfo, rounds: int = 1) -> None:
        """Open a task and run all its exchanges."""
        self.open(task)
        for exchange in self.exchanges:
            for r in range(exchange.rounds or rounds):
                self.round(exchange.kind, r, exchange.rounds or rounds)

    def predictor(self) -> Predictor:
        """Return the global model as it is now."""
        ctx = self.context("evaluate")
        predictor: Predictor = self.model.compose(ctx, self.parts(), self.backbone)
        return predictor


def _check(what: str, faults: list[str]) -> None:
    if faults:
        raise AssertionError(f"{what}: {'; '.join(faults)}")
