"""Random but valid updates as large as ViT-B/16 makes them, as files, for `aggregation.py`.

Every update passes its schema and its exchange's check. Every client has images of all classes
of the task. Class means and Gaussians are statistics of random features with correlated
coordinates. No backbone weights are needed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Context, Exchange, Method, Progress, State, TaskInfo
from fcil_adapters.contract.registry import load_half, load_method, make_hparams
from fcil_adapters.numerics.class_reports import report_tensors
from fcil_adapters.toolkit.gaussians.gaussian import describe, pack_gaussians
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import Array, Payload, pack, unpack
from fcil_protocol.payloads.schema import Kind, TensorSpec
from fcil_server.aggregation.pulled_updates import PulledUpdates

VIT = backbone_by_name("vit_base_patch16_224")
CLASSES = 10  # of each task
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pilora": ("pilora", {}),
    "plora": ("plora", {}),
    "fed_talora": ("fed_talora", {}),
    "hgp-lowrank": ("hgp", {"cov": "lowrank"}),
    "hgp-full": ("hgp", {"cov": "full"}),
    "hgp-diag": ("hgp", {"cov": "diag"}),
    "hepco": ("hepco", {}),
}
# Standard deviation of the entries that all clients share; each client adds a tenth of its own.
SHARED = {Kind.LORA: 0.02, Kind.PROMPT: 0.3, Kind.KEY: 0.3, Kind.PROTOTYPE: 1.0, Kind.HEAD: 0.05}
OWN = 0.1
FEATURE_RANK, FEATURE_NOISE = 64, 0.3

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One case with one number of clients and one task.

    Attributes:
        case: of `CASES`, or a method with its defaults.
        images: of each class on each client, on average.
        steps: of each loop of HePCo's server, where not all are run; None: all.
        average: measure the weighted mean of what is averaged instead of the aggregation.
    """

    case: str
    clients: int
    task: int
    images: int
    seed: int
    device: str
    repeat: int
    steps: int | None
    average: bool
    options: dict[str, Any]
    folder: str

    @property
    def method(self) -> Method:
        return load_method(self._of_case[0])

    @property
    def hparams(self) -> Any:
        return make_hparams(self.method, {**self._of_case[1], **self.options})

    @property
    def _of_case(self) -> tuple[str, dict[str, Any]]:
        return CASES.get(self.case, (self.case, {}))

    @property
    def run_hparams(self) -> Any:
        """The hyper-parameters of the calls: those of the case, with the steps that are run."""
        if self.steps is None or self.method.name != "hepco":
            return self.hparams
        fewer = {"generator_steps": self.steps, "distillation_steps": self.steps}
        return self.hparams.model_copy(update={**fewer, "old_steps": "fixed"})

    def path(self, name: str) -> Path:
        return Path(self.folder) / name

    def context(self, kind: str, progress: Callable[[Progress], None] = lambda _: None) -> Context:
        ids = tuple(range(CLASSES * (self.task + 1)))
        first = CLASSES * self.task
        return Context(
            kind=kind,
            task=TaskInfo(self.task, ids[first:], ids[:first]),
            round=0,
            rounds=1,
            hparams=self.run_hparams,
            backbone_info=VIT,
            device=self.device,
            seed=(self.seed,),
            progress=progress,
        )

    def rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.task, *purpose])


def prepare(job: Job) -> dict[str, Any]:
    """Open the task, run the exchanges before ``train``, and write state and updates to files."""
    aggregator, ctx = load_half(job.method.aggregator), job.context("train")
    state = unpack(job.path("state").read_bytes()) if job.task else aggregator.init(ctx)
    state = aggregator.open_task(ctx, state)
    for exchange in job.method.exchanges(job.hparams, VIT):
        write_updates(job, exchange, state)
        if exchange.kind == "train":
            break
        state = aggregator.aggregate(job.context(exchange.kind), state, open_updates(job))
    job.path("state").write_bytes(pack(state))
    return {}


def write_updates(job: Job, exchange: Exchange, state: State) -> None:
    samples = {}
    job.path("updates").mkdir(exist_ok=True)
    for k in range(job.clients):
        words = np.random.default_rng([job.seed, k, 6]).bytes(16)  # the same in every task
        client = base64.b32encode(words).decode("ascii").rstrip("=").lower()
        payload = make_update(job, exchange, state, k)
        samples[client] = int(payload.i64("n").sum())
        job.path(f"updates/{client}").write_bytes(pack(payload))
    job.path("samples.json").write_text(json.dumps(samples))


def make_update(job: Job, exchange: Exchange, state: State, k: int) -> Payload:
    """Return what client k may send in this exchange."""
    task = job.context(exchange.kind).task
    dims = job.method.dims(job.hparams, VIT, task)
    told = tell(job, exchange, task, k)
    tensors: dict[str, Array] = {}
    for spec in exchange.upload.tensors:
        if spec.name in told:
            tensors[spec.name] = told[spec.name]
        elif not spec.optional:
            tensors[spec.name] = draw(job, spec, dims, k)
    payload = Payload(tensors, {m.name: state.meta[m.name] for m in exchange.upload.meta})
    faults = exchange.upload.check(payload, dims) + exchange.check(payload, task)
    if faults:
        raise SystemExit(f"{job.case}: an update is not valid: {'; '.join(faults)}.")
    return payload


def tell(job: Job, exchange: Exchange, task: TaskInfo, k: int) -> dict[str, Array]:
    """Return counts, class means and Gaussians of client k, as far as the exchange asks."""
    names = {spec.name for spec in exchange.upload.tensors}
    half = job.images // 2
    counts = job.rng(k, 1).integers(job.images - half, job.images + half + 1, CLASSES)
    needed = {"owned", "gauss.mean"} & names
    classes = zip(task.classes, counts.tolist(), strict=True)
    own = [features(job, k, c, n) for c, n in classes] if needed else []
    means = np.stack([x.mean(0) for x in own]) if own else np.zeros((CLASSES, VIT.dim))
    told = report_tensors(task.classes, means, counts, least=1)
    if "gauss.mean" in names:
        h = job.hparams
        told |= pack_gaussians([describe(x, h.cov, h.cov_rank) for x in own], VIT.dim, h.cov)
    # In a task of several classes a lone ``mean`` (Fed-TaLoRA) stays at home.
    return {n: a for n, a in told.items() if n != "mean" or "owned" in names}


def features(job: Job, k: int, label: int, count: int) -> F64:
    """Return features (count, d): a class centre, a client's shift, correlated coordinates."""
    common = np.random.default_rng([job.seed, label, 2])
    mix = common.standard_normal((FEATURE_RANK, VIT.dim)) / np.sqrt(FEATURE_RANK)
    centre = common.standard_normal(VIT.dim)
    rng = job.rng(k, label, 3)
    shift = OWN * rng.standard_normal(VIT.dim)
    noise = FEATURE_NOISE * rng.standard_normal((count, VIT.dim))
    values: F64 = centre + shift + rng.standard_normal((count, FEATURE_RANK)) @ mix + noise
    return values


def draw(job: Job, spec: TensorSpec, dims: dict[str, int], k: int) -> F32:
    """Return a random tensor of a schema: what all clients share, and a part of this client's."""
    shape = tuple(s if isinstance(s, int) else dims[s] for s in spec.shape)
    word = zlib.crc32(spec.name.encode())
    own: F32 = job.rng(k, 4, word).standard_normal(shape, dtype=np.float32)
    values: F32 = SHARED[spec.kind] * (shared(job.seed, job.task, word, shape) + OWN * own)
    return values.astype(np.float32)


@cache
def shared(seed: int, task: int, word: int, shape: tuple[int, ...]) -> F32:
    rng = np.random.default_rng([seed, task, 5, word])
    return rng.standard_normal(shape, dtype=np.float32)


@dataclass(frozen=True)
class Files:
    """Stands where `PulledUpdates` expects the call of the worker: updates come from files."""

    paths: tuple[Path, ...]

    def ask_ahead(self, fields: dict[str, Any]) -> int:
        return int(fields["updates"][0])

    def answer(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        return {}, [self.paths[number].read_bytes()]


def open_updates(job: Job) -> PulledUpdates:
    """Return the updates that `prepare` wrote; each is read when its turn comes."""
    samples = json.loads(job.path("samples.json").read_text())
    clients = tuple(ClientId(c) for c in sorted(samples))
    files: Any = Files(tuple(job.path(f"updates/{c}") for c in clients))
    numbers = tuple(range(len(clients)))
    return PulledUpdates(files, clients, tuple(samples[c] for c in clients), numbers)
