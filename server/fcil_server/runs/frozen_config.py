"""The part of its configuration that a run keeps, even if the file changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from fcil_server.federation import config as configuration
from fcil_server.federation.config import Config
from fcil_server.ledger.rows import RunRow
from fcil_server.reports.traffic.budget import applied

FIXED_SECTIONS = ("method", "run", "tasks", "wire", "privacy")
FREE_KEYS = {
    "tasks": {"admit"},
    "run": {
        "central_test",
        "central_test_every",
        "device",
        "plots",
        "threads",
        "weights",
        "work_timeout_s",
        "worker_idle_s",
    },
    "wire": {"max_payload_mb", "window_mb"},
    "privacy": {"evaluate_min_count", "share_names"},
}


def config_of(
    row: RunRow | None, config: Config, notify: Callable[[str, str, str], None]
) -> Config:
    """Return the configuration to run with: the run's own for fixed keys.

    Args:
        row: the run that is resumed; None: a new one.
        config: the configuration that the server started with.
        notify: writes a note for the operator: (level, code, text).
    """
    if row is None:
        return config
    own = configuration.parse(row.config)
    given, chosen = config, row.environment.get("budget")
    if chosen:  # a budget's choices at the run's start are no difference, unless they are set now
        mine = given.method.options
        given = applied(given, {k: v for k, v in chosen["options"].items() if k not in mine})
    update: dict[str, Any] = {}
    for section in FIXED_SECTIONS:
        theirs, ours = getattr(given, section), getattr(own, section)
        free = {k: getattr(theirs, k) for k in FREE_KEYS.get(section, ())}
        update[section] = ours.model_copy(update=free)
        if others := _differing(theirs, update[section]):
            notify(
                "warning",
                "config_kept",
                f"[{section}] {', '.join(others)}: run {row.run_id} was started with other values "
                "and keeps them. Start a new one with: fcil-server serve --new-run",
            )
    return config.model_copy(update=update)


def as_begun(row: RunRow, config: Config) -> Config:
    """Return the configuration with which a run began, with the machine of today.

    Weights may have moved since, and a GPU be gone.
    """
    own = configuration.parse(row.config)
    today = {key: getattr(config.run, key) for key in FREE_KEYS["run"]}
    return own.model_copy(update={"run": own.run.model_copy(update=today)})


def _differing(given: BaseModel, kept: BaseModel) -> list[str]:
    """Return the keys that are set, here or in the run, to other values than the run keeps.

    A default that changed with a version of this program is not the operator's wish.
    """
    keys = given.model_fields_set | set(kept.model_extra or {})
    theirs, ours = given.model_dump(), kept.model_dump()
    return sorted(key for key in keys if theirs.get(key) != ours.get(key))
