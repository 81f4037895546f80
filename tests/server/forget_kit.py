"""Runs of methods that can forget, as a stopped server leaves them, computed without processes.

Real learners and aggregators in this process, on a feature extractor of a few numbers; the
ledger, the states and the kept updates are what a server writes.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from adapters.frozen_kit import Colours
from adapters.kit import Federation as Method
from adapters.kit import Images, client_id, make_tasks
from fcil_adapters.contract import Update
from fcil_adapters.contract.backbone_info import backbone_fields
from fcil_adapters.contract.registry import load_half, schema_digest
from fcil_adapters.numerics.update_list import UpdateList
from fcil_protocol.ids import RoundKey, RunId, UpdateId, new_run_id
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.combining import Combined
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.federation.config import Config, load, to_toml
from fcil_server.federation.directory import Federation
from fcil_server.ledger.enums import OPENING, Outcome
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.runs import forget_offline
from fcil_server.runs.forget import Forgotten

NAMES = ("ann", "ben", "cat", "dan")
COLOURS = Colours()


class Here(Aggregation):
    """The worker's part in this process, on a backbone that needs no torch."""

    async def load_backbone(self):
        return COLOURS.info, None

    async def init(self, ctx):
        return load_half(self._method.aggregator).init(ctx)

    async def open_task(self, ctx, state):
        return load_half(self._method.aggregator).open_task(ctx, state)

    async def aggregate(self, ctx, state, updates, _older):
        opened = UpdateList.of(Update(u.client, self.open_update(u)) for u in updates)
        return Combined(load_half(self._method.aggregator).aggregate(ctx, state, opened))


@dataclass
class Story:
    """One run: who sent what to which task.

    Attributes:
        groups: the classes of each task; consecutive ids.
        uploads: task and client -> payload; absent ones did not take part.
        state: the newest.
    """

    directory: Path
    method: Method
    groups: tuple[tuple[int, ...], ...]
    uploads: dict[tuple[int, int], Payload]
    keep: bool = True
    settings: tuple[str, ...] = ()
    run: RunId = field(default_factory=new_run_id)
    enrols: bool = True

    @property
    def config(self) -> Config:
        chosen = self.method.hparams.model_dump(exclude_none=True)
        options = [f"method.{k}={v}" for k, v in chosen.items()]
        given = (f"method.name={self.method.method.name}", *options, *self.settings)
        return load(None, [*given, f"run.keep_updates={str(self.keep).lower()}"])

    def write(self, *, pruned: bool = False) -> Story:
        """Write the federation, as its server leaves it."""
        federation = Federation.open(self.directory, None, ())
        try:
            self._begin(federation.ledger)
            states = StateStore(states_folder(self.directory, self.run), keep=1)
            for task in make_tasks(*self.groups):
                self._learn(federation.ledger, states, task)
                if pruned:
                    states.prune()
        finally:
            federation.close()
        return self

    def again(self) -> Story:
        """Begin a second run in the same federation, and let the same happen."""
        other = replace(self, run=new_run_id(), enrols=False)
        return other.write()

    def _begin(self, ledger: Ledger) -> None:
        if self.enrols:
            self._enrol(ledger)
        self._begin_run(ledger)

    def _enrol(self, ledger: Ledger) -> None:
        for k, name in enumerate(NAMES):
            keys = PrivateKeys.generate().public
            ledger.clients.add(
                client_id(k), name, curve=keys.curve, signing=keys.signing, sealing=keys.sealing
            )

    def _begin_run(self, ledger: Ledger) -> None:
        config, method = self.config, self.method
        ledger.runs.add(
            self.run,
            method=method.method.name,
            method_version=method.method.version,
            config=to_toml(config),
            hparams=method.hparams.model_dump(mode="json"),
            backbone=backbone_fields(COLOURS.info),
            schema_digest=schema_digest(
                method.method, method.hparams, COLOURS.info, config.privacy.terms
            ),
            seed=config.run.seed,
        )
        registry = ClassRegistry(ledger, self.run)
        registry.register_listed([[f"class {c}" for c in group] for group in self.groups])

    def _learn(self, ledger: Ledger, states: StateStore, task) -> None:
        method, registry = self.method, ClassRegistry(ledger, self.run)
        registry.open_task(task.index)
        method.task = task
        method.max_weight_share = self.config.trust.max_weight_share
        opening = method.context(OPENING)
        before = method.aggregator.init(opening) if task.index == 0 else method.state
        method.state = method.aggregator.open_task(opening, before)
        self._save(ledger, states, RoundKey(self.run, task.index, OPENING, 0))
        sent = {k: p for (t, k), p in sorted(self.uploads.items()) if t == task.index}
        key = RoundKey(self.run, task.index, "train", 0)
        ledger.rounds.open(key, asked=[client_id(k) for k in sent], base_state=2 * task.index)
        self._accept(ledger, key, sent)
        if sent:
            updates = UpdateList.of(Update(client_id(k), p) for k, p in sent.items())
            method.state = method.aggregator.aggregate(
                method.context("train"), method.state, updates
            )
        self._save(ledger, states, key)
        with ledger.transaction():
            ledger.updates.mark_counted(key)
            ledger.rounds.close(key, Outcome.DONE, new_state=2 * task.index + 1)
        for k in sent:
            ledger.evaluations.add(self.run, task.index, client_id(k), {0: (1, 2)})
        ledger.tasks.close(self.run, task.index)

    def _accept(self, ledger: Ledger, key: RoundKey, sent: dict[int, Payload]) -> None:
        for k, payload in sent.items():
            data = pack(payload)
            name = hashlib.sha256(f"{key}{k}".encode() + data).hexdigest()
            with ledger.transaction():
                ledger.updates.accept(
                    key,
                    client_id(k),
                    update_id=UpdateId(name),
                    samples=int(payload.i64("n")[0]),
                    tensor_bytes=len(data),
                    sealed_bytes=len(data),
                )
            if self.keep:
                KeptUpdates(kept_folder(self.directory, self.run)).put([(name, data)])

    def _save(self, ledger: Ledger, states: StateStore, key: RoundKey) -> None:
        newest = ledger.states.newest(self.run)
        number = newest.state + 1 if newest else 0
        parent = newest.digest if newest else None
        digest = states.save(number, self.method.state, parent, key.task)
        ledger.states.add(key, number, digest, parent)

    def ledger(self) -> Ledger:
        return Ledger(self.directory / LEDGER_NAME)

    def forget(self, name: str, *, revoke: bool = False, run: str | None = None) -> Forgotten:
        federation = Federation.open(self.directory, None, ())
        try:
            work = forget_offline.forget(
                federation, name, run, actor="me", notify=lambda *_: None, revoke=revoke
            )
            return asyncio.run(work)
        finally:
            federation.close()

    def newest(self, run: RunId) -> Payload:
        """Return the newest state of a run."""
        store = StateStore(states_folder(self.directory, run))
        return store.load(store.numbers()[-1])


def learners(name: str, clients: list[Images], groups, **options):
    """Return the method's federation, and what every client sends to every task."""
    method = Method.of(name, clients, COLOURS, **options)
    method.seed, (method.task, *_) = load(None).run.seed, make_tasks(*groups)
    method.state = method.aggregator.init(
        method.context(OPENING)
    )  # as the story does, and a server
    uploads = {}
    for task in make_tasks(*groups):
        method.open(task)
        for k in range(len(clients)):
            payload = method.upload("train", k)
            if int(payload.i64("n")[0]):
                uploads[task.index, k] = payload
    return method, uploads


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in this process."""
    monkeypatch.setattr(forget_offline, "Aggregation", Here)
