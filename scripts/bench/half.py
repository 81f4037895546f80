"""What half precision on the wire costs and saves: each method with ``[wire] half`` and without.

Both run in one process on the same images, seeds and draws, on the embedded backbone; settings
are small. Lines are appended to a JSON-lines file, and what is there is not measured again::

    export OMP_NUM_THREADS=1
    python scripts/bench/half.py --rows half.jsonl --seeds 1 2 3
    python scripts/bench/half.py --rows half.jsonl --data cifar100.zip --seeds 1 2
    python scripts/bench/half.py --rows half.jsonl --show

``lost`` is the largest share of a round's training that the rounding of the uploads took away
(`Forms.rounding_loss`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from bench_data import Data, Partition, cifar100, digits, dirichlet, quantity
from simulation import Simulation

from fcil_adapters.backbones.backbone import Backbone, load_backbone
from fcil_adapters.contract import Context, ImageSet, State
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.contract.registry import find_exchange, load_method
from fcil_protocol.payloads.payload import Payload

FORMS = ("none", "weights")
TRAIN, TEST = 24, 30  # images of each class


@dataclass(frozen=True)
class Setting:
    """What a method is measured with.

    Attributes:
        split: how clients share the images.
        groups: tasks, classes per task.
        options: over the preset ``short``.
    """

    split: Partition
    clients: int
    groups: tuple[int, int]
    options: Mapping[str, Any]


# No mirror images: a mirrored digit is no digit.
_DIGITS = {"augment": "jitter"}
SETTINGS = {
    "hgp": Setting(dirichlet(0.5), 3, (3, 2), {**_DIGITS, "epochs": 3}),
    "pilora": Setting(quantity(1), 4, (3, 2), _DIGITS),
    "plora": Setting(quantity(1), 4, (3, 2), _DIGITS),
    "fed_talora": Setting(quantity(3), 4, (2, 3), {**_DIGITS, "batch_size": 8}),
    "hepco": Setting(quantity(3), 4, (2, 3), {**_DIGITS, "batch_size": 8}),
    "cifar100": Setting(dirichlet(0.5), 5, (3, 4), {"augment": "flip_jitter"}),
}


@dataclass(frozen=True)
class Case:
    """One method in one of the settings.

    Attributes:
        table: name of its setting.
        options: over the setting's.
        rounds: per task.
    """

    title: str
    table: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 2

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.table]


_METHODS = {
    "PILoRA": "pilora", "PLoRA": "plora", "Fed-TaLoRA": "fed_talora", "HGP": "hgp",
    "HePCo": "hepco",
}  # fmt: skip
DIGITS = (
    *(Case(title, method, method) for title, method in _METHODS.items()),
    Case("Fed-TaLoRA without residual", "fed_talora", "fed_talora", {"residual": "off"}),
    Case("PILoRA, LoRA steps of 1e-5", "pilora", "pilora", {"lr_lora": 1e-5}),
    Case(
        "PILoRA, one LoRA step of 1e-5 a round",
        "pilora",
        "pilora",
        {"lr_lora": 1e-5, "epochs": 1, "batch_size": 100_000},
        rounds=8,
    ),
)
CIFAR = tuple(Case(title, "cifar100", method) for title, method in _METHODS.items())


@dataclass
class Watch:
    """A learner that looks at what the rounding of its upload takes away."""

    inner: Any
    simulation: Simulation
    worst: dict[str, float] = field(default_factory=dict)

    def run(
        self, ctx: Context, state: State, broadcast: Mapping[str, Payload], data: ImageSet
    ) -> tuple[State, Payload]:
        kept, trained = self.inner.run(ctx, state, broadcast, data)
        method = self.simulation.method
        exchange = find_exchange(method, ctx.hparams, ctx.backbone_info, ctx.kind)
        sent = ctx.forms.narrow(trained, exchange.upload)
        for kind, share in ctx.forms.rounding_loss(trained, sent, broadcast.values()).items():
            self.worst[kind] = max(self.worst.get(kind, 0.0), share)
        return kept, trained


def measure(case: Case, half: str, seed: int, data: Data, backbone: Backbone) -> dict[str, Any]:
    """Run one case in one form and return its line."""
    setting = case.setting
    clients = setting.split(data.train, data.tasks, setting.clients, seed)
    method = load_method(case.method)
    options = {"preset": "short", **setting.options, **case.options}
    simulation = Simulation.of(
        case.method,
        options,
        backbone,
        clients,
        seed=seed,
        forms=forms_of(half, method.name, method.half),
    )
    watch = Watch(simulation._learner, simulation)  # noqa: SLF001
    simulation._learner = watch  # noqa: SLF001
    result = simulation.run(data.tasks, data.test, case.rounds)
    return {
        "case": case.title,
        "table": case.table,
        "half": half,
        "seed": seed,
        "faa": result.metrics.faa,
        "aia": result.metrics.aia,
        "up": result.up,
        "down": result.down,
        "lost": watch.worst,
        "seconds": round(result.seconds, 1),
    }


def show(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown: per case the means over its seeds, and the differences."""
    lines = []
    for title, table in dict.fromkeys((r["case"], r["table"]) for r in rows):
        found = [r for r in rows if (r["case"], r["table"]) == (title, table)]
        full, half = ({r["seed"]: r for r in found if r["half"] == form} for form in FORMS)
        seeds = sorted(full.keys() & half.keys())
        if not seeds:
            continue
        faa = [[side[s]["faa"] for s in seeds] for side in (full, half)]
        differences = [b - a for a, b in zip(*faa, strict=True)]
        spread = f" ± {stdev(differences):.1f}" if len(seeds) > 1 else ""
        kinds = sorted({k for s in seeds for k in half[s]["lost"]})
        lost = ", ".join(f"{k} {max(half[s]['lost'][k] for s in seeds):.2g}" for k in kinds)
        cells = [
            title,
            "CIFAR-100" if table == "cifar100" else "digits",
            str(len(seeds)),
            f"{mean(faa[0]):.1f}",
            f"{mean(faa[1]):.1f}",
            f"{mean(differences):+.1f}{spread}",
            *(
                f"{mean(full[s][way] for s in seeds) / 1000:,.0f} → "
                f"{mean(half[s][way] for s in seeds) / 1000:,.0f}"
                for way in ("up", "down")
            ),
            lost or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    head = [
        "method", "images", "seeds", "FAA, float32", "FAA, half", "difference", "kB up", "kB down",
        "lost of a step",
    ]  # fmt: skip
    return "\n".join(["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *lines])


def main() -> None:
    """Measure what the file lacks, then show all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=Path, required=True, help="JSON-lines file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, help="zip of CIFAR-100: measure on it, not on digits")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.show:
        _measure_all(CIFAR if args.data else DIGITS, args.seeds, args.rows, args.data)
    print(show(_read(args.rows)))


def _measure_all(
    cases: tuple[Case, ...], seeds: list[int], path: Path, archive: Path | None
) -> None:
    torch.set_num_threads(1)
    backbone = load_backbone()

    @cache
    def load(seed: int, groups: tuple[int, int]) -> Data:
        p = backbone.info.preprocessing
        if archive is None:
            return digits(p, seed, TRAIN, TEST, groups)
        return cifar100(p, archive, seed, TRAIN, TEST, groups)

    known = {(r["case"], r["table"], r["half"], r["seed"]) for r in _read(path)}
    for seed in seeds:
        for case in cases:
            for half in FORMS:
                if (case.title, case.table, half, seed) in known:
                    continue
                data = load(seed, case.setting.groups)
                row = measure(case, half, seed, data, backbone)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                when = time.strftime("%H:%M:%S")
                told = f"{case.title}, {half}, seed {seed}: FAA {row['faa']:.1f}"
                print(f"{when} {told}, {row['seconds']} s", file=sys.stderr, flush=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
