"""What travels although the other side has it already: byte-equal tensors, by method.

Two tasks of real training in one process (`simulation.py`), scikit-learn's digits, the embedded
backbone, preset ``short``. One client is always there. At every step, evaluations too, each
tensor of each part that it would fetch is looked up among all tensors that it was ever sent,
whatever their name; each tensor that it sends, among what the broadcast and its earlier updates
brought to the server::

    python scripts/bench/resent.py [METHOD ...] [--rounds 3]
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_data import Data, digits, dirichlet
from simulation import Simulation

from fcil_adapters.backbones.backbone import Backbone, load_backbone
from fcil_adapters.contract import Context, TaskInfo
from fcil_adapters.contract.registry import load_method, method_names
from fcil_protocol.payloads.payload import Array, Payload, pack

SEED, CLIENTS, TRAIN, TASKS = 1, 3, 30, (2, 2)
SMALLEST = 64  # bytes: below, a tensor costs less than the name under which it could be skipped


@dataclass
class Side:
    """What went in one direction, between the server and one client.

    Attributes:
        all: bytes of tensors, by the part or exchange that they were in.
        again: those of them that the receiver had.
        names: tensors that it had, and how often.
        payloads: everything that went, as it travels.
    """

    all: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    payloads: list[tuple[str, bytes]] = field(default_factory=list)

    def add(self, kind: str, payload: Payload, held: set[bytes]) -> None:
        """Count a payload against what the receiver holds."""
        self.payloads.append((kind, pack(payload)))
        for name, array in payload.tensors.items():
            self.all[kind] += array.nbytes
            if array.nbytes >= SMALLEST and _digest(array) in held:
                self.again[kind] += array.nbytes
                self.names[f"{kind}: {name}"] += 1


@dataclass
class Watched(Simulation):
    """A simulation that looks at what its first client fetches and sends."""

    down: Side = field(default_factory=Side)
    up: Side = field(default_factory=Side)
    _parts_held: set[str] = field(default_factory=set)
    _held: set[bytes] = field(default_factory=set)
    _told: set[bytes] = field(default_factory=set)

    def _parts(self, ctx: Context) -> dict[str, tuple[str, Payload]]:
        """Count the parts that the client lacks; every step of a task begins with this."""
        parts = super()._parts(ctx)
        fresh = [(n, d, p) for n, (d, p) in parts.items() if n + d not in self._parts_held]
        for name, digest, payload in fresh:
            self.down.add(name.partition("/")[0], payload, self._held)
            self._parts_held.add(name + digest)
        self._held |= {_digest(a) for _, _, p in fresh for a in p.tensors.values()}
        return parts

    def look(self, task: TaskInfo) -> None:
        """Fetch what an evaluation of the task needs."""
        self._parts(self._context(task, "evaluate", 0, 1))

    def _upload(
        self, exchange: Any, ctx: Context, k: int, parts: Mapping[str, Payload], own: Any
    ) -> Payload:
        sent = super()._upload(exchange, ctx, k, parts, own)
        if k == 0:
            self.up.add(exchange.kind, sent, self._held | self._told)
            self._told |= {_digest(a) for a in sent.tensors.values()}
        return sent


def watch(name: str, rounds: int, backbone: Backbone, data: Data) -> Watched:
    """Train two tasks and return what was seen."""
    method = load_method(name)
    options: dict[str, Any] = {"preset": "short"} if "short" in method.presets else {}
    if "augment" in method.hparams.model_fields:
        options["augment"] = "jitter"
    clients = dirichlet(1.0)(data.train, data.tasks, CLIENTS, SEED)
    seen = Watched.of(name, options, backbone, clients, seed=SEED)
    for task in data.tasks:
        seen.run_task(task, rounds)
        seen.look(task)
    return seen


def _digest(array: Array) -> bytes:
    return hashlib.sha256(array.dtype.str.encode() + array.tobytes()).digest()


def main() -> None:
    """Print a table per method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone("embedded")
    data = digits(backbone.info.preprocessing, SEED, TRAIN, 0, TASKS)
    print("| method | way | in | bytes | had already | |")
    print("|---|---|---|---|---|---|")
    for name in args.methods or method_names():
        seen = watch(name, args.rounds, backbone, data)
        for way, side in (("down", seen.down), ("up", seen.up)):
            for kind, count in side.all.items():
                again = side.again[kind]
                names = sorted({n.split(": ")[1] for n in side.names if n.startswith(f"{kind}: ")})
                which = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                print(
                    f"| {name} | {way} | {kind} | {count:,} | {again:,} ({again / count:.0%}) "
                    f"| {which} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
