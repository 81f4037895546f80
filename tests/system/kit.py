"""What the system tests share: real digits as folders, and a federation of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from watchfiles import watch

from digits import load_digits
from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger


def write_client(folder: Path, classes, *, per_class=12, offset=0, names=None) -> Path:
    """Write the digits `classes` as PNGs, `per_class` of each from the offset-th on."""
    digits = load_digits()
    for digit in classes:
        index = np.flatnonzero(digits.target == digit)[offset : offset + per_class]
        target = folder / (names[digit] if names else str(digit))
        target.mkdir(parents=True)
        for i in index:
            pixels = (digits.images[i] * (255 / 16)).round().astype(np.uint8)
            Image.fromarray(pixels).resize((32, 32)).save(target / f"{i}.png")
    return folder


def settings(**extra) -> list[str]:
    """Return `-c` arguments for a small listed federation with the numpy method."""
    given = {
        "method.name": "running_mean",
        "tasks.schedule": "listed",
        "tasks.classes": [["0", "1"], ["2", "3"]],
        "round.rounds_per_task": 1,
        "round.min_clients": 2,
        "round.grace_s": 2.0,
        "federation.heartbeat_s": 1.0,
        "run.plots": False,  # a quarter of what a small federation computes
    } | {k.replace("__", "."): v for k, v in extra.items()}
    arguments = []
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["-c", f"{key}={text}"]
    return arguments


def until_log(federation: LocalFederation, name: str, words: str, timeout_s: float = 120.0) -> None:
    """Wait until a process's log holds these words."""
    log = federation.log(name)
    changes = watch(log, rust_timeout=5000, yield_on_timeout=True)
    ends = time.monotonic() + timeout_s
    while words not in log.read_text(errors="replace"):
        assert time.monotonic() < ends, f"{name} did not say {words!r}"
        next(changes)


def until_all_hold(federation: LocalFederation, names: str, classes: int) -> None:
    """Wait until each of these clients has announced so many classes; no round may open meanwhile.

    Who scans its folder first would else be asked alone.
    """
    missing = set(names)
    while missing:
        told = federation.until("announced", text=f"of {classes} classes")["text"]
        missing -= {name for name in missing if f":{name} holds" in told}


def until_each(federation: LocalFederation, *wanted: tuple[str, str]) -> None:
    """Wait until notes of each of these codes and texts have come, in whatever order."""
    missing = set(wanted)
    while missing:
        after = federation._heard
        news = control_socket.ask(federation.federation, "notes", 600.0, after=after)
        for note in news["notes"]:
            missing -= {
                (c, text) for c, text in missing if c == note["code"] and text in note["text"]
            }
        federation._heard = news["last"]


def signal_workers(federation: LocalFederation, name: str, what: signal.Signals) -> None:
    """Signal the workers of a client, which compute; the daemon itself stays awake."""
    pid = federation.clients[name].pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), what)


def open_ledger(federation: LocalFederation) -> Ledger:
    """Open the federation's ledger to look at."""
    return Ledger(federation.federation / LEDGER_NAME, read_only=True)


def command(federation, *arguments):
    """Run a command of the server's in the federation's directory; return what it says."""
    given = [sys.executable, "-m", "fcil_server", *arguments, "--dir", str(federation.federation)]
    env = federation.environment()
    done = subprocess.run(given, check=False, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["data"]


def member(federation, folder):
    """Return the name under which a folder's client is enrolled."""
    with open_ledger(federation) as ledger:
        (name,) = [c.name for c in ledger.clients.all() if c.name.endswith(f":{folder.name}")]
    return name
