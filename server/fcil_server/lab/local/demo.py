"""``fcil-server demo``: digits 0 to 9 in five tasks, a server and clients as processes.

The images are scikit-learn's digits: 1,797 scans of 8 x 8 pixels that ship inside the
package (UCI ML hand-written digits, test set).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fcil_adapters.contract import registry
from fcil_protocol.errors import RunFailed, Timeout, UsageError
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.databases.opening import has_ledger
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

TASKS = [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]]
SPLIT_SEED = 7
SPLIT_BETA = 1.0  # Dirichlet: clients hold very different shares of each digit
REFRESH_S = 0.25
STALL_S = 300.0  # without any change of status


def demo_config(clients: int, settings: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the settings that the demo gives its server, before those of its user."""
    tasks = "[" + ", ".join("[" + ", ".join(f'"{n}"' for n in t) + "]" for t in TASKS) + "]"
    return (
        "federation.name=digits",
        "tasks.schedule=listed",
        f"tasks.classes={tasks}",
        *_method_settings(settings),
        "round.rounds_per_task=3",
        f"round.min_clients={clients}",
    )


def _method_settings(settings: tuple[str, ...]) -> list[str]:
    """Return the method, and those of the options for digits that it has."""
    pairs = (setting.partition("=") for setting in settings)
    named = [value.strip(" \"'") for key, _, value in pairs if key.strip() == "method.name"]
    method = registry.load_method(named[-1] if named else "pilora")
    chosen = [f"method.name={method.name}"]
    if "short" in method.presets:
        chosen.append("method.preset=short")
    if "augment" in method.hparams.model_fields:
        chosen.append("method.augment=jitter")  # a mirrored digit is no digit
    return chosen


def write_digits(folder: Path, clients: int) -> list[Path]:
    """Write the digits as PNG folders, one per client, unevenly split; once.

    Each digit is divided by a draw from Dirichlet(1) over the clients, each of which gets at least
    three images of it (if there are enough).

    Raises:
        UsageError: scikit-learn is not installed.
    """
    paths = [folder / f"client-{k + 1}" for k in range(clients)]
    if all((p / "complete").exists() for p in paths):
        return paths
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "the demo's images come with scikit-learn, which is not installed.",
            action="Install it: pip install 'fcil[demo]'",
        ) from error
    digits = load_digits()
    images: NDArray[np.float64] = digits.images
    labels: NDArray[np.int64] = digits.target
    rng = np.random.default_rng(SPLIT_SEED)
    for label in range(10):
        index = rng.permutation(np.flatnonzero(labels == label))
        for path, part in zip(paths, _shares(rng, index, clients), strict=True):
            target = path / str(label)
            target.mkdir(parents=True, exist_ok=True)
            for i in part.tolist():
                pixels = (images[i] * (255 / 16)).round().astype(np.uint8)  # 0..16 -> 0..255
                Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(
                    target / f"{i:04d}.png"
                )
    for path in paths:
        (path / "complete").touch()
    return paths


def _shares(
    rng: np.random.Generator, index: NDArray[np.int64], clients: int
) -> list[NDArray[np.int64]]:
    least = min(3, len(index) // clients)
    free = len(index) - least * clients
    cuts = np.floor(np.cumsum(rng.dirichlet([SPLIT_BETA] * clients))[:-1] * free).astype(np.int64)
    sizes = np.diff(np.concatenate([[0], cuts, [free]])) + least
    return np.split(index, np.cumsum(sizes)[:-1])


@dataclass(frozen=True)
class Demo:
    """A finished demo; its run is the newest of its federation.

    Attributes:
        federation: the federation's directory.
    """

    federation: Path
    took_s: float


def run_demo(directory: Path, clients: int, settings: tuple[str, ...]) -> Demo:
    """Run the federation with live progress.

    An interrupted demo resumes where it was; a complete one begins a new run.
    """
    # A closed terminal or a plain kill stops the demo's processes as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    data = write_digits(directory / f"data-{clients}", clients)
    federation = LocalFederation(directory)
    arguments = ["--until-done"]
    for setting in (*demo_config(clients, settings), *settings):
        arguments += ["-c", setting]
    if _complete(federation.federation):
        arguments.append("--new-run")
    started = time.monotonic()
    with federation:
        federation.serve(*arguments)
        for path in data:
            federation.join(path.name, path, "--threads", "1")
        _watch(federation)
    return Demo(federation.federation, time.monotonic() - started)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complete(directory: Path) -> bool:
    if not has_ledger(directory):
        return False
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        return run is not None and run.status is not RunStatus.RUNNING


def _watch(federation: LocalFederation) -> None:
    """Show the progress until the server has ended.

    Raises:
        LinkError: a daemon ended on its own. Timeout: nothing changes any more.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False)
    assert federation.server is not None
    last_change, last, shown = time.monotonic(), None, 0.0
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while federation.server.poll() is None:
            status = federation.status()
            if status is not None:
                shown = _print_new(console, status, shown)
                live.update(_progress(status))
                now = (status["now"], [c.get("progress") for c in status["clients"]])
                if now != last:
                    last, last_change = now, time.monotonic()
                federation.check_clients()
            if time.monotonic() - last_change > STALL_S:
                raise Timeout(
                    f"nothing happened for {STALL_S:.0f} s: {federation.last_words('server')}"
                )
            time.sleep(REFRESH_S)
    if federation.server.returncode:
        raise RunFailed(f"the server failed: {federation.last_words('server')}")


def _print_new(console: Any, status: dict[str, Any], shown: float) -> float:
    for note in status["notes"]:
        if note["at"] > shown:
            shown = note["at"]
            if note["code"] not in ("update", "connected", "left"):
                clock = time.strftime("%H:%M:%S", time.localtime(note["at"]))
                console.print(f"{clock} {note['text']}", markup=False, soft_wrap=True)
    return shown


def _progress(status: dict[str, Any]) -> Any:
    from rich.table import Table

    now = status["now"]
    table = Table.grid(padding=(0, 2))
    where = now["phase"]
    if now["kind"] is not None:
        where = f"task {now['task']} (the last is {len(TASKS) - 1}), {now['kind']}"
        if now["rounds"] and now["rounds"] > 1:  # counted as in all messages
            where += f" round {now['round']} (the last is {now['rounds'] - 1})"
        where += f": {now['phase']}"
    table.add_row(where, now["waiting_for"] and f"waits for {now['waiting_for']}")
    for client in status["clients"]:
        doing = now["answers"].get(client["id"], client["state"])
        progress = client.get("progress")
        if doing == "none":
            doing = "asked"
            if progress:
                phase, done, total = progress
                filled = 20 * done // max(total, 1)
                doing = f"{phase:8} {'#' * filled}{'.' * (20 - filled)}"
        table.add_row(f"  {client['name'].rpartition(':')[2]}", doing)
    return table
