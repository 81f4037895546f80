"""Opening of the federation's current run, or of a new one: worker, method, backbone, stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, registry
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.contract.manifest_checks import (
    check_asynchronous,
    check_averaging,
    check_manifest,
    check_privacy,
    check_uploads,
)
from fcil_adapters.contract.source_code import blaming
from fcil_adapters.masks.exchanges import fewest_classes, in_terms
from fcil_protocol.errors import (
    ConfigError,
    FcilError,
    OutOfMemory,
    StorageError,
    WorkerDied,
    WorkerStalled,
    as_fcil_error,
)
from fcil_protocol.formats import format_bytes
from fcil_protocol.ids import ClientId, RoundKey, RunId
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.publisher import Publisher
from fcil_server.federation import config as configuration
from fcil_server.federation.config import Config
from fcil_server.federation.directory import Federation
from fcil_server.federation.sections import TasksSection, TrustSection
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import ByteCount, RunRow
from fcil_server.reports import run_directory
from fcil_server.reports.sinks import registry as doors
from fcil_server.reports.sinks.process import FollowerProcess, SinkProcess, Sinks, WebhookProcess
from fcil_server.reports.sinks.registry import Chosen
from fcil_server.reports.sinks.webhooks import Webhook, choose_webhooks
from fcil_server.reports.traffic.budget import applied, fitted, over_budget
from fcil_server.rounds.coordinator import Coordinator
from fcil_server.runs import run_queue
from fcil_server.runs.erase import finish_erasures
from fcil_server.runs.forget import finish_emptying, remove_uncounted
from fcil_server.runs.frozen_config import config_of
from fcil_server.runs.promotion import Promotion
from fcil_server.runs.recovery import ensure_state
from fcil_server.runs.resources import RunSetup, make_context
from fcil_server.runs.run_queue import QueuedRun, RunQueue, begun_entries, config_for, next_run
from fcil_server.runs.run_record import (
    begin,
    check_central_test,
    check_places,
    check_resumed,
    in_thread,
)
from fcil_server.runs.uploads import RunUploads
from fcil_server.sessions.handshake import RunTerms
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.run_ports import RunPorts


@dataclass(frozen=True)
class _Followers:
    """The sinks and webhooks of a configuration, checked."""

    sinks: list[Chosen]
    webhooks: list[Webhook]

    def processes(self, federation: Federation, run: RunId, ports: RunPorts) -> Sinks:
        """Return their processes, which are not started yet."""
        directory, name = federation.directory, federation.config.federation.name
        made: list[FollowerProcess] = [
            SinkProcess(directory, run, one, ports.notify) for one in self.sinks
        ]
        made += [WebhookProcess(directory, name, one, ports.notify) for one in self.webhooks]
        return Sinks(made)


@dataclass
class OpenRun:
    """A run with all the parts that serve it.

    Attributes:
        config: the configuration that the server started with; the run keeps its own fixed keys.
        directory: the run's.
    """

    federation: Federation
    config: Config
    ports: RunPorts
    directory: Path
    coordinator: Coordinator
    publisher: Publisher
    aggregation: Aggregation
    terms: RunTerms
    sinks: Sinks
    promotion: Promotion
    is_over: bool = False  # complete, with its results written

    async def drive(self) -> None:
        """Drive the run to its end; then write its results."""
        self.sinks.start()
        await self.promotion.restore()
        ledger, run = self.federation.ledger, self.coordinator.context.run
        row = ledger.runs.get(run)
        if row is None or row.status is not RunStatus.DONE:
            await self._learn()
            await self.promotion.on_run_complete()
        self.coordinator.end()  # also for a run that was already complete
        if not run_directory.is_complete(self.directory):  # missing after a kill at the very end
            await self.write_results()
        spool = self.coordinator.context.spool
        spool.remove(spool.keys())  # the last state now has a second copy
        text = f"run {run} is complete: {self.directory}; for more: fcil-server report"
        self.ports.notify("info", "run_done", text)
        self.is_over = True
        if not self.ports.another_waits():
            for peer in self.ports.peers:
                self.ports.tell_done(peer)
        self.ports.done()

    async def _learn(self) -> None:
        ledger, run = self.federation.ledger, self.coordinator.context.run
        ledger.runs.set_status(run, RunStatus.RUNNING)
        try:
            await self.coordinator.drive()
        except StorageError:
            raise  # the disk failed, not the run: it resumes when the server starts again
        except FcilError:
            with contextlib.suppress(StorageError):  # the first failure is the one reported
                ledger.runs.set_status(run, RunStatus.FAILED)
            raise
        ledger.runs.set_status(run, RunStatus.DONE)

    async def write_results(self) -> None:
        """Rewrite the run directory, in a thread."""
        path, context = self.federation.ledger.path, self.coordinator.context

        def write() -> None:
            with Ledger(path, read_only=True) as ledger:
                drawn = context.config.run.plots
                run_directory.write(
                    ledger, context.run, self.directory, states=context.states, plots=drawn
                )

        await self.ports.flush_bytes()
        await asyncio.to_thread(write)
        self.sinks.wake()

    async def write_round(self, key: RoundKey) -> None:
        """Append a closed round to ``rounds.jsonl``; after a failure the next round appends it."""
        path = self.federation.ledger.path

        def write() -> None:
            with Ledger(path, read_only=True) as ledger:
                run_directory.append_round(ledger, key, self.directory)

        try:
            await asyncio.to_thread(write)
            self.sinks.wake()
            await self._look_at_budget(key)
        except StorageError as error:
            self.ports.notify("warning", error.code, str(error))

    async def _look_at_budget(self, key: RoundKey) -> None:
        """Warn if a round cost a client more than the run's budget."""
        limit = round(self.coordinator.context.config.wire.budget_mb * 1e6)
        if not limit:
            return
        path = self.federation.ledger.path

        def read() -> list[ByteCount]:
            with Ledger(path, read_only=True) as ledger:
                return ledger.bytes.of_round(key)

        over = over_budget(await asyncio.to_thread(read), limit)
        if over is not None:
            row = self.federation.ledger.clients.get(ClientId(over[0]))
            self.ports.notify(
                "warning",
                "over_budget",
                f"{key.kind} round {key.round} of task {key.task} cost "
                f"{row.name if row else over[0]} {format_bytes(over[1])}; the budget is "
                f"{format_bytes(limit)}",
                ClientId(over[0]),
            )

    def make_intake(self) -> Intake:
        """Make the intake of this run's uploads."""
        wire = self.config.wire
        return Intake(
            federation=self.federation.id,
            keys=self.federation.keys,
            incoming=self.directory / "incoming",
            spool=self.coordinator.context.spool,
            credit=wire.credit,
            max_payload_bytes=int(wire.max_payload_mb * 1e6),
            max_classes=self.config.trust.max_classes_per_client,
            ports=RunUploads(self.coordinator, self.ports, self.promotion),
        )

    async def close(self, *, next_run: bool = False) -> None:
        """Stop the worker and close the stores; ``next_run``: another run begins then."""
        try:
            await self.promotion.close()
            await self.coordinator.closing.wait_until_tidied()
            await self.sinks.end(next_run=next_run)
        finally:
            await self.aggregation.close()
            self.coordinator.context.spool.close()


# Faults of the machine; all others are a submitted run's own.
_MACHINE = (OutOfMemory, StorageError, WorkerDied, WorkerStalled)


async def open_run(
    federation: Federation, config: Config, ports: RunPorts, *, new: bool
) -> OpenRun:
    """Open the newest run of the federation, or begin one.

    After a complete or stopped run the next one of the queue begins. One that cannot begin is kept
    with its reason, and the next one has its turn.

    Args:
        federation: the run's federation.
        config: the configuration that the server started with.
        ports: the daemon's side; the opening uses only ``notify``.
        new: begin a run with this configuration, even if there is one.

    Raises:
        ConfigError, BackboneMismatch, RunFailed: with the next action.
        EgressRefused: the method's uploads would contain data that may not leave clients.
    """
    ledger, queue = federation.ledger, RunQueue(federation.directory)
    finish_emptying(ledger, federation.directory)
    finish_erasures(ledger, federation.directory)
    try:
        remove_uncounted(ledger, federation.directory, (r.run_id for r in ledger.runs.all()))
    except StorageError as error:  # perhaps of an archived run: no reason to stand still
        ports.notify("warning", error.code, str(error))
    chosen = _Followers(  # before any run: their faults are the server's
        [doors.choose(name, options) for name, options in config.sinks.options.items()],
        choose_webhooks(config.webhooks.options),
    )
    while True:
        row, entry = next_run(queue, ledger, new=new)
        try:
            given = config_for(row, entry, config, federation.overrides)
            own = config_of(row, given, ports.notify)
            with blaming(registry.load_method(own.method.name)):
                return await _open(own, federation, given, ports, row, entry, chosen)
        except Exception as error:
            machine = isinstance(error, _MACHINE)
            if entry is None or machine or entry.id in begun_entries(ledger):
                raise
            fault = as_fcil_error(error)
            queue.refuse(entry, fault)
            text = f"submitted {entry.name} cannot begin and is set aside: {fault}"
            ports.notify("error", fault.code, text)
            if next_run(queue, ledger, new=new) == (None, None):
                raise  # nothing is left, and a run of other settings is not asked for


async def _open(
    config: Config,
    federation: Federation,
    given: Config,
    ports: RunPorts,
    row: RunRow | None,
    entry: QueuedRun | None,
    chosen: _Followers,
) -> OpenRun:
    """Open a run, or begin one if there is no ``row``; its ``entry`` then leaves the queue.

    ``config`` is what the run has, or gets.
    """
    ledger, choice = federation.ledger, None
    if row is None and config.wire.budget_mb:
        method = registry.load_method(config.method.name)
        choice = fitted(method, config, backbone_by_name(config.run.backbone))
        config = applied(config, choice.options)
        ports.notify("info", "budget", choice.text())
    method, hparams = _method_of(config)
    plain = method.plain or method
    if row is None:
        await in_thread(check_places, config.run, plain, hparams)
    elif row.status is RunStatus.RUNNING:
        await _warn_of_no_test(config, ports.notify)
    if method.plain is not None and (faults := list(configuration.masks_faults(config))):
        raise ConfigError(f"{'; '.join(faults)}.")  # of sections that a run does not keep
    aggregation = Aggregation(
        method,
        hparams,
        config,
        log=federation.directory / "worker.log",
        notify=lambda text: ports.notify("warning", "worker", text),
    )
    try:
        info, probe = await aggregation.load_backbone()
        check_manifest(registry.load_method(config.method.name), info, hparams)
        check_uploads(method, hparams, info)
        check_privacy(plain, hparams, info, config.privacy.terms)
        if config.privacy.relay_sums:
            check_relay_sums(method, hparams, info)
        if config.round.mode == "async":
            check_asynchronous(method, hparams, info)
        digest = registry.schema_digest(method, hparams, info, config.privacy.terms)
        setup = RunSetup(config, method, hparams, info, digest, aggregation)
        tell_ignored(ports.notify, method, hparams, config)
        exchanges = method.exchanges(hparams, info)
        check_unlabelled(ports.notify, exchanges, evaluate=config.run.evaluate)
        check_task_sizes(config.tasks, fewest_classes(method, exchanges))
        if row is None:
            facts: dict[str, Any] = {} if choice is None else {"budget": choice.fields()}
            if entry is not None:
                facts[run_queue.FACT] = entry.facts()
            row = begin(ledger, setup, facts, ports.notify)
            if entry is not None:
                RunQueue(federation.directory).begun(entry)
        else:
            check_resumed(row, method, info, digest)
        opened = _assemble(federation, given, row, setup, probe, chosen, ports)
        fork = await ensure_state(opened.coordinator.context, federation.directory)
        if fork is None:
            return opened
        opened.coordinator.context.spool.close()
        return _assemble(federation, given, fork, setup, probe, chosen, ports)
    except BaseException:
        await aggregation.close()
        raise


async def _warn_of_no_test(config: Config, notify: Callable[[str, str, str], None]) -> None:
    """Note that a resumed run cannot be tested now: its folder may be back when a task ends."""
    try:
        await in_thread(check_central_test, config.run)
    except ConfigError as error:
        notify("warning", error.code, str(error))


def _method_of(config: Config) -> tuple[Method, Hparams]:
    """Return the configured method, in the configured tensor forms, and its options."""
    method = registry.load_method(config.method.name)
    method = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    hparams = registry.make_hparams(method, config.method.options)
    check_averaging(method, hparams, config.trust.averaging)
    return in_terms(method, config.privacy.terms), hparams


def _assemble(
    federation: Federation,
    given: Config,
    row: RunRow,
    setup: RunSetup,
    probe: NDArray[np.float32] | None,
    chosen: _Followers,
    ports: RunPorts,
) -> OpenRun:
    sinks = chosen.processes(federation, row.run_id, ports)
    context = make_context(federation, row, setup, ports)
    coordinator = Coordinator(context, ports, task_closed=sinks.wake)
    terms = RunTerms(
        federation=federation.id,
        certificate=federation.certificate.to_bytes(),
        run=row.run_id,
        method=context.method,
        hparams=context.hparams,
        info=context.info,
        probe=probe,
        schema_digest=context.schema_digest,
        max_payload_bytes=int(context.config.wire.max_payload_mb * 1e6),
        credit=context.config.wire.credit,
        privacy=context.config.privacy.terms,
        compact=context.config.wire.compact,
        object_store=context.publisher.object_store,
        package=version("fcil"),
        method_package=registry.package_of(context.method.name),
    )
    return OpenRun(
        federation=federation,
        config=given,
        ports=ports,
        directory=federation.run_directory(row.run_id),
        coordinator=coordinator,
        publisher=context.publisher,
        aggregation=context.aggregation,
        terms=terms,
        sinks=sinks,
        promotion=Promotion(context, coordinator.closing, federation.directory),
    )


def check_relay_sums(method: Method, hparams: Hparams, info: BackboneInfo) -> None:
    """Check that a method has updates that relays can add up.

    Raises:
        ConfigError: it has none.
    """
    if not any(exchange.summable for exchange in method.exchanges(hparams, info)):
        raise ConfigError(
            f"privacy.relay_sums is true, but the server of the method {method.name} with these "
            "options needs each client's own update.",
            action="Set it to false, or choose a method with rounds whose updates are sums "
            "(docs/relay.md).",
        )


def tell_ignored(
    notify: Callable[[str, str, str], None], method: Method, hparams: Hparams, config: Config
) -> None:
    """Warn of a cap on weights or of `keep_updates` if the method ignores it.

    The default cap counts as not set, for a federation's file has every key; and 1 caps nothing.
    """
    trust = config.trust
    if method.plain is not None:
        text = "rounds are masked: no weight is capped, and no outliers are looked for ([trust])"
        notify("info", "masked", text)
    if config.privacy.relay_sums:
        text = "relays add up updates: no weight is capped, and no outliers are looked for"
        notify("info", "relay_sums", f"{text} ([trust])")
    share, default = trust.max_weight_share, TrustSection().max_weight_share
    reason = method.uncapped(hparams)
    if reason and share not in (default, 1):
        notify("warning", "ignored", f"[trust] max_weight_share = {share} has no effect: {reason}")
    reason = method.forgets(hparams)
    if reason and config.run.keep_updates:
        text = f"[run] keep_updates has no effect: {method.name} cannot forget a client exactly"
        notify("warning", "ignored", f"{text}, for {reason}")


def check_task_sizes(tasks: TasksSection, fewest: int) -> None:
    """Check that tasks have as many classes as masked training needs.

    Raises:
        ConfigError: one has fewer, or could have.
    """
    small = [i for i, names in enumerate(tasks.classes) if len(names) < fewest]
    if tasks.schedule == "listed" and small:
        raise ConfigError(
            f"tasks.classes lists one class in task {small[0]}, and with privacy.secure = 'masks' "
            f"a method that trains needs {fewest} or more in each task.",
            action="Join tasks, or choose a method without training (docs/secure-aggregation.md).",
        )
    if tasks.schedule == "discovered" and tasks.min_new_classes < fewest:
        raise ConfigError(
            f"tasks.min_new_classes is {tasks.min_new_classes}, and with privacy.secure = 'masks' "
            f"a method that trains needs {fewest} or more in each task.",
            action=f"Set tasks.min_new_classes to {fewest} or more, or choose a method without "
            "training (docs/secure-aggregation.md).",
        )


def check_unlabelled(
    notify: Callable[[str, str, str], None], exchanges: Sequence[Exchange], *, evaluate: bool
) -> None:
    """Warn of what unlabelled images can do to the model, if the run uses any.

    Raises:
        ConfigError: nothing would ever allow their use.
    """
    least = [e.least_accuracy for e in exchanges if e.unlabelled]
    if not least:
        return
    if not evaluate:
        raise ConfigError(
            "method.pseudo uses unlabelled images after the clients' evaluation of a task, and "
            "run.evaluate is false.",
            action="Set method.pseudo to 'off', or run.evaluate (in an experiment evaluate) to "
            "true.",
        )
    notify(
        "warning",
        "unlabelled",
        "unlabelled images of clients are counted under the classes that the model gives them, "
        f"after tasks whose evaluation finds at least {max(least):.0%} of the test images right; "
        "images of a class that the federation does not know are counted under a wrong one",
    )
