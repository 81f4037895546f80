"""One cell as real processes: a server, a swarm, and the results in their ledger."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fcil_adapters.contract import source_code
from fcil_adapters.worker.feature_folder import FeatureFolder, counted, environment
from fcil_protocol.errors import FcilError, RunFailed, Timeout
from fcil_protocol.ids import digest_of
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.federation import config as configuration
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.lab.plan import Cell, server_config
from fcil_server.lab.progress import HowFar
from fcil_server.ledger.enums import Direction, Outcome
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports import run_directory
from fcil_server.reports.results.run_data import RunData, collect
from fcil_server.reports.traffic.broadcast_parts import TRAIN

SWARM = "swarm"
LOOK_S = 0.5  # between looks at processes and the server's status
_OTHER_CODE = "fcil's code changed after this experiment was started: start it again."
_WORDS = 6  # last lines of a log that a failure shows


@dataclass(frozen=True)
class CellInputs:
    """Inputs of a cell's run, besides the cell itself.

    Attributes:
        data: folder or zip of the images; ``partition``: their clients; ``tasks``: class names.
        test: folder or zip of the test images.
        weights: of the backbone; empty: none needed.
        room: the cell's own directory; its content is removed.
        source: digest of the code that the cell's key is of (`source_code.tree_digest`).
        features: the experiment's frozen features; None: they are computed in every cell.
    """

    data: Path
    partition: Path
    tasks: tuple[tuple[str, ...], ...]
    test: Path
    weights: str
    room: Path
    source: str
    limit_s: float = 0.0
    features: FeatureFolder | None = None


class Stopped(Exception):
    """A request to end all cells."""


def run(
    cell: Cell, work: CellInputs, stop: threading.Event, notify: Callable[[HowFar], None]
) -> dict[str, Any]:
    """Run a cell from its beginning and return its numbers.

    Args:
        cell: the cell.
        work: its inputs.
        stop: set to end the cell.
        notify: receives its progress now and then.

    Raises:
        RunFailed: a process ended on its own, or all clients declined a round; with its last
            output. Or the code has changed. Timeout: the limit is over.
        Stopped: ``stop`` was set.
    """
    if source_code.tree_digest() != work.source:
        raise RunFailed(_OTHER_CODE)
    with storage_errors("empty", work.room):
        shutil.rmtree(work.room, ignore_errors=True)
        work.room.mkdir(parents=True)
    config = server_config(cell, work.tasks, weights=work.weights, central_test=str(work.test))
    file = work.room / "cell.toml"
    file.write_text(configuration.to_toml(config), encoding="utf-8")
    began = time.monotonic()
    threads = str(config.run.threads)
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    variables |= environment(work.features)
    with LocalFederation(work.room) as federation:
        federation.serve("--config", str(file), "--until-done", env=variables)
        device = ["--device", config.run.device]
        weights = ["--weights", work.weights] if work.weights else []
        options = [*device, *weights, "--threads", threads, "--until-done", "--together"]
        federation.swarm(SWARM, work.data, work.partition, *options, env=variables)
        used = _watch(federation, work, stop, notify, len(work.tasks))
        with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
            newest = ledger.runs.newest()
            assert newest is not None
            data = collect(ledger, newest.run_id)
    found = numbers(data, len(work.tasks))
    # A worker may have loaded its modules late.
    if {found["environment"].get("source_digest"), source_code.tree_digest()} != {work.source}:
        raise RunFailed(_OTHER_CODE)
    found["seconds"]["wall_s"] = time.monotonic() - began
    found["seconds"]["cpu_s"] = sum(used.cpu_s.values())
    found["peak_memory_mb"] = round(used.peak / 1e6)
    if work.features is not None:
        found["features"] = asdict(counted(work.features.counts))
    return found


def _watch(
    federation: LocalFederation,
    work: CellInputs,
    stop: threading.Event,
    notify: Callable[[HowFar], None],
    tasks: int,
) -> Used:
    """Wait for the server's end; return the resources used until the last look."""
    server, used, began = federation.server, Used(), time.monotonic()
    assert server is not None
    while server.poll() is None:
        if stop.is_set():
            raise Stopped
        if work.limit_s and time.monotonic() - began > work.limit_s:
            raise Timeout(f"it took longer than its limit of {work.limit_s:.0f} s.")
        swarm = federation.clients[SWARM]
        if swarm.poll() not in (None, 0):
            raise RunFailed(
                f"the swarm ended with code {swarm.returncode}: "
                f"{federation.last_words(SWARM, _WORDS)}"
            )
        used.look([server.pid, swarm.pid])
        now = _now(federation)
        if now.get("phase") == "collecting" and now["waiting_for"]:
            # Without this, clients would be asked again for hours, and this round and the next
            # skipped.
            raise RunFailed(
                f"a round got no update: {federation.last_words('server', 1)} | "
                f"{federation.last_words(SWARM, 2)}"
            )
        notify(_how_far(now, tasks))
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(LOOK_S)
    if server.returncode:
        raise RunFailed(
            f"the server ended with code {server.returncode}: "
            f"{federation.last_words('server', _WORDS)}"
        )
    return used


@dataclass
class Used:
    """Resources used by a cell's processes.

    Attributes:
        peak: largest memory of all of them at once, resident bytes.
        cpu_s: seconds of a core by process id.
    """

    peak: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)

    def look(self, roots: list[int]) -> None:
        """Measure processes and their children; those that have just ended are skipped."""
        total = 0
        for root in roots:
            try:
                process = psutil.Process(root)
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
            for one in family:
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    self.cpu_s[one.pid] = times.user + times.system
                    total += one.memory_info().rss
        self.peak = max(self.peak, total)


def _now(federation: LocalFederation) -> dict[str, Any]:
    """Return the server's status; empty while it does not answer."""
    try:
        status = federation.status()
    except FcilError:  # it is just ending
        status = None
    return {} if status is None else dict(status["now"])


def _how_far(now: Mapping[str, Any], tasks: int) -> HowFar:
    if now.get("task") is None:
        return HowFar()
    where, over = f"task {now['task'] + 1} of {tasks}", float(now["task"])
    if now["kind"] and (now["rounds"] or 0) > 1:
        where += f", {now['kind']} round {now['round'] + 1} of {now['rounds']}"
        if now["kind"] == TRAIN:
            over += now["round"] / now["rounds"]
    return HowFar(where, over / tasks)


# --- numbers --------------------------------------------------------------------------------


def numbers(data: RunData, tasks: int) -> dict[str, Any]:
    """Return the stored results of a run of this many tasks, ready for JSON.

    Raises:
        RunFailed: an evaluation on the server's folder is missing.
    """
    m = data.central
    if m is None or not m.tasks == len(data.tasks) == tasks or None in m.task_mean:
        raise RunFailed("the run ended without an accuracy after each task.")
    whole = run_directory.summary(data)["data"]
    environment = dict(data.run.environment)
    return {
        "faa": m.faa,
        "aia": m.aia,
        "faa_sample_weighted": m.faa_sample_weighted,
        "aia_sample_weighted": m.aia_sample_weighted,
        "forgetting": dict(m.forgetting),
        "task_mean": list(m.task_mean),
        "matrix": [list(row) for row in m.matrix],
        "test_images": m.test_images[-1],
        "bytes": whole["bytes"],
        "per_client_round": _per_client_round(data),
        "seconds": dict(whole["seconds"]),
        "rounds": _rounds(data),
        "backbone": dict(data.run.backbone),
        "method_version": data.run.method_version,
        "schema_digest": data.run.schema_digest,
        "environment": environment,
        "environment_digest": digest_of(environment),
    }


def _rounds(data: RunData) -> dict[str, Any]:
    """Count rounds, and asked clients without an update, by reason."""
    silent: dict[str, int] = {}
    for view in data.rounds:
        for answer, reason in view.silent.values():
            words = reason or answer.value
            silent[words] = silent.get(words, 0) + 1
    return {
        "all": len(data.rounds),
        "not_done": sum(v.round.outcome is not Outcome.DONE for v in data.rounds),
        "updates": sum(len(v.counted) for v in data.rounds),
        "excluded": sum(len(v.excluded) for v in data.rounds),
        "silent": silent,
    }


def _per_client_round(data: RunData) -> Mapping[str, float | None]:
    """Return bytes of a train round: up per received update, down per asked client."""
    rounds = [v for v in data.rounds if v.round.kind == TRAIN] or list(data.rounds)
    updates = sum(len(v.counted) + len(v.excluded) for v in rounds)
    asked = sum(len(v.round.asked) for v in rounds)
    found: dict[str, float | None] = {}
    for direction, count in ((Direction.UP, updates), (Direction.DOWN, asked)):
        sides = [v.up if direction is Direction.UP else v.down for v in rounds]
        for what in ("tensor", "true_wire"):
            total = sum(asdict(side)[what] for side in sides)
            found[f"{direction.value}_{what}"] = total / count if count else None
    return found
