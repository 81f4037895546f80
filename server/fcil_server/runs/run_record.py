"""The row of a run in the ledger: written when it begins, compared when it resumes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcil_adapters.contract import BackboneInfo, Hparams, Method, registry
from fcil_adapters.contract.backbone_info import backbone_fields, backbone_from_fields
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.images.named_sets import find
from fcil_adapters.images.sources import open_source
from fcil_adapters.masks.exchanges import in_terms
from fcil_protocol.errors import BackboneMismatch, ConfigError, DataError, RunFailed
from fcil_protocol.ids import new_run_id
from fcil_protocol.storage.atomic_files import make_private
from fcil_server.aggregation import start
from fcil_server.aggregation.aggregation import threads_of
from fcil_server.aggregation.store import new_id, states_folder
from fcil_server.federation import config as configuration
from fcil_server.federation.directory import operator
from fcil_server.federation.sections import RunSection, SinksSection, WebhooksSection
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.reports import run_directory
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.runs.fork import share_start
from fcil_server.runs.resources import RunSetup

MOST_LOOKED_AT = 1_500_000  # files and folders, for test images; ImageNet-1k has 1.43 million
# They belong to the server, not to the run; and an address may hold a password.
_APART = {"sinks": SinksSection(), "webhooks": WebhooksSection()}


def begin(
    ledger: Ledger, setup: RunSetup, facts: dict[str, Any], notify: Callable[[str, str, str], None]
) -> RunRow:
    """Begin a run with the facts of its environment and its first LoRA, if it has one."""
    config = setup.config
    described = run_directory.describe_environment(
        setup.aggregation.described, threads=threads_of(config)
    )
    begun = None
    if config.run.init_from:
        begun = start.read_new(config.run.init_from, setup.method, setup.hparams, setup.info)
        described[start.FACT] = begun.facts
    return begin_row(ledger, setup, {**described, **facts}, notify, begun)


async def in_thread(check: Callable[..., None], *args: object) -> None:
    """Call a check in a thread; its last argument tells it when its caller was cancelled.

    A process that ends waits for its threads.
    """
    left = threading.Event()
    try:
        await asyncio.to_thread(check, *args, left.is_set)
    finally:
        left.set()


def check_places(
    run: RunSection,
    method: Method,
    hparams: Hparams,
    abandoned: Callable[[], bool] = lambda: False,
) -> None:
    """Check that what a new run's settings name is there, before clients train for it.

    Args:
        run: its settings.
        method: its method.
        hparams: the method's options.
        abandoned: returns True once the caller no longer waits.

    Raises:
        ConfigError: something is not there, or the method cannot begin with an adapter.
    """
    check_central_test(run, abandoned)
    if run.init_from:
        start.check_can_begin(method, hparams)
        if not Path(run.init_from).exists():
            raise ConfigError(
                f"run.init_from: there is no folder {run.init_from}.",
                action="Give the folder of a PEFT adapter (docs/export.md), or leave it out.",
            )


def check_central_test(run: RunSection, abandoned: Callable[[], bool] = lambda: False) -> None:
    """Check that the server's own test images are there, if a run is to be tested on some.

    Args:
        run: the run's settings.
        abandoned: returns True once the caller no longer waits.

    Raises:
        ConfigError: they are not, or their folder holds too much.
    """
    met = itertools.count(1)

    def watch() -> None:
        if next(met) > MOST_LOOKED_AT:
            raise DataError(
                f"{run.central_test} holds more than {MOST_LOOKED_AT:,} files and folders.",
                action="Name the folder that holds the test images alone (docs/data.md).",
            )
        if abandoned():
            raise DataError("the server ends before it has seen the images.")

    if run.central_test:
        try:
            open_source(find(Path(run.central_test)), watch).listing()
        except DataError as error:
            raise ConfigError(f"run.central_test: {error.message}", action=error.action) from error


def begin_row(
    ledger: Ledger,
    setup: RunSetup,
    facts: dict[str, Any],
    notify: Callable[[str, str, str], None],
    begun: start.NewStart | None = None,
) -> RunRow:
    """Add a run to the ledger; the file that it begins with is there before."""
    run, config, method = new_run_id(), setup.config, setup.method
    if begun is not None:
        begun.write(states_folder(ledger.path.parent, run).parent)
    former = ledger.runs.newest()
    left = former is not None and former.status is RunStatus.RUNNING
    with ledger.transaction():  # without its listed classes, a run would wait for other classes
        if former is not None and left:
            ledger.runs.set_status(former.run_id, RunStatus.STOPPED)
        row = ledger.runs.add(
            run,
            method=method.name,
            method_version=method.version,
            config=configuration.to_toml(config.model_copy(update=_APART)),
            hparams=setup.hparams.model_dump(mode="json"),
            backbone=backbone_fields(setup.info),
            schema_digest=setup.schema_digest,
            seed=config.run.seed,
            environment=facts,
        )
        if config.tasks.schedule == "listed":
            ClassRegistry(ledger, run).register_listed(config.tasks.classes)
        ledger.audit.add(operator(), "run_begun", run)
    if former is not None and left:
        notify("warning", "set_aside", f"run {former.run_id} is not complete, and is stopped")
    more = f"; {begun.text()}" if begun is not None else ""
    notify("info", "run_begun", f"run {run} begins with method {method.name}{more}")
    return row


def begin_again(ledger: Ledger, directory: Path, source: RunRow, *, actor: str) -> RunRow:
    """Stop a run without a state, and begin another one with its settings and its start.

    Args:
        ledger: the federation's.
        directory: the federation's.
        source: the run.
        actor: the caller, for the audit log.

    Raises:
        DiskFull, StorageError: nothing was changed.
    """
    run, tasks = new_id(ledger), configuration.parse(source.config).tasks
    make_private(states_folder(directory, run).parent)
    share_start(directory, source.run_id, run)
    with ledger.transaction():
        ledger.runs.set_status(source.run_id, RunStatus.STOPPED)
        row = ledger.runs.add(
            run,
            method=source.method,
            method_version=source.method_version,
            config=source.config,
            hparams=source.hparams,
            backbone=source.backbone,
            schema_digest=source.schema_digest,
            seed=source.seed,
            environment=source.environment,
        )
        if tasks.schedule == "listed":
            ClassRegistry(ledger, run).register_listed(tasks.classes)
        ledger.audit.add(actor, "restore_begin", f"{run} in place of {source.run_id}")
    return row


def check_installed(row: RunRow) -> None:
    """Check that a server could resume a run, as far as that is known without its weights.

    Raises:
        ConfigError: its method is not installed, or does not know its options.
        RunFailed: it was begun with another version of the method.
    """
    config = configuration.parse(row.config)
    terms = config.privacy.terms
    method = registry.load_method(row.method)
    method = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    method = in_terms(method, terms)
    info = backbone_from_fields(dict(row.backbone))
    hparams = registry.make_hparams(method, dict(row.hparams))
    check_resumed(row, method, info, registry.schema_digest(method, hparams, info, terms))


def check_backbone(row: RunRow, info: BackboneInfo, action: str) -> None:
    """Refuse another backbone than the one that a run was begun with.

    Raises:
        BackboneMismatch: with both digests, and the action.
    """
    if row.backbone.get("digest") != info.digest:
        raise BackboneMismatch(
            f"run {row.run_id} was started with backbone weights "
            f"{str(row.backbone.get('digest'))[:12]}, now they are {info.digest[:12]}.",
            action=action,
        )


def check_resumed(row: RunRow, method: Method, info: BackboneInfo, digest: str) -> None:
    """Refuse to resume a run that was begun with another backbone or method.

    Raises:
        BackboneMismatch, RunFailed: with both values, and what to do.
    """
    action = "Give the same weights file, or start a new run: fcil-server serve --new-run"
    check_backbone(row, info, action)
    if row.method_version != method.version or row.schema_digest != digest:
        raise RunFailed(
            f"run {row.run_id} was started with {row.method} {row.method_version} (schema "
            f"{row.schema_digest[:12]}), installed is {method.version} (schema {digest[:12]}).",
            action="Go back to the fcil that began it (docs/upgrades.md), or start a new run: "
            "fcil-server serve --new-run",
        )
