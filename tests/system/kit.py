"""What the system tests share: real digits as folders, and a federation of processes."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fcil_server.ledger import LEDGER_NAME, Ledger
from fcil_server.local import LocalFederation

_DIGITS = load_digits()


def write_client(folder: Path, classes, *, per_class=12, offset=0, names=None) -> Path:
    """Write the digits `classes` as PNGs, `per_class` of each from the offset-th on."""
    for digit in classes:
        index = np.flatnonzero(_DIGITS.target == digit)[offset : offset + per_class]
        target = folder / (names[digit] if names else str(digit))
        target.mkdir(parents=True)
        for i in index:
            pixels = (_DIGITS.images[i] * (255 / 16)).round().astype(np.uint8)
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


def open_ledger(federation: LocalFederation) -> Ledger:
    """Open the federation's ledger to look at."""
    return Ledger(federation.federation / LEDGER_NAME, read_only=True)
