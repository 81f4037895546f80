"""The run directory: files that every run writes.

Every file can be made again from the ledger at any time (`write`); ``rounds.jsonl`` also grows line
by line during the run (`append_round`), so that it can be followed.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fcil_adapters.contract import source_code
from fcil_adapters.resources import machine
from fcil_protocol.errors import CorruptFile
from fcil_protocol.ids import RoundKey, RunId
from fcil_protocol.storage.atomic_files import FilePart, Piece, storage_errors, write_atomic
from fcil_server.aggregation.store import StateRecord, StateStore, check_state
from fcil_server.ledger.databases.database import Row
from fcil_server.ledger.enums import Direction, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.results.metrics import Metrics
from fcil_server.reports.results.round_views import RoundReader
from fcil_server.reports.results.run_data import RunData, collect, shown_environment

SCHEMA_VERSION = 1  # of summary.json, environment.json and the lines of rounds.jsonl
ROUNDS = "rounds.jsonl"
FINAL_MODEL = "final.safetensors"
BYTE_COLUMNS = (
    "run", "seq", "task", "kind", "round", "client", "client_name", "direction", "cause", "source",
    "tensor", "sealed", "application", "wire", "retransmitted", "link",
)  # fmt: skip
_SIZES = ("tensor", "true_wire")  # of each direction of a round
_PHASES = ("collect_s", "aggregate_s", "save_s")
ROUND_COLUMNS = (
    "seq", "task", "kind", "round", "outcome", "closed_by", "reopened", "opened_at", "closed_at",
    "asked", "counted", "excluded", "silent", "train_loss", "train_accuracy", "test_accuracy",
    *(f"{way}_{name}" for way in ("up", "down") for name in _SIZES), *_PHASES,
)  # fmt: skip
_TAIL_BYTES = 4096  # longer than a line with few clients

# Packages that an experiment's numbers may depend on; installed ones are listed.
_PACKAGES = (
    "fcil",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "scipy",
    "scikit-learn",
    "safetensors",
    "pillow",
    "pyzmq",
    "cryptography",
    "msgpack",
    "pydantic",
)


def write(
    ledger: Ledger,
    run: RunId,
    directory: Path,
    *,
    states: StateStore | None = None,
    plots: bool = True,
) -> RunData:
    """Rewrite all files of a run's directory, each atomically, and return what they show.

    ``states`` is the source of the final model; without it, and before the first state, there is
    none. Pictures are drawn if ``plots`` is true and matplotlib is installed.

    Raises:
        UsageError: there is no such run.
        StorageError, DiskFull: the directory cannot be written.
    """
    from fcil_server.reports.sections import (
        static_page,  # its templates are loaded only when needed
    )

    with ledger.database.moment():
        data = collect(ledger, run)
        flows = ledger.bytes.records(run)
    with storage_errors("create", directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    final = _final(ledger, run, states)
    files: dict[str, Piece] = {}
    if states is not None and final is not None:
        # The first one: a server at work may remove this state, and then no file is rewritten.
        files[FINAL_MODEL] = FilePart(states.path(final.number), 0, final.size_bytes)
    files |= {
        ROUNDS: b"".join(_json_line(v.line()) for v in data.rounds),
        "bytes.csv": bytes_csv(flows).encode(),
        "accuracy_matrix.csv": matrix_csv(data.metrics).encode(),
        "environment.json": _json(environment(data)),
        "report.html": static_page.report(data).encode(),
    }
    content = summary(data)
    if final is not None:
        content["data"]["final_state"] = asdict(final)
    if plots and importlib.util.find_spec("matplotlib") is not None:
        from fcil_server.reports.plots import draw

        files.update(draw(data))
    files["summary.json"] = _json(content)  # the last one: its presence proves that of the others
    for name, content_bytes in files.items():
        write_atomic(directory / name, content_bytes)
    return data


def _final(ledger: Ledger, run: RunId, states: StateStore | None) -> StateRecord | None:
    """Return the newest committed state if it is intact; an older one is not the final model."""
    newest = ledger.states.newest(run)
    if states is None or newest is None:
        return None
    try:
        check_state(states, newest.state, {newest.state: newest.digest})
    except CorruptFile:
        return None  # the server reports it when it starts, and so does `fcil-server check`
    return states.record(newest.state)


def is_complete(directory: Path) -> bool:
    """Return True if the results of a completed run were written, all of them."""
    try:
        data = json.loads((directory / "summary.json").read_bytes())["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(data, dict) and data.get("run_status") == RunStatus.DONE.value


def append_round(ledger: Ledger, key: RoundKey, directory: Path) -> None:
    """Append a closed round to ``rounds.jsonl``, at a cost that does not grow with the run.

    If the last line is not that of the round before (a kill came between a round's end and its
    line, or in the middle of one), the file is rewritten from the ledger.
    """
    row = ledger.rounds.get(key)
    assert row is not None, "a round that closed is in the ledger"
    path = directory / ROUNDS
    with storage_errors("write", path):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(path, mode, 0o600), "ab+") as file:
            if _last_seq(file) == ledger.rounds.seq_before(row):
                file.write(_json_line(RoundReader(ledger.database).view(row).line()))
                return
    data = collect(ledger, key.run)
    write_atomic(path, b"".join(_json_line(v.line()) for v in data.rounds))


def _last_seq(file: IO[bytes]) -> int | None:
    """Return the round number in the last line; None: the file is empty; -1: no such line.

    Only the last line is read, whose size depends on the clients of a round.
    """
    at = size = file.seek(0, os.SEEK_END)
    tail = b""
    while at > 0 and b"\n" not in tail[:-1]:
        step = min(at, max(_TAIL_BYTES, len(tail)))
        at -= step
        file.seek(at)
        tail = file.read(step) + tail
    if size == 0:
        return None
    try:
        line = json.loads(tail[:-1].rpartition(b"\n")[2]) if tail.endswith(b"\n") else {}
        return int(line["seq"])
    except (ValueError, KeyError, TypeError):
        return -1


def summary(data: RunData) -> dict[str, Any]:
    """Return the content of ``summary.json``."""
    run, m = data.run, data.metrics
    faa, aia, lost = data.headline
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "error" if run.status is RunStatus.FAILED else "ok",
        "data": {
            "run": run.run_id,
            "run_status": run.status.value,
            "created_at": run.created_at,
            "parent": run.parent_run and {"run": run.parent_run, "state": run.parent_state},
            "method": run.method,
            "method_version": run.method_version,
            "hparams": run.hparams,
            "seed": run.seed,
            "backbone": run.backbone,
            "tasks": [_task(data, i) for i in range(len(data.tasks))],
            "rounds": len(data.rounds),
            "clients": {c.client_id: c.name for c in data.clients.values()},
            "faa": faa,
            "aia": aia,
            "forgetting": lost,
            "accuracy_matrix": m and m.matrix,
            "best_state": data.best and data.best.to_json(),
            "evaluation": data.pooled and data.pooled.to_json(),
            "central_evaluation": data.central and data.central.to_json(),
            "bytes": _all_bytes(data),
            "budget": run.environment.get("budget"),
            "start": run.environment.get("start"),
            "seconds": data.seconds(),
            "final_state": None,
        },
    }


def environment(data: RunData) -> dict[str, Any]:
    """Return the content of ``environment.json``: software and machine of the run."""
    run = data.run
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "ok",
        "data": {
            **shown_environment(run),
            "method": run.method,
            "method_version": run.method_version,
            "schema_digest": run.schema_digest,
            "backbone": run.backbone,
            "seed": run.seed,
            "config": run.config,
            "clients": {c.client_id: c.device for c in data.clients.values()},
        },
    }


def describe_environment(device: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """Describe this machine for `Ledger.runs.add`.

    ``device`` is the worker's description of its device; ``threads`` is its number of threads.
    Nothing that names a person, a host or a path is included.
    """
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": dict(device),
        "packages": _versions(_PACKAGES),
        "source_digest": source_code.tree_digest(),
    }


def bytes_csv(flows: Iterable[Row]) -> str:
    """Return ``bytes.csv``; ``flows`` are the ledger's records, with `BYTE_COLUMNS` in order."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(BYTE_COLUMNS)
    table.writerows(flows)
    return out.getvalue()


def round_records(data: RunData) -> Iterator[dict[str, Any]]:
    """Yield one flat record per closed round; ``rounds.jsonl`` also has names and reasons."""
    for view in data.rounds:
        line = view.line()
        counts = {n: len(line[n]) for n in ("asked", "counted", "excluded", "silent")}
        sizes = {f"{way}_{n}": line["bytes"][way][n] for way in ("up", "down") for n in _SIZES}
        seconds = {name: line["seconds"].get(name) for name in _PHASES}
        trained = {f"train_{name}": line["training"][name] for name in ("loss", "accuracy")}
        record = {**line, **counts, **trained, **sizes, **seconds}
        yield {column: record[column] for column in ROUND_COLUMNS}


def matrix_csv(m: Metrics | None) -> str:
    """Return ``accuracy_matrix.csv``: S_{t,i} in percent, one row per evaluation."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    T = 0 if m is None else m.tasks
    table.writerow(("after_task", *(f"task_{i}" for i in range(T)), "task_mean"))
    for t in range(T):
        assert m is not None, "T > 0"
        cells = [_cell(v) for v in m.matrix[t]]
        table.writerow((t, *cells, *[""] * (T - 1 - t), _cell(m.task_mean[t])))
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _task(data: RunData, index: int) -> dict[str, Any]:
    task = data.tasks[index]
    return {
        "task": task.task,
        "class_ids": task.class_ids,
        "classes": [data.class_names[i] for i in task.class_ids],
        "opened_at": task.opened_at,
        "closed_at": task.closed_at,
    }


def _all_bytes(data: RunData) -> dict[str, Any]:
    return {
        **{d.value: asdict(data.bytes_of(d)) for d in Direction},
        "by_cause": {
            c.value: {d.value: asdict(data.bytes_of(d, c)) for d in Direction}
            for c in sorted({cause for _, cause in data.sums.totals if cause is not None})
        },
        "outside_run": {d.value: asdict(data.outside[d]) for d in Direction},
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode("ascii")


def _json_line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, allow_nan=False) + "\n").encode("ascii")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
