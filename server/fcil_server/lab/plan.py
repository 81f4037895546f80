"""Cells of an experiment, with their settings and the keys of their results.

Pure: nothing here reads data or starts a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fcil_adapters.contract import Hparams, Method, registry, source_code
from fcil_protocol.errors import ConfigError, FcilError
from fcil_protocol.ids import digest_of
from fcil_server.federation import config as configuration
from fcil_server.federation.config import Config
from fcil_server.lab.experiment import AnyPartition, Experiment, Iid, RowSection

RESULT_VERSION = 1  # of a cell's file; cells of another version are computed again
# The processes that call methods; images, splits, features and evaluation are in what they import.
WORKERS = ("fcil_client.rounds.worker", "fcil_server.aggregation.worker")
DEADLINE_S = 7 * 86_400.0  # no experiment leaves a slow client behind
GRACE_S = 600.0

# Settings made by the laboratory; a TOML must not set them.
OWN_KEYS = {
    "federation": {"name", "ids", "listen", "advertise"},
    "run": {
        "seed",
        "backbone",
        "weights",
        "image_size",
        "device",
        "threads",
        "evaluate",
        "central_test",
    },
    "method": None,  # set by rows
    "tasks": None,
    "round": {"rounds_per_task", "clients_per_round", "min_clients"},
}


@dataclass(frozen=True)
class PartitionRequest:
    """Inputs of a partition file.

    Attributes:
        rounds: HePCo's partitions are drawn for each round; 0 for all others.
    """

    part: AnyPartition
    clients: int
    tasks: int
    order: str
    per_class: int
    rounds: int
    seed: int

    def arguments(self) -> list[str]:
        """Return the options of ``fcil-client split``, apart from the data and the file."""
        given = {
            "partition": self.part.kind,
            "clients": self.clients,
            "tasks": self.tasks,
            "order": self.order,
            "seed": self.seed,
            "per-class": self.per_class or None,
            "test-per-class": 1,  # clients do not evaluate, and would only read them
            "rounds": self.rounds or None,
            **self.part.model_dump(exclude={"kind", "name"}),
        }
        return [w for k, v in given.items() if v is not None for w in (f"--{k}", str(v))]

    @property
    def slug(self) -> str:
        """Short unique name."""
        return digest_of(self.arguments())[:16]


@dataclass(frozen=True)
class Cell:
    """One row, partition and seed, with everything that does not need the data.

    Attributes:
        settings: of the server, without tasks and files.
        expected_s: expected seconds before any measurement.
    """

    row: str
    partition: str
    seed: int
    split: PartitionRequest
    test_per_class: int
    method: str
    hparams: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    expected_s: float

    @property
    def name(self) -> str:
        """Name for users."""
        return f"{self.row}/{self.partition}/{self.seed}"

    def identity(self, partition: str, backbone: str) -> dict[str, Any]:
        """Return all inputs of the result.

        Args:
            partition: the digest of the partition file, which covers the data.
            backbone: the digest of the backbone's weights, or its name if timm provides them.
        """
        method = registry.load_method(self.method)
        apart = ("method", "sinks", "webhooks")  # named below, or without influence
        settings = {s: dict(keys) for s, keys in self.settings.items() if s not in apart}
        return {
            "version": RESULT_VERSION,
            "partition": partition,
            "test_per_class": self.test_per_class,
            "backbone": backbone,
            "method": method.name,
            "method_version": method.version,
            "package": registry.package_of(method.name),
            "code": _code_of(method.name),
            "hparams": dict(self.hparams),
            "settings": settings,
        }


@lru_cache
def _code_of(method: str) -> str:
    manifest = registry.module_of(method)
    return source_code.method_digest(registry.load_method(method), manifest, WORKERS)


def make(experiment: Experiment) -> list[Cell]:
    """List all cells: seed by seed, in the order of rows and partitions.

    The first seed of the whole table comes first, so that a complete table is there early. A joint
    row has one partition for all: its cells differ only in name, and so they share one result.

    Raises:
        ConfigError: one message that names every fault of methods, options and settings.
    """
    faults: list[str] = []
    rows: dict[str, tuple[Method, Hparams]] = {}
    for row in experiment.rows:
        try:
            method = registry.load_method(row.method)
            rows[row.title] = (method, registry.make_hparams(method, _options(row)))
        except FcilError as error:
            faults.append(f"row {row.title!r}: {error.message} {error.action}".strip())
            continue
        faults += _setting_faults(experiment, row)
    if faults:
        raise ConfigError(" ".join(faults))
    return list(_cells(experiment, rows))


def _cells(experiment: Experiment, rows: Mapping[str, tuple[Method, Hparams]]) -> Iterator[Cell]:
    for seed in experiment.setting.seeds:
        for row in experiment.rows:
            if row.seeds is not None and seed not in row.seeds:
                continue
            method, hparams = rows[row.title]
            for part in experiment.partitions:
                if row.partitions is None or part.name in row.partitions:
                    yield Cell(
                        row=row.title,
                        partition=part.name,
                        seed=seed,
                        split=split_of(experiment, row, part, seed),
                        test_per_class=experiment.data.test_per_class,
                        method=method.name,
                        hparams=hparams.model_dump(mode="json"),
                        settings=settings_of(experiment, row, seed),
                        expected_s=row.cell_s or experiment.budget.cell_s,
                    )


def split_of(
    experiment: Experiment, row: RowSection, part: AnyPartition, seed: int
) -> PartitionRequest:
    """Return the inputs of a cell's partition."""
    data, setting = experiment.data, experiment.setting
    if row.joint:
        joint = Iid(kind="iid", name="joint")
        return PartitionRequest(joint, 1, 1, data.order, data.train_per_class, 0, seed)
    rounds = row.rounds_per_task or setting.rounds_per_task
    return PartitionRequest(
        part=part,
        clients=row.clients or setting.clients,
        tasks=data.tasks,
        order=data.order,
        per_class=data.train_per_class,
        rounds=rounds if part.kind == "hepco" else 0,
        seed=seed,
    )


def settings_of(experiment: Experiment, row: RowSection, seed: int) -> dict[str, dict[str, Any]]:
    """Return the server's settings for a cell, without tasks and files."""
    setting = experiment.setting
    clients = 1 if row.joint else row.clients or setting.clients
    asked = setting.clients_per_round if row.clients_per_round is None else row.clients_per_round
    own: dict[str, dict[str, Any]] = {
        "federation": {"ids": "named"},
        "run": {
            "seed": seed,
            "backbone": setting.backbone,
            "device": setting.device,
            "threads": setting.threads,
            "evaluate": False,
            "plots": False,
            **({"image_size": setting.image_size} if setting.image_size else {}),
        },
        "method": {"name": row.method, **_options(row)},
        "round": {
            "rounds_per_task": row.rounds_per_task or setting.rounds_per_task,
            "clients_per_round": 0 if row.joint else asked,
            "min_clients": clients,
            "quorum": 1,
            "deadline_s": DEADLINE_S,
            "grace_s": GRACE_S,
            "settle_s": 0.0,
        },
        # Papers neither cap a client's weight nor exclude one that is unlike the others.
        "trust": {"max_weight_share": 1.0, "outlier_factor": 0.0},
        "storage": {"keep_states": 1},
    }
    for given in (setting.config, row.config):
        for section, keys in given.items():
            own[section] = {**own.get(section, {}), **keys}
    return own


def server_config(
    cell: Cell, tasks: Sequence[Sequence[str]], *, weights: str, central_test: str
) -> Config:
    """Return the complete configuration of a cell's server.

    Raises:
        ConfigError: the settings of the TOML are wrong.
    """
    fields = {section: dict(keys) for section, keys in cell.settings.items()}
    fields["tasks"] = {"schedule": "listed", "classes": [list(names) for names in tasks]}
    fields["run"] |= {"weights": weights, "central_test": central_test}
    return configuration.validate(fields)


def _options(row: RowSection) -> dict[str, Any]:
    return {**({"preset": row.preset} if row.preset else {}), **row.options}


def _setting_faults(experiment: Experiment, row: RowSection) -> list[str]:
    faults = []
    for given in (experiment.setting.config, row.config):
        for section, keys in given.items():
            own = OWN_KEYS.get(section, set())
            faults += [
                f"row {row.title!r}: config.{section}.{key} is set by the laboratory"
                for key in sorted(keys if own is None else own & keys.keys())
            ]
    if faults:
        return faults
    try:
        whole = settings_of(experiment, row, experiment.setting.seeds[0])
        least = configuration.validate(whole).least_updates
        if whole["round"]["min_clients"] < least:  # it would wait for more for ever
            faults.append(
                f"row {row.title!r}: it has {whole['round']['min_clients']} client, and a round "
                f"needs {least} updates (round.min_updates, or noise)"
            )
    except ConfigError as error:
        faults.append(f"row {row.title!r}: {error.message}")
    return faults


def choose(cells: Sequence[Cell], only: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return the selected cells.

    Args:
        cells: of the experiment.
        only: ``ROW`` or ``ROW/PARTITION`` each, in any letter case; empty: all.
        seeds: empty: all.

    Raises:
        ConfigError: no cell has one of these names.
    """
    chosen = [c for c in cells if not seeds or c.seed in seeds]
    if missing := sorted(set(seeds) - {c.seed for c in cells}):
        known = ", ".join(str(s) for s in sorted({c.seed for c in cells}))
        raise ConfigError(f"the experiment has no seed {missing[0]}; it has {known}.")
    if not only:
        return chosen
    wanted: set[str] = set()
    for text in only:
        found = {c.name for c in chosen if _matches(c, text)}
        if not found:
            rows = ", ".join(dict.fromkeys(c.row for c in cells))
            parts = ", ".join(dict.fromkeys(c.partition for c in cells))
            raise ConfigError(
                f"there is no cell {text!r} in this experiment.",
                action=f"Rows: {rows}. Partitions: {parts}. Write ROW or ROW/PARTITION.",
            )
        wanted |= found
    return [c for c in chosen if c.name in wanted]


def _matches(cell: Cell, text: str) -> bool:
    row, _, part = text.casefold().partition("/")
    return cell.row.casefold() == row and part in ("", cell.partition.casefold())
