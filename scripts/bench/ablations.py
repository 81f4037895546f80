"""Ablations of the five methods, each row in one process on the embedded backbone.

Rows are appended to a JSON-lines file as they are measured; a row that is there already is
not measured again, so an interrupted run goes on. At the end the tables are written as
Markdown, from what the file holds::

    export OMP_NUM_THREADS=1
    python scripts/bench/ablations.py hgp --rows ablations.jsonl --seeds 1 2 3
    python scripts/bench/ablations.py cifar100 --rows ablations.jsonl --data cifar100.zip
    python scripts/bench/ablations.py --rows ablations.jsonl --show >tables.md

The tables are in `ablation_tables.py`, with the papers' numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from ablation_tables import TABLES, Row, Table
from bench_data import Data, cifar100, digits, dirichlet, quantity
from probes import Identity, RebalanceOld
from simulation import Simulation

from fcil_adapters.backbone import Backbone, load_backbone
from fcil_adapters.registry import load_method, make_hparams

Measured = dict[str, Any]  # one line of the file


def key(table: Table, row: Row, seed: int) -> str:
    """Return what a line of the file is known by: a digest of everything that it depends on.

    Options count with the values that the preset gives them now.
    """
    setting = table.settings(row)
    hparams = make_hparams(load_method(setting["method"]), setting["options"])
    setting["options"] = hparams.model_dump(mode="json")
    text = json.dumps([setting, seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(table: Table, row: Row, seed: int, data: Data, backbone: Backbone) -> Measured:
    """Run one row and return its line."""
    setting = table.settings(row)
    partition = dirichlet(table.split[1])
    if table.split[0] == "quantity":
        partition = quantity(int(table.split[1]))
    clients = partition(data.train, data.tasks, table.clients, seed)
    identity = Identity() if row.probe == "identity" else None
    simulation = Simulation.of(
        setting["method"],
        setting["options"],
        backbone,
        clients,
        seed=seed,
        aggregator=RebalanceOld() if row.probe == "old_only" else None,
        **({"observe": identity} if identity else {}),
    )
    result = simulation.run(data.tasks, data.test, table.rounds)
    m = result.metrics
    return {
        "key": key(table, row, seed),
        "table": table.name,
        "row": row.title,
        "seed": seed,
        "faa": m.faa,
        "aia": m.aia,
        "forgetting": m.forgetting["max"],
        "up": result.up,
        "down": result.down,
        "seconds": round(result.seconds, 1),
        "matrix": m.matrix,
        **(identity.numbers() if identity else {}),
    }


def read_rows(path: Path) -> dict[str, Measured]:
    """Return the lines of the file by key; a last line that was cut short is left out."""
    measured = [json.loads(line) for line in _whole_lines(path)]
    return {line["key"]: line for line in measured}


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def show(tables: Iterable[Table], known: dict[str, Measured], seeds: list[int]) -> str:
    """Return the tables as Markdown: means over the seeds that are there, and each seed."""
    shown = [_markdown(table, known, seeds) for table in tables]
    return "\n".join(text for text in shown if text)


def _markdown(table: Table, known: dict[str, Measured], seeds: list[int]) -> str:
    """Return one table; nothing if no row of it was measured."""
    probed = any(row.probe == "identity" for row in table.rows)
    paper = [f"paper ({table.paper_setting})"] if table.paper_setting else []
    distance = ["difference of weights"] if probed else []
    head = ["variant", "FAA", "seeds", "AIA", "forgetting", *distance, "kB up / down", *paper]
    lines = []
    for row in table.rows:
        found = [known[k] for seed in seeds if (k := key(table, row, seed)) in known]
        if not found:
            continue
        cells = [
            row.title,
            _mean(found, "faa"),
            ", ".join(f"{one['faa']:.1f}" for one in found),
            _mean(found, "aia"),
            _mean(found, "forgetting"),
        ]
        if probed:
            worst = max(found, key=lambda one: one["difference"])
            cells.append(f"{worst['difference']:.1e} of {worst['change']:.1e}")
        cells.append(f"{_kilobytes(found, 'up')} / {_kilobytes(found, 'down')}")
        lines.append(_line([*cells, *([row.paper or "-"] if paper else [])]))
    if not lines:
        return ""
    top = [f"### {table.name}", "", _setting(table), "", _line(head), _line(["---"] * len(head))]
    return "\n".join([*top, *lines, ""])


def _setting(table: Table) -> str:
    tasks, classes = table.groups
    what = "digits" if table.data == "digits" else "classes of CIFAR-100"
    kind, parameter = table.split
    return (
        f"{tasks} tasks of {classes} {what}, {table.clients} clients, {kind}({parameter:g}), "
        f"{table.rounds} rounds per task, {table.train} train and {table.test} test images per "
        "class."
    )


def _mean(found: list[Measured], name: str) -> str:
    return f"{round(mean(one[name] for one in found), 1) + 0.0:.1f}"  # never "-0.0"


def _kilobytes(found: list[Measured], name: str) -> str:
    return f"{mean(one[name] for one in found) / 1000:,.0f}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(t.name for t in TABLES)}; all")
    parser.add_argument("--rows", type=Path, required=True, help="JSON-lines file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", type=Path, help="zip with the images of CIFAR-100")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    args = parser.parse_args()
    unknown = set(args.tables) - {t.name for t in TABLES}
    if unknown:
        parser.error(f"no table {', '.join(sorted(unknown))}")
    tables = [t for t in TABLES if t.name in (args.tables or [t.name for t in TABLES])]
    if not args.show:
        measure_all(tables, args.seeds, args.rows, args.data)
    print(show(tables, read_rows(args.rows), args.seeds))


def measure_all(tables: list[Table], seeds: list[int], path: Path, archive: Path | None) -> None:
    """Measure what the file lacks, one seed after the other, and append it."""
    torch.set_num_threads(1)
    backbone = load_backbone()
    path.write_text("".join(_whole_lines(path)))
    known = read_rows(path)

    @cache
    def load(name: str, seed: int, train: int, test: int, groups: tuple[int, int]) -> Data | None:
        p = backbone.info.preprocessing
        if name == "digits":
            return digits(p, seed, train, test, groups)
        return cifar100(p, archive, seed, train, test, groups) if archive else None

    for table in tables:
        for seed in seeds:
            data = load(table.data, seed, table.train, table.test, table.groups)
            if data is None:
                _say(f"{table.name}: left out, it needs --data")
                break
            for row in table.rows:
                if key(table, row, seed) in known:
                    continue
                measured = measure(table, row, seed, data, backbone)
                with path.open("a") as file:
                    file.write(json.dumps(measured) + "\n")
                _say(
                    f"{table.name}, {row.title}, seed {seed}: FAA {measured['faa']:.1f}, "
                    f"AIA {measured['aia']:.1f}, {measured['seconds']:.0f} s"
                )


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
