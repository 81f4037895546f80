"""Exported models: accuracy, size, latency and memory, torch beside onnxruntime.

* digits: five tasks of two digits, three uneven clients, the embedded backbone; the model after the
  last task is exported in every precision, int8 calibrated on 256 train images;
* vit: a ViT-B/16 with random weights under a nearest-mean head of 100 classes.

Each figure of time and memory comes from a process of its own that loads one model and scores
images with it; the processes of one model run in turn, and the medians over the turns are shown::

    export OMP_NUM_THREADS=1
    python scripts/bench/export.py digits --folder /tmp/digits
    python scripts/bench/export.py vit --folder /tmp/vit
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from processes import peak_mb

from fcil_adapters.export.exported_model import ExportedModel, Precision

DIGITS: dict[str, dict[str, Any]] = {
    "pilora": {"preset": "short", "augment": "jitter"},
    "hgp": {"preset": "short", "augment": "jitter", "epochs": 3},
    "analytic": {},
}
VIT, VIT_CLASSES, VIT_IMAGES = "vit_base_patch16_224", 100, 8
CALIBRATION = 256
WARM, PASSES = 2, 9  # passes before, and of which the median is taken


@dataclass(frozen=True)
class Case:
    """A model that a process can load: the files in its folder, and what it needs to know."""

    folder: Path
    method: str
    backbone: str
    options: dict[str, Any]
    classes: tuple[tuple[int, ...], ...]  # of each task

    def images(self, side: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the pictures and labels of ``train`` or ``test``."""
        with np.load(self.folder / f"{side}.npz") as stored:
            return stored["pictures"], stored["labels"]

    def context(self) -> tuple[Any, Any, dict[str, Any]]:
        """Return the method, a context with the backbone, and the parts of the last broadcast."""
        from simulation import make_tasks

        from fcil_adapters.backbones.backbone import load_backbone
        from fcil_adapters.contract import Context
        from fcil_adapters.contract.registry import load_method, make_hparams
        from fcil_protocol.payloads.payload import unpack

        weights = self.folder / "weights.safetensors"
        backbone = load_backbone(self.backbone, weights if weights.exists() else None)
        method = load_method(self.method)
        ctx = Context(
            kind="evaluate",
            task=make_tasks(self.classes)[-1],
            round=0,
            rounds=1,
            hparams=make_hparams(method, self.options),
            backbone_info=backbone.info,
            backbone=backbone,
        )
        files = sorted(self.folder.glob(f"{self.method}.*.part"))
        parts = {f.name.split(".")[1].replace("-", "/"): unpack(f.read_bytes()) for f in files}
        return method, ctx, parts

    def keep(self, parts: dict[str, Any]) -> None:
        """Write the parts of a broadcast."""
        from fcil_protocol.payloads.payload import pack

        for name, payload in parts.items():
            path = self.folder / f"{self.method}.{name.replace('/', '-')}.part"
            path.write_bytes(pack(payload))

    def file(self, precision: str) -> Path:
        """Return where the exported model lies."""
        return self.folder / f"{self.method}.{precision}.onnx"


def learn(folder: Path) -> list[Case]:
    """Train every method on the digits, once for each folder."""
    from bench_data import all_digits, uneven
    from simulation import Simulation

    from fcil_adapters.backbones.backbone import load_backbone

    folder.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone()
    data = all_digits(backbone.info.preprocessing, 1)
    for name, images in (("train", data.train), ("test", data.test)):
        np.savez(folder / f"{name}.npz", pictures=images.pictures, labels=images.labels)
    cases = []
    for method, options in DIGITS.items():
        case = Case(folder, method, "embedded", options, tuple(t.classes for t in data.tasks))
        cases.append(case)
        if list(folder.glob(f"{method}.*.part")):
            continue
        simulation = Simulation.of(method, options, backbone, uneven(data.train), seed=1)
        last: dict[str, Any] = {}
        simulation.observe = lambda parts, last=last: last.update(parts=parts)
        simulation.run(data.tasks, data.test, rounds=2)
        case.keep(last["parts"])
        print(f"{method} has learned", file=sys.stderr)
    return cases


def vit(folder: Path) -> list[Case]:
    """Make a ViT-B/16 with random weights and means of random features."""
    import safetensors.torch
    import torch
    from simulation import Images, Simulation, make_tasks

    from fcil_adapters.backbones import backbone as backbones

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    labels = np.arange(VIT_CLASSES)
    pictures = rng.integers(0, 256, (VIT_CLASSES, 14, 14, 3)).astype(np.uint8)
    images = Images(np.repeat(np.repeat(pictures, 16, 1), 16, 2), labels)
    for side, count in (("train", 2 * VIT_IMAGES), ("test", VIT_IMAGES)):
        some = images.where(labels < count)
        np.savez(folder / f"{side}.npz", pictures=some.pictures, labels=some.labels)
    case = Case(folder, "fedncm", VIT, {}, (tuple(labels.tolist()),))
    if not (folder / "weights.safetensors").exists():
        torch.manual_seed(1)
        module = backbones.timm.create_model(VIT, pretrained=False, num_classes=0)
        safetensors.torch.save_file(module.state_dict(), folder / "weights.safetensors")
        backbone = backbones.load_backbone(VIT, folder / "weights.safetensors")
        simulation = Simulation.of("fedncm", {}, backbone, [images], seed=1)
        last: dict[str, Any] = {}
        simulation.observe = lambda parts: last.update(parts=parts)
        simulation.run_task(make_tasks(case.classes)[0], 1)
        case.keep(last["parts"])
    return [case]


def export(case: Case) -> dict[str, Any]:
    """Export in every precision; return accuracy and agreement with torch on the test images."""
    from fcil_adapters.contract.registry import load_half
    from fcil_adapters.export.exported_model import Origin
    from fcil_adapters.export.model_file import ExportOptions, export_model

    method, ctx, parts = case.context()
    train, _ = case.images("train")
    test, labels = case.images("test")
    predictor = load_half(method.model).compose(ctx, parts, ctx.backbone)
    classes = np.array(predictor.classes)
    expected = predictor.logits(test)
    found = {"torch": {"accuracy": float((classes[expected.argmax(1)] == labels).mean())}}
    for precision in get_args(Precision):
        began = time.monotonic()
        origin = Origin("bench", "bench", ctx.task.index, 0, {})
        options = ExportOptions(precision, force=True)
        some = train[: CALIBRATION if precision == "int8" else 16]
        info = export_model(method, ctx, parts, origin, case.file(precision), options, some)
        seconds = time.monotonic() - began
        model = ExportedModel.load(case.file(precision))
        scores = np.concatenate([model.logits(test[i : i + 64]) for i in range(0, len(test), 64)])
        found[precision] = {
            "accuracy": float((classes[scores.argmax(1)] == labels).mean()),
            "agreement": float((scores.argmax(1) == expected.argmax(1)).mean()),
            "error": info.checked.error,
            "mb": case.file(precision).stat().st_size / 1e6,
            "seconds": seconds,
        }
    return found


def child(case: Case, kind: str, batch: int) -> dict[str, float]:
    """Load one model in this process and time it; memory before images, and at most."""
    pictures, _ = case.images("test")
    images = np.resize(pictures, (batch, *pictures.shape[1:]))
    began = time.monotonic()
    if kind == "torch":
        import torch

        from fcil_adapters.contract.registry import load_half

        torch.set_num_threads(1)
        method, ctx, parts = case.context()
        score = load_half(method.model).compose(ctx, parts, ctx.backbone).logits
    else:
        score = ExportedModel.load(case.file(kind), "cpu", 1).logits
    loaded = time.monotonic() - began
    for _ in range(WARM):
        score(images)
    passes = []
    for _ in range(PASSES):
        began = time.perf_counter()
        score(images)
        passes.append(time.perf_counter() - began)
    import os

    return {"load": loaded, "ms": 1e3 * median(passes) / batch, "mb": peak_mb(os.getpid())}


def measure(case: Case, batches: tuple[int, ...], turns: int) -> dict[str, Any]:
    """Return medians over processes: kind -> batch -> figures."""
    told: dict[str, Any] = {}
    for _ in range(turns):
        for kind in ("torch", *get_args(Precision)):
            for batch in batches:
                words = [sys.executable, "-W", "ignore", __file__, "child", "--folder"]
                words += [str(case.folder), "--case", json.dumps(_fields(case))]
                words += ["--kind", kind, "--batch", str(batch)]
                done = subprocess.run(words, capture_output=True, check=True, text=True)
                told.setdefault(kind, {}).setdefault(batch, []).append(json.loads(done.stdout))
    return {
        kind: {
            batch: {key: median(row[key] for row in rows) for key in rows[0]}
            for batch, rows in by_batch.items()
        }
        for kind, by_batch in told.items()
    }


def _fields(case: Case) -> dict[str, Any]:
    return {
        "method": case.method,
        "backbone": case.backbone,
        "options": case.options,
        "classes": case.classes,
    }


def show(
    case: Case, found: dict[str, Any], timed: dict[str, Any], batches: tuple[int, ...]
) -> None:
    """Print the rows of one model in Markdown."""
    for kind in ("torch", *get_args(Precision)):
        f, t = found[kind], timed[kind]
        size = f"{f['mb']:.2f}" if "mb" in f else "-"
        agreement = f"{100 * f['agreement']:.1f}" if "agreement" in f else "-"
        error = f"{f['error']:.1e}" if "error" in f else "-"
        ms = " | ".join(f"{t[batch]['ms']:.2f}" for batch in batches)
        print(
            f"| {case.method} | {kind} | {100 * f['accuracy']:.1f} | {agreement} | {error} | "
            f"{size} | {ms} | {t[batches[0]]['mb']:.0f} | {t[batches[0]]['load']:.1f} |",
            flush=True,
        )


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("digits", "vit", "child"))
    parser.add_argument("--folder", type=Path, required=True, help="states and files are kept")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", help="one method")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "child":
        print(json.dumps(child(Case(args.folder, **args.case), args.kind, args.batch)))
        return
    cases = learn(args.folder) if args.what == "digits" else vit(args.folder)
    batches = (1, 64) if args.what == "digits" else (1,)
    columns = " | ".join(f"ms an image, batch {b}" for b in batches)
    print(
        f"| method | file | accuracy % | as torch % | error | MB | {columns} | peak MB | load s |"
    )
    print("|" + "---|" * (8 + len(batches)))
    for case in cases:
        if args.only in (None, case.method):
            show(case, export(case), measure(case, batches, args.turns), batches)


if __name__ == "__main__":
    main()
