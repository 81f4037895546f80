"""A partition of ``fcil-client split``, as far as a server needs it: the tasks, and for whom.

The images, and who holds which, are the clients' part of the file, and are not looked at here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fcil_protocol.errors import ConfigError, CorruptFile, DataError, UsageError
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_server.federation import config as configuration
from fcil_server.federation.config import Config
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger

FORMAT = 1


@dataclass(frozen=True)
class PartitionPlan:
    """The classes of each task of a partition.

    Attributes:
        path: of its file.
        tasks: class names of each task, in their order.
        clients: number of clients that share the images.
        rounds: rounds of each task that were drawn; None: one draw serves any number.
    """

    path: Path
    tasks: list[list[str]]
    clients: int
    rounds: int | None

    def to_fields(self) -> dict[str, Any]:
        """Return its fields as plain data, for a command to the server."""
        return {
            "path": str(self.path),
            "tasks": self.tasks,
            "clients": self.clients,
            "rounds": self.rounds,
        }

    @classmethod
    def of(cls, fields: object) -> Self:
        """Return the plan with the fields of `to_fields`.

        Raises:
            UsageError: they are others.
        """
        match fields:
            case {
                "path": str(path),
                "tasks": list(tasks),
                "clients": int(clients),
                "rounds": int() | None as rounds,
            }:
                return cls(Path(path), [list(map(str, names)) for names in tasks], clients, rounds)
        raise UsageError(
            "a partition has a path, tasks, a number of clients and one of rounds.",
            action="Submit its file: fcil-server run submit --partition FILE",
        )


def read_plan(path: Path) -> PartitionPlan:
    """Read the server's part of a partition.

    Raises:
        DataError: there is no such file.
        CorruptFile: it is no partition, damaged, or of a newer fcil.
        StorageError: it cannot be read.
    """
    with storage_errors("read the partition", path):
        if not path.is_file():
            raise DataError(
                f"there is no partition {path}.",
                action="Make one: fcil-client split --data DATA --clients N --out FILE",
            )
        text = path.read_bytes()
    try:
        fields: dict[str, Any] = json.loads(text)
        named = str(fields.pop("digest"))
        if fields["format"] != FORMAT:
            raise _damaged(path, f"it has format {fields['format']}, expected {FORMAT}")
        if hashlib.sha256(_as_written(fields)).hexdigest() != named:
            raise _damaged(path, "its content does not match its digest: it was changed or damaged")
        drawn = fields["rounds"]
        tasks = [list(map(str, names)) for names in fields["tasks"]]
        return PartitionPlan(path, tasks, int(fields["clients"]), len(drawn[0]) if drawn else None)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(path, f"it has not the form of a partition ({error})") from error


def plan_settings(plan: PartitionPlan) -> tuple[str, ...]:
    """Return the settings that give a federation the partition's tasks, and let it wait for all.

    A round that opens before all clients are there would learn another division of the images.
    """
    # JSON of strings is TOML, too, but for pairs of surrogates, which stand for one character.
    return (
        'tasks.schedule="listed"',
        f"tasks.classes={json.dumps(plan.tasks, ensure_ascii=False)}",
        f"round.min_clients={plan.clients}",
    )


def check_fits(plan: PartitionPlan, config: Config) -> None:
    """Check that a run with this configuration learns what the partition divides.

    Args:
        plan: the partition's tasks.
        config: the run's, with `plan_settings` among the overrides.

    Raises:
        ConfigError: other settings do not fit.
    """
    if config.tasks.schedule != "listed" or config.tasks.classes != plan.tasks:
        raise ConfigError(
            f"tasks.classes or tasks.schedule is set to other tasks than those of {plan.path}.",
            action="Leave these settings or --partition out.",
        )
    if config.round.min_clients > plan.clients:
        raise ConfigError(
            f"round.min_clients is {config.round.min_clients}, and {plan.path} is for "
            f"{plan.clients} clients: no round would ever open.",
            action=f"Set it to {plan.clients} or fewer: -c round.min_clients={plan.clients}",
        )
    wanted = config.round.rounds_per_task
    if plan.rounds is not None and wanted > plan.rounds:
        raise ConfigError(
            f"round.rounds_per_task is {wanted}, and {plan.path} was drawn for {plan.rounds}: "
            "clients would decline the others.",
            action=f"Set it: -c round.rounds_per_task={plan.rounds}. Or draw more: fcil-client "
            f"split --rounds {wanted}",
        )


def check_resumes(plan: PartitionPlan, ledger: Ledger) -> None:
    """Check that the run that a server resumes learns what the partition divides.

    Raises:
        ConfigError: it has other tasks.
    """
    run = ledger.runs.newest()
    if run is None or run.status is RunStatus.STOPPED:
        return
    if configuration.parse(run.config).tasks.classes != plan.tasks:
        raise ConfigError(
            f"run {run.run_id}, which would be resumed, has other tasks than {plan.path}.",
            action="Begin another run: fcil-server serve --new-run --partition FILE. Or use "
            "another directory: --dir",
        )


def _as_written(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _damaged(path: Path, fault: str) -> CorruptFile:
    return CorruptFile(
        f"the partition {path} cannot be used: {fault}.",
        action="Make it again: fcil-client split writes the same file from the same data and "
        "options.",
    )
