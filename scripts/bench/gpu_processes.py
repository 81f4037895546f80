"""The sections of `scripts/gpu` that are federations of processes, and not computations in one."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpu_messages import Message, TimeUp, Wanted, head, note, row

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract.registry import load_method, make_hparams
from fcil_protocol.errors import NotYet, RunFailed, StorageError
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
