"""The sections of `scripts/gpu`, each run as a process: ``gpu_sections.py SECTION OPTIONS``.

A section writes what it finds to its standard output at once, one JSON object a line (`head`,
`row`, `note`, `failed`, and `end` as the last); ``OPTIONS`` are the fields of `Wanted` as JSON. It
ends on its own when its time is up, or when `scripts/gpu` has ended. Tracebacks go to standard
error.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from aggregation import Device, aggregation
from image_size import images_per_s
from training import METHODS, Case, compare
from vit_updates import CASES, Job, prepare

from fcil_adapters.backbones.backbone import Backbone, load_backbone
from fcil_adapters.backbones.known import EMBEDDED_NAMES, backbone_by_name
from fcil_adapters.backbones.mixed_precision import mixed, precision_of
from fcil_adapters.backbones.probes import TOLERANCE, compare_probes, probe_images
from fcil_adapters.contract import State
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_protocol.errors import FcilError, NotYet, RunFailed, StorageError
from fcil_protocol.payloads.payload import pack
from fcil_protocol.process.child import end_with_parent, parent_pipe
from fcil_server.lab.engine import Engine
from fcil_server.lab.experiment import Experiment, load
from fcil_server.lab.local.demo import demo_config, write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.lab.plan import Cell
from fcil_server.lab.progress import Show
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.round_views import RoundView
from fcil_server.reports.results.run_data import RunData, collect

LOOK_S = 0.5  # between looks at a ledger
PICTURES = 28  # random ones, besides the four probe pictures
# Random numbers that pass the schema are no updates of theirs (`vit_updates`).
NOT_RANDOM = {"analytic", "fedproto", "running_mean"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What is measured, and where.

    Attributes:
        weights: of the backbone; None: random ones.
        data, experiment, only: of the paper's cell.
        work: folder for everything that is written.
        ends: when the section ends, on the system's monotonic clock.
    """

    device: str
    backbone: str
    weights: str | None
    clients: int
    data: str | None
    experiment: str
    only: str
    work: str
    ends: float

    @property
    def small(self) -> bool:
        """Without a GPU only the way is tried, with the least of everything."""
        return self.device == "cpu"

    def weights_of(self, name: str) -> Path | None:
        """Return a backbone's weights: the given file, or random ones in a file of this run."""
        if name in EMBEDDED_NAMES:
            return None
        if self.weights is not None:
            return Path(self.weights)
        path = Path(self.work) / f"{name}.safetensors"
        if not path.exists():
            import safetensors.torch
            import timm

            torch.manual_seed(0)
            state = timm.create_model(name, pretrained=False, num_classes=0).state_dict()
            half = path.with_suffix(".half")
            safetensors.torch.save_file(state, half)
            half.rename(path)
        return path

    def load(self, name: str, device: str) -> Backbone:
        return load_backbone(name, self.weights_of(name), device)


class TimeUp(BaseException):
    """The section's time is over."""


def head(*cells: str) -> Message:
    return {"head": cells}


def row(*cells: str, fits: bool | None = None) -> Message:
    """Return a row; ``fits``: a comparison is within its tolerance, None: it is none."""
    return {"row": cells, "fits": fits}


def note(text: str) -> Message:
    return {"note": text}


def failed(what: str) -> Message:
    """Return the failure that is being handled, and write its traceback."""
    error = sys.exc_info()[1]
    traceback.print_exc()
    words = error.message if isinstance(error, FcilError) else f"{type(error).__name__}: {error}"
    first = words.strip().splitlines()[0][:400] if words.strip() else type(error).__name__
    return {"failed": f"{what}: {first.rstrip('.')}."}


# --- features -------------------------------------------------------------------------------


def features(w: Wanted) -> Iterator[Message]:
    """Features of the device against the CPU's, as the handshake compares them."""
    yield head("backbone", "device", "precision", "largest difference", "within 1e-3", "images/s")
    for name in dict.fromkeys(("embedded", w.backbone)):
        try:
            yield from _features(w, name)
        except Exception:
            yield failed(name)
    yield note(
        "Largest difference: of a picture's feature, relative to its length, over the four probe "
        f"pictures of the handshake and {PICTURES} random ones. A feature is computed in fp32; "
        "the other rows are for information."
    )


def _features(w: Wanted, name: str) -> Iterator[Message]:
    cpu, other = w.load(name, "cpu"), w.load(name, w.device)
    probes = probe_images(cpu.info)
    more = np.random.default_rng(1).integers(0, 256, (PICTURES, *probes.shape[1:]), dtype=np.uint8)
    images = np.concatenate([probes, more])
    expected = cpu.features(images)
    if w.device != "cpu":
        yield row(name, "cpu", "fp32", "", "", _speed(cpu, 32))
    for precision, context, counts in ways(w.device):
        with context():
            distance = compare_probes(other.features(images), expected)
            fits = distance <= TOLERANCE
            speed = _speed(other, 16 if w.small else 256)
        cells = (f"{distance:.1e}", "yes" if fits else "no", speed)
        yield row(name, w.device, precision, *cells, fits=fits if counts else None)


def ways(device: str) -> list[tuple[str, Callable[[], AbstractContextManager[None]], bool]]:
    """Return the ways to compute a feature: name, context, and whether fcil computes it so."""
    cuda = [("fp32 without TF32", without_tf32, False)] if device.startswith("cuda") else []
    return [("fp32", nullcontext, True), *cuda, ("bf16", lambda: mixed("bf16", device), False)]


@contextmanager
def without_tf32() -> Iterator[None]:
    """Keep cuDNN's convolutions, here the patch embedding, from rounding to TF32, torch's default.

    Products of matrices do not by default.
    """
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _speed(backbone: Backbone, batch: int) -> str:
    images_per_s(backbone, batch)
    return f"{statistics.median(images_per_s(backbone, batch) for _ in range(3)):.0f}"


# --- training -------------------------------------------------------------------------------


def training(w: Wanted) -> Iterator[Message]:
    """A step of each learner beside a step of the bare timm model, fp32 and mixed."""
    yield head("method", "precision", "batch", "images/s", "bare images/s", "step / bare step")
    backbone = w.load(w.backbone, w.device)
    images, batch, epochs, repeat = (24, 8, 1, 1) if w.small else (128, 64, 2, 3)
    names = METHODS[:1] if w.small else (*METHODS, *_other_learners())
    for name in names:
        try:
            case = Case.of(name, backbone, {"batch_size": batch, "epochs": epochs}, images)
            for choice in ("fp32", "amp"):
                backbone.precision = precision_of(choice, w.device)
                found = compare(case, repeat, backbone.training)
                speeds = (f"{found[k]:.0f}" for k in ("images_per_s", "bare_images_per_s"))
                yield row(name, backbone.precision, str(batch), *speeds, f"{1 / found['step']:.2f}")
        except Exception:
            yield failed(name)
    yield note(
        f"Medians of {repeat} turns, the device idle before each reading of the clock; more than 1 "
        "is slower than the bare step, which has no loss, no optimiser and no augmentation "
        "(scripts/bench/training.py)."
    )


def _other_learners() -> list[str]:
    """Return the other methods that train in blocks of the backbone, where bare timm can too."""
    found = []
    for name in method_names():
        method = load_method(name)
        trains = method.needs_backbone and not method.frozen
        if trains and name not in METHODS and "blocks" in method.hparams.model_fields:
            found.append(name)
    return found


# --- aggregation ----------------------------------------------------------------------------


def aggregators(w: Wanted) -> Iterator[Message]:
    """The state after a round, computed on the device and on the CPU from the same updates."""
    gpu = ["GPU peak MB"] if w.device.startswith("cuda") else []
    yield head("case", "task", "clients", "largest difference", "of tensor", "within 1e-3",
               "CPU s", "device s", *gpu)  # fmt: skip
    cases = ["pilora", "hgp-diag"] if w.small else [*CASES, *_other_aggregators()]
    for case in cases:
        job = Job(
            case=case, clients=2 if w.small else 10, task=0, images=50, seed=1, device="cpu",
            repeat=1 if w.small or case == "hepco" else 3, steps=3, average=False, options={},
            folder="",
        )  # fmt: skip
        with tempfile.TemporaryDirectory(dir=w.work) as folder:
            try:
                yield from _tasks(replace(job, folder=folder), w, tasks=1 if w.small else 2)
            except Exception:
                yield failed(case)
    yield note(
        "Largest difference: of a tensor of the state, relative to its length, over all tensors; "
        "HePCo ran 3 steps of each loop. Methods with the same aggregator are compared once. Not "
        f"compared: {', '.join(sorted(NOT_RANDOM))}, which compute without torch or average only."
    )


def _tasks(job: Job, w: Wanted, tasks: int) -> Iterator[Message]:
    """Run the tasks of a case; the CPU's state is the beginning of the next task."""
    for task in range(tasks):
        now = replace(job, task=task)
        prepare(now)
        expected, cpu_s, _ = _timed(now)
        found, device_s, peak = _timed(replace(now, device=w.device))
        distance, name = largest_difference(found, expected)
        fits = distance <= TOLERANCE
        cells = [job.case, str(task), str(job.clients), f"{distance:.1e}", name]
        cells += ["yes" if fits else "no", f"{cpu_s:.3f}", f"{device_s:.3f}"]
        cells += [] if peak is None else [f"{peak / 1e6:.0f}"]
        yield row(*cells, fits=fits)
        now.path("state").write_bytes(pack(expected))


def _timed(job: Job) -> tuple[State, float, int | None]:
    """Return the state, the median seconds of a call, and the GPU's peak memory in bytes."""
    device, call, taken = Device(job.device), aggregation(job), []
    for _ in range(job.repeat):
        began = time.perf_counter()
        state = call()  # numpy: the device has finished
        taken.append(time.perf_counter() - began)
    return state, statistics.median(taken), device.peak()


def largest_difference(found: State, expected: State) -> tuple[float, str]:
    """Return the largest ``||a - b|| / ||b||`` over the tensors of two states, and its tensor.

    It is infinite where a tensor is missing, has another shape, or a value is not finite.
    """
    worst, where = 0.0, "-"
    for name in sorted(found.tensors.keys() | expected.tensors.keys()):
        a, b = found.tensors.get(name), expected.tensors.get(name)
        if a is None or b is None or a.shape != b.shape:
            return float("inf"), name
        left, right = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
        least = np.finfo(np.float64).tiny
        distance = float(np.linalg.norm(left - right) / max(np.linalg.norm(right), least))
        if not np.isfinite(distance):
            return float("inf"), name
        if distance > worst:
            worst, where = distance, name
    return worst, where


def _other_aggregators() -> list[str]:
    """Return a method for each aggregator that no case of `CASES` has."""
    known = {load_method(method).aggregator for method, _ in CASES.values()}
    found = []
    for name in sorted(set(method_names()) - NOT_RANDOM):
        aggregator = load_method(name).aggregator
        if aggregator not in known:
            known.add(aggregator)
            found.append(name)
    return found


# --- a federation ---------------------------------------------------------------------------


def federation(w: Wanted) -> Iterator[Message]:
    """PILoRA on digits: a server and clients, each a daemon and a worker, on one device."""
    yield head("round", "clients", "s", "tensors up / down, MB", "on the wire up / down, MB")
    folders = write_digits(Path(w.work) / "digits", w.clients)
    weights = w.weights_of(w.backbone)
    settings = {
        "tasks.classes": '[["0", "1"]]' if w.small else '[["0", "1"], ["2", "3"]]',
        "round.rounds_per_task": 1 if w.small else 2,
        "run.backbone": w.backbone,
        "run.device": w.device,
        "run.evaluate": "false",
        **({"run.weights": str(weights)} if weights else {}),
    }
    given = (*demo_config(w.clients), *(f"{k}={v}" for k, v in settings.items()))
    options = ["--device", w.device, *(["--weights", str(weights)] if weights else [])]
    with LocalFederation(Path(w.work) / "federation") as local:
        local.serve("--until-done", *(word for text in given for word in ("-c", text)))
        for folder in folders:
            local.join(folder.name, folder, *options)
        data = yield from _watched(local)
    sides = [data.bytes_of(way) for way in (Direction.UP, Direction.DOWN)]
    seconds = [_seconds(view) for view in data.rounds]
    yield row(
        "all, with handshakes",
        str(w.clients),
        f"median {statistics.median(seconds):.1f}",
        " / ".join(f"{side.tensor / 1e6:.2f}" for side in sides),
        " / ".join(f"{side.true_wire / 1e6:.2f}" for side in sides),
    )
    yield note(
        "Method: PILoRA's preset short on scikit-learn's digits, all processes on one machine; the "
        "first round has the start of the workers and the loading of the backbone in it."
    )


def _watched(local: LocalFederation) -> Iterator[Message]:
    """Yield the rounds as they close, until the server has ended; return the run."""
    assert local.server is not None
    shown = closed = 0
    while True:
        over = local.server.poll() is not None
        data = _run_of(local.federation)
        views = () if data is None else data.rounds
        # One look later: the last bytes of a round are counted after it has closed.
        for view in views[shown : len(views) if over else closed]:
            yield _round(view)
            shown += 1
        closed = len(views)
        if over:
            break
        local.check_clients()
        with suppress(subprocess.TimeoutExpired):
            local.server.wait(LOOK_S)
    if local.server.returncode or data is None:
        raise RunFailed(f"the server failed: {local.last_words('server')}")
    return data


def _run_of(folder: Path) -> RunData | None:
    """Return a federation's run as far as it is; None before it has begun."""
    with suppress(StorageError), Ledger(folder / LEDGER_NAME, read_only=True) as ledger:
        newest = ledger.runs.newest()
        return None if newest is None else collect(ledger, newest.run_id)
    return None


def _round(view: RoundView) -> Message:
    sides = (view.up, view.down)
    return row(
        f"task {view.round.task}, {view.round.kind} {view.round.round}",
        str(len(view.counted)),
        f"{_seconds(view):.1f}",
        " / ".join(f"{side.tensor / 1e6:.2f}" for side in sides),
        " / ".join(f"{side.true_wire / 1e6:.2f}" for side in sides),
    )


def _seconds(view: RoundView) -> float:
    assert view.round.closed_at is not None
    return view.round.closed_at - view.round.opened_at


# --- a cell of a paper's table --------------------------------------------------------------


def cell(w: Wanted) -> Iterator[Message]:
    """One cell of an experiment by the laboratory, as far as the time allows."""
    experiment = load(Path(w.experiment))
    setting = experiment.setting
    if setting.weights:
        os.environ[setting.weights.strip("${}")] = str(w.weights_of(setting.backbone))
    changed = setting.model_copy(update={"device": w.device})
    experiment = experiment.model_copy(update={"setting": changed})
    only = w.only or f"{experiment.rows[0].title}/{experiment.partitions[0].name}"
    engine = Engine.of(experiment, Path(w.work) / "results", only=[only], seeds=setting.seeds[:1])
    [chosen, *_] = engine.chosen
    began, stopped, reasons = time.monotonic(), False, {}
    try:
        reasons = engine.run(None if w.data is None else Path(w.data), 1, Show())
    except (TimeUp, KeyboardInterrupt):  # the latter: the laboratory's own answer to SIGTERM
        stopped = True
    seconds = time.monotonic() - began
    yield head("cell", "rounds", "of", "median s of a round", "s", "whole cell, s", "FAA", "AIA")
    yield _cell_row(engine, chosen, planned_rounds(experiment, chosen), seconds)
    if stopped:
        yield note(
            f"It was stopped after {seconds:.0f} s, when its time was up; the seconds of the whole "
            "cell are extrapolated from its closed rounds and the time between them."
        )
    for reason in reasons.values():
        yield {"failed": reason}
    if setting.weights and w.weights is None:
        yield note("The weights are random: its accuracies mean nothing, its seconds do.")


def _cell_row(engine: Engine, chosen: Cell, planned: int, seconds: float) -> Message:
    try:
        done = engine.results.finished([chosen], engine.results.known()).get(chosen.name)
    except NotYet:  # it was stopped before the partition was drawn
        done = None
    if done is not None:
        percent = [f"{done[k]:.1f}" for k in ("faa", "aia")]
        rounds, took = int(done["rounds"]["all"]), done["seconds"]["wall_s"]
        each = f"{took / max(rounds, 1):.1f} (mean)"
        return row(chosen.name, str(rounds), str(planned), each, f"{took:.0f}", f"{took:.0f}",
                   *percent)  # fmt: skip
    views: Sequence[RoundView] = ()
    for folder in engine.results.folder.glob("work/*/federation"):
        data = _run_of(folder)
        views = () if data is None else data.rounds
    each = whole = ""
    if views:
        last = views[-1].round.closed_at
        assert last is not None, "it is closed"
        each = f"{statistics.median(map(_seconds, views)):.1f}"
        whole = f"{(last - views[0].round.opened_at) / len(views) * planned:.0f}"
    return row(chosen.name, str(len(views)), str(planned), each, f"{seconds:.0f}", whole, "", "")


def planned_rounds(experiment: Experiment, chosen: Cell) -> int:
    """Return the rounds of a cell: of all tasks and all exchanges."""
    method = load_method(chosen.method)
    h = make_hparams(method, dict(chosen.hparams))
    info = backbone_by_name(experiment.setting.backbone)
    a_task = int(chosen.settings["round"]["rounds_per_task"])
    return chosen.split.tasks * sum(e.rounds or a_task for e in method.exchanges(h, info))


# --- the process ----------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Wanted], Iterator[Message]]] = {
    "features": features,
    "training": training,
    "aggregation": aggregators,
    "federation": federation,
    "cell": cell,
}


def say(message: Message) -> None:
    print(json.dumps(message), flush=True)


def _time_up(_number: int, _frame: FrameType | None) -> NoReturn:
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # one is enough: what is cleaned up now must not end
    raise TimeUp


def run(name: str, w: Wanted) -> None:
    """Run a section and say what it finds, for as long as its time allows."""
    try:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, _time_up)
        signal.setitimer(signal.ITIMER_REAL, max(w.ends - time.monotonic(), 1e-6))
        with closing(SECTIONS[name](w)) as messages:  # type: ignore[type-var]
            for message in messages:
                say(message)
    except TimeUp:
        say(note("It was stopped here: its time was up."))
    except Exception:
        say(failed(name))
    signal.setitimer(signal.ITIMER_REAL, 0)
    say({"end": True})


if __name__ == "__main__":
    end_with_parent(parent_pipe())
    run(sys.argv[1], Wanted(**json.loads(sys.argv[2])))
