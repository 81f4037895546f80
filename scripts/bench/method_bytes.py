"""What each method's rounds cost on the wire: ViT-B/16, ten classes a task, real processes.

A server and two clients on the loopback device learn two tasks of ten classes in two rounds
each, from one random picture of a class on each client, with a backbone of random weights.
Bytes do not depend on what is learned, so local training is one epoch and HePCo's server takes
few distillation steps; ranks, pools and everything else that has a size is the method's
default, the paper's. For each client and round the ledger's figures are written down: tensors,
envelopes, messages, and what the kernel counted on the connection.

.venv/bin/python scripts/bench/method_bytes.py [--cases pilora plora fed_talora ...]
    [--weights FILE] [--rows FILE] [-c wire.half=none]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from processes import children, peak_mb

from fcil_protocol.formats import format_bytes
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.charts.history import frozen
from fcil_server.reports.results.round_views import Bytes, RoundView
from fcil_server.reports.results.run_data import RunData, collect
from fcil_server.reports.sections.traffic import accounts

BACKBONE = "vit_base_patch16_224"
CLIENTS, TASKS, CLASSES, ROUNDS = 2, 2, 10, 2
TRAIN, PIXELS, SEED = 1, 64, 1
TIMEOUT_S = 7200.0
TALL = Path(__file__).parent / "tall_method"


@dataclass(frozen=True)
class Case:
    """A method with the options that change no size, and its paper's figures.

    Attributes:
        paper: bytes up and down of one client and round as the paper counts; None: not told.
        true: tensor bytes up and down that the paper's own equations need, in its setting.
    """

    method: str
    options: Mapping[str, object]
    paper: tuple[float | None, float | None]
    true: tuple[int, int]


STEPS = {"batch_size": 4, "lr_lora": 0.01}  # a first step moves B alone: no residual yet
FEW = {"generator_steps": 5, "distillation_steps": 5, "old_steps": "fixed"}
HGP = (307_240, 584_080)
CASES = {
    "pilora": Case("pilora", {}, (None, None), (110_592, 79_872)),
    "plora": Case("plora", {}, (307_200, None), (307_200, 276_480)),
    "fed_talora": Case("fed_talora", STEPS, (718_888, 718_888), (718_888, 1_407_016)),
    "hgp, one pool, diagonals": Case(
        "hgp_tall", {"cov": "diag", "pool_sharing": "shared"}, HGP, (368_680, 584_080)
    ),
    "hgp, diagonals": Case("hgp_tall", {"cov": "diag"}, HGP, (1_474_600, 1_690_000)),
    "hgp, low rank": Case("hgp_tall", {"cov": "lowrank"}, HGP, (1_966_120, 1_690_000)),
    "hgp, full": Case("hgp_tall", {"cov": "full"}, HGP, (13_255_720, 1_690_000)),
    "hepco": Case("hepco", FEW, (32_894_000, 32_894_000), (32_563_600, 32_563_600)),
}


def make_weights(path: Path) -> None:
    """Write random weights of the backbone, once."""
    if path.exists():
        return
    from fcil_adapters.backbones.torch_imports import ensure_torchvision

    ensure_torchvision()
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    module = timm.create_model(BACKBONE, pretrained=False, num_classes=0)
    save_file(module.state_dict(), path)


def write_pictures(folder: Path, client: int) -> Path:
    """Write a client's pictures: noise, of each class; one test image of each task."""
    rng = np.random.default_rng((SEED, client))
    for label in range(TASKS * CLASSES):
        for side, count in (("train", TRAIN), ("test", int(label % CLASSES == 0))):
            for number in range(count):
                target = folder / side / f"c{label:02d}" / f"{number}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(target)
    return folder


def settings(case: Case, weights: Path, extra: Sequence[str]) -> list[str]:
    names = [[f"c{c + t * CLASSES:02d}" for c in range(CLASSES)] for t in range(TASKS)]
    given = {
        "run.backbone": BACKBONE,
        "run.weights": str(weights),
        "run.threads": 1,
        "method.name": case.method,
        "method.epochs": 1,
        "tasks.schedule": "listed",
        "tasks.classes": json.dumps(names),
        "round.rounds_per_task": ROUNDS,
        "round.min_clients": CLIENTS,
        "round.deadline_s": TIMEOUT_S,
    } | {f"method.{k}": v for k, v in case.options.items()}
    pairs = [*(f"{k}={v}" for k, v in given.items()), *extra]
    return [a for pair in pairs for a in ("-c", pair)]


def run(case: Case, weights: Path, directory: Path, extra: Sequence[str]) -> tuple[RunData, float]:
    """Run the federation; return what the ledger has, and the memory of all processes, MB."""
    env = {
        "PYTHONPATH": os.pathsep.join((str(TALL), os.environ.get("PYTHONPATH", ""))),
        "OMP_NUM_THREADS": "1",
    }
    with LocalFederation(directory) as federation:
        federation.serve(*settings(case, weights, extra), env=env)
        for number in range(CLIENTS):
            data = write_pictures(directory / f"data{number}", number)
            extra = ("--weights", str(weights), "--threads", "1", "--micro-batch", "5")
            federation.join(f"client{number}", data, *extra, env=env)
        federation.until("run_done", timeout_s=TIMEOUT_S)
        assert federation.server is not None
        daemons = [federation.server.pid, *(p.pid for p in federation.clients.values())]
        memory = peak_mb(*daemons, *(c for pid in daemons for c in children(pid)))
        federation.check_clients()
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        row = ledger.runs.newest()
        assert row is not None
        return collect(ledger, row.run_id), memory


def figures(view: RoundView, direction: Direction) -> dict[str, float]:
    """Return a round's bytes in one direction, mean of the clients, level by level."""
    mine = [f for f in view.flows if f.direction is direction]
    total = Bytes.total(mine)
    levels = {
        "tensors": total.tensor,
        "sealed": total.sealed,
        "messages": total.application,
        "wire": total.true_wire,
        "frames": total.link,
        "again": total.retransmitted,
    }
    causes = {f"{f.cause.value}": 0 for f in mine}
    for f in mine:
        causes[f.cause.value] += f.wire
    return {k: v / CLIENTS for k, v in (levels | causes).items()}


def rows_of(name: str, data: RunData) -> list[dict[str, Any]]:
    """Return one row of plain data for every round."""
    return [
        {
            "case": name,
            "task": v.round.task,
            "kind": v.round.kind,
            "round": v.round.round,
            "kernel": bool(v.up.wire_kernel and v.down.wire_kernel),
            "up": figures(v, Direction.UP),
            "down": figures(v, Direction.DOWN),
        }
        for v in data.rounds
    ]


def told(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line for each case and direction: its ``train`` rounds of the second task."""
    yield "| case | | paper | equations | tensors | envelopes | messages | wire | wire / paper |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, case in CASES.items():
        mine = [r for r in rows if r["case"] == name and r["kind"] == "train"]
        last = [r for r in mine if r["task"] == TASKS - 1][-1:]
        for number, way in enumerate(("up", "down")):
            for row in last:
                paper, found = case.paper[number], row[way]
                ratio = "-" if paper is None else f"{found['wire'] / paper:.2f}"
                levels = (told(found[k]) for k in ("tensors", "sealed", "messages", "wire"))
                cells = (name, way, told(paper), told(case.true[number]), *levels, ratio)
                yield f"| {' | '.join(cells)} |"


def rounds_table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a line for every round."""
    yield "| case | task | round | up: tensors | up: wire | down: tensors | down: wire |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [told(row[way][level]) for way in ("up", "down") for level in ("tensors", "wire")]
        where = f"{row['kind']} {row['round']}"
        yield f"| {row['case']} | {row['task']} | {where} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument(
        "--weights", type=Path, default=Path(tempfile.gettempdir(), "fcil-vit.safetensors")
    )
    parser.add_argument(
        "--rows", type=Path, help="keep the rounds here; what is there is shown too"
    )
    parser.add_argument("-c", dest="extra", action="append", default=[], help="key=value")
    args = parser.parse_args()
    make_weights(args.weights)
    rows: list[dict[str, Any]] = []
    if args.rows is not None and args.rows.exists():
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    for name in args.cases:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fcil-bytes-") as place:
            data, memory = run(CASES[name], args.weights, Path(place), args.extra)
        seconds = time.monotonic() - began
        rows = [r for r in rows if r["case"] != name] + rows_of(name, data)
        if args.rows is not None:
            args.rows.write_text("".join(json.dumps(r) + "\n" for r in rows))
        print(f"{name}: {seconds:.0f} s, {memory:.0f} MB in all processes", flush=True)
        for account in accounts(frozen(data)):
            both = (format_bytes(v) if v is not None else "-" for v in (account.up, account.down))
            print(f"  {account.how}: {' up, '.join(both)} down", flush=True)
    print("\n".join((*table(rows), "", *rounds_table(rows))))


if __name__ == "__main__":
    main()
