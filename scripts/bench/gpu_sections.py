"""The sections of `scripts/gpu`, each run as a process: ``gpu_sections.py SECTION OPTIONS``.

A section writes what it finds to its standard output at once, one JSON object a line (`head`,
`row`, `note`, `failed`, and `end` as the last); ``OPTIONS`` are the fields of `Wanted` as JSON. It
ends on its own when its time is up, or when `scripts/gpu` has ended. Tracebacks go to standard
error.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from aggregation import Device, aggregation
from gpu_messages import Message, TimeUp, Wanted, failed, head, note, row
from gpu_processes import cell, federation
from image_size import images_per_s
from numpy.typing import NDArray
from training import METHODS, Case, compare
from vit_updates import CASES, Job, prepare

from fcil_adapters.backbones.backbone import Backbone, mixed, precision_of
from fcil_adapters.backbones.probes import TOLERANCE, compare_probes, probe_images
from fcil_adapters.contract import State
from fcil_adapters.contract.registry import load_method, method_names
from fcil_protocol.payloads.payload import pack
from fcil_protocol.process.child import end_with_parent, parent_pipe

PICTURES = 28  # random ones, besides the four probe pictures
# Random numbers that pass the schema are no updates of theirs (`vit_updates`).
NOT_RANDOM = {"analytic", "fedproto", "running_mean"}

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
    cuda = [("fp32 with TF32", with_tf32, False)] if device.startswith("cuda") else []
    return [("fp32", nullcontext, True), *cuda, ("bf16", lambda: mixed("bf16", device), False)]


@contextmanager
def with_tf32() -> Iterator[None]:
    """Let cuDNN's convolutions, here the patch embedding, round to TF32, as is torch's default.

    Products of matrices do not by default.
    """
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, True
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

    Two factors ``X.L`` and ``X.R`` of one matrix are compared by their product ``X``: an SVD fixes
    them up to signs, and up to turns within equal singular values.
    It is infinite where a tensor is missing, has another shape, or a value is not finite.
    """
    worst, where = 0.0, "-"
    ours, theirs = _multiplied(found.tensors), _multiplied(expected.tensors)
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
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


def _multiplied(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the tensors, with the product in place of each pair of factors."""
    found = dict(tensors)
    for left in [name for name in tensors if name.endswith(".L")]:
        whole = left.removesuffix(".L")
        right = f"{whole}.R"
        if right in tensors and tensors[left].shape[1:] == tensors[right].shape[:1]:
            L, R = found.pop(left).astype(np.float64), found.pop(right).astype(np.float64)
            found[whole] = L @ R
    return found


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
