"""An experiment small enough to be read, and results as if its cells had run."""

from __future__ import annotations

import copy
from typing import Any

from fcil_server.lab.experiment import Experiment, parse

FIELDS: dict[str, Any] = {
    "title": "A table",
    "data": {"name": "toys", "classes": 4, "tasks": 2, "order": "natural"},
    "setting": {"seeds": [1, 2], "clients": 3, "rounds_per_task": 2},
    "budget": {"cell_s": 10},
    "partitions": [
        {"kind": "quantity", "name": "alpha=1", "alpha": 1},
        {"kind": "dirichlet", "name": "beta=1", "beta": 1.0},
    ],
    "rows": [
        {"title": "NCM", "method": "fedncm"},
        {"title": "Ridge", "method": "analytic", "partitions": ["beta=1"]},
        {"title": "Joint", "method": "analytic", "joint": True},
    ],
}


def fields(**changes: Any) -> dict[str, Any]:
    """Return the experiment's fields with some sections replaced."""
    return {**copy.deepcopy(FIELDS), **changes}


def experiment(**changes: Any) -> Experiment:
    return parse(fields(**changes), "toy")


def content(name: str, faa: float, aia: float = 50.0, wall_s: float = 10.0) -> dict[str, Any]:
    """Return what a finished cell's file holds, as far as the report looks at it."""
    size = {"true_wire": 3000, "wire": 2900, "tensor": 1000}
    link = {**size, "wire": 0}
    return {
        "version": 1,
        "key": "k" * 24,
        "cell": name,
        "identity": {"partition": "p" * 64},
        "train_images": 8,
        "test_images": 2400,
        "faa": faa,
        "aia": aia,
        "forgetting": {"max": 5.0, "diag": 4.0, "fedmammoth": 2.0},
        "task_mean": [80.0, faa],
        "matrix": [[80.0], [faa - 10, faa + 10]],
        "bytes": {
            "up": size,
            "down": size,
            "by_cause": {
                "update": {"up": size, "down": size},
                "connection": {"up": link, "down": link},
            },
        },
        "per_client_round": {
            "up_tensor": 100,
            "down_tensor": 200,
            "up_true_wire": 150,
            "down_true_wire": 250,
        },
        "seconds": {"wall_s": wall_s, "cpu_s": wall_s / 2},
        "peak_memory_mb": 100,
        "rounds": {"all": 4, "not_done": 0, "updates": 12, "excluded": 0, "silent": {}},
        "backbone": {"name": "vit", "digest": "b" * 64},
        "method_version": "1",
        "revision": "0123456789ab",
        "environment": {"python": "3.11", "packages": {"numpy": "2"}, "source_digest": "d" * 64},
        "environment_digest": "e" * 64,
    }
