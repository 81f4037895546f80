"""Open the federation's current run, or begin one: worker, method, backbone, stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters import registry
from fcil_adapters.contract import BackboneInfo, Hparams, Method
from fcil_adapters.describe import backbone_fields
from fcil_adapters.forms import forms_of
from fcil_adapters.privacy_terms import check_privacy
from fcil_adapters.vit_sizes import backbone_by_name
from fcil_protocol.errors import (
    BackboneMismatch,
    FcilError,
    RunFailed,
    StorageError,
)
from fcil_protocol.ids import ClientId, RoundKey, new_run_id
from fcil_protocol.payload import Payload
from fcil_protocol.schema import class_key
from fcil_server import config as configuration
from fcil_server import rundir
from fcil_server.aggregation import Aggregation, threads_of
from fcil_server.broadcast import Publisher
from fcil_server.budget import applied, fitted, over_budget
from fcil_server.classes import ClassRegistry, refused_names
from fcil_server.conduct import ANNOUNCED
from fcil_server.config import Config
from fcil_server.config_sections import SinksSection
from fcil_server.coordinator import Coordinator
from fcil_server.forget import finish_emptying
from fcil_server.greeting import House
from fcil_server.ignored import tell_ignored
from fcil_server.intake import Intake
from fcil_server.kept_config import config_of
from fcil_server.kits import Desk, Terms, make_kit
from fcil_server.ledger import Ledger
from fcil_server.ledger_rows import ByteCount, Run
from fcil_server.ledger_words import RunStatus
from fcil_server.peers import Peer
from fcil_server.recovery import ensure_state
from fcil_server.rundata import format_bytes
from fcil_server.sinks import doors
from fcil_server.sinks.doors import Chosen
from fcil_server.sinks.process import Sinks
from fcil_server.uploads import Accepted

if TYPE_CHECKING:
    from fcil_server.daemon import Server


@dataclass
class OpenRun:
    """A run with everything that serves it."""

    server: Server
    directory: Path
    coordinator: Coordinator
    publisher: Publisher
    aggregation: Aggregation
    house: House
    sinks: Sinks

    async def drive(self) -> None:
        """Carry the run to its end; then leave its results."""
        self.sinks.start()
        ledger, run = self.server.ledger, self.coordinator.kit.run
        row = ledger.run(run)
        if row is None or row.status is not RunStatus.DONE:
            await self._learn()
        self.coordinator.at.phase = "done"
        if not rundir.is_complete(self.directory):  # nor after a kill at the very end
            await self.write_results()
        spool = self.coordinator.kit.spool
        spool.remove(spool.keys())  # the last state has a second copy by now
        self.server.note("info", "run_done", f"run {run} is complete: {self.directory}")
        self.server.done()

    async def _learn(self) -> None:
        ledger, run = self.server.ledger, self.coordinator.kit.run
        ledger.set_run_status(run, RunStatus.RUNNING)
        try:
            await self.coordinator.drive()
        except StorageError:
            raise  # the disk failed, not the run: it goes on when the server is started again
        except FcilError:
            with contextlib.suppress(StorageError):  # what failed first is what is told
                ledger.set_run_status(run, RunStatus.FAILED)
            raise
        ledger.set_run_status(run, RunStatus.DONE)

    async def write_results(self) -> None:
        """Write the run directory anew, off the loop."""
        path, kit = self.server.ledger.path, self.coordinator.kit

        def write() -> None:
            with Ledger(path, read_only=True) as ledger:
                drawn = kit.config.run.plots
                rundir.write(ledger, kit.run, self.directory, states=kit.states, plots=drawn)

        await self.server.books.settled()
        self.server.accounts.flush()
        await asyncio.to_thread(write)
        self.sinks.wake()

    async def write_round(self, key: RoundKey) -> None:
        """Add a closed round to ``rounds.jsonl``; what fails now is made good with the next."""
        path = self.server.ledger.path

        def write() -> None:
            with Ledger(path, read_only=True) as ledger:
                rundir.append_round(ledger, key, self.directory)

        try:
            await asyncio.to_thread(write)
            self.sinks.wake()
            await self._look_at_budget(key)
        except StorageError as error:
            self.server.note("warning", error.code, str(error))

    async def _look_at_budget(self, key: RoundKey) -> None:
        """Say so if a round cost a client more than the run's budget."""
        limit = round(self.coordinator.kit.config.wire.budget_mb * 1e6)
        if not limit:
            return
        path = self.server.ledger.path

        def read() -> list[ByteCount]:
            with Ledger(path, read_only=True) as ledger:
                return ledger.byte_counts_of(key)

        over = over_budget(await asyncio.to_thread(read), limit)
        if over is not None:
            row = self.server.ledger.client(ClientId(over[0]))
            self.server.note(
                "warning",
                "over_budget",
                f"{key.kind} round {key.round} of task {key.task} cost "
                f"{row.name if row else over[0]} {format_bytes(over[1])}; the budget is "
                f"{format_bytes(limit)}",
                ClientId(over[0]),
            )

    def make_intake(self) -> Intake:
        """Make what takes in this run's uploads."""
        server, reception = self.server, self.coordinator.reception
        wire = server.config.wire
        return Intake(
            federation=server.federation.id,
            keys=server.federation.keys,
            incoming=self.directory / "incoming",
            spool=self.coordinator.kit.spool,
            credit=wire.credit,
            max_payload_bytes=int(wire.max_payload_mb * 1e6),
            max_classes=server.config.trust.max_classes_per_client,
            expect=reception.expect,
            recorded=reception.recorded,
            stored=self._stored,
            lasting=server.ledger.sync,
            announced=self._announced,
            opened=server.live.opened,
            send=server.sessions.send,
            refused=server.sessions.count_refusal,
            failed=server.fail,
        )

    def _stored(self, accepted: Accepted) -> None:
        """Count an update that is in the spool for good."""
        server = self.server
        self.coordinator.reception.stored(accepted)
        server.accounts.tensors_up(accepted.client, accepted.tensor_bytes)
        row = server.ledger.client(accepted.client)
        size = accepted.sealed_bytes / 1e3
        name = row.name if row else accepted.client
        server.note("info", "update", f"update from {name}, {size:.1f} kB", accepted.client)

    def _announced(self, peer: Peer, payload: Payload) -> None:
        """Take a client's inventory: which classes it holds, and how many images."""
        if self.server.peers.by_conn(peer.conn) is not peer:
            return  # it left while its list was opened, and will announce it again
        self.server.cut_offs.needless(peer.client, ANNOUNCED)
        names = [str(n) for n in payload.meta["names"]]  # type: ignore[union-attr]
        told = self.coordinator.kit.classes.announce(peer.client, names)
        for text in refused_names(told.refused):
            self.server.note("warning", "class_refused", f"{peer.name}: {text}", peer.client)
        keys = [class_key(n) for n in names]
        # Two folders of a client may be one class in other letters: their images add up.
        train, test = Counter[str](), Counter[str]()
        for key, n, m in zip(keys, payload.i64("train"), payload.i64("test"), strict=True):
            train[key] += int(n)
            test[key] += int(m)
        peer.train, peer.test = dict(train), dict(test)
        peer.names, peer.resting = tuple(names), False
        held = [n for n in peer.train.values() if n]  # of other classes it has tests alone
        self.server.note(
            "info",
            "announced",
            f"{peer.name} holds {sum(held)} training images of {len(held)} classes",
            peer.client,
        )
        self.coordinator.arrived(peer)
        if self.coordinator.at.phase == "done":
            self.server.sessions.tell_done(peer)

    async def close(self) -> None:
        """Stop the worker and close the stores."""
        try:
            await self.coordinator.closing.tidied()
            await self.sinks.end()
        finally:
            await self.aggregation.close()
            self.coordinator.kit.spool.close()


async def open_run(server: Server, *, new: bool) -> OpenRun:
    """Open the newest run of the federation, or begin one.

    Raises:
        ConfigError, BackboneMismatch, RunFailed: with the next action.
        EgressRefused: the method would have clients send what may not leave them.
    """
    ledger = server.ledger
    finish_emptying(ledger, server.federation.directory)
    row = None if new else ledger.newest_run()
    if row is not None and row.status is RunStatus.STOPPED:
        row = None
    chosen = [doors.choose(name, given) for name, given in server.config.sinks.options.items()]
    config = config_of(row, server)
    method = registry.load_method(config.method.name)
    choice = None
    if row is None and config.wire.budget_mb:
        choice = fitted(method, config, backbone_by_name(config.run.backbone))
        config = applied(config, choice.options)
        server.note("info", "budget", choice.text())
    method = registry.in_forms(method, forms_of(config.wire.half, method.name, method.half))
    hparams = registry.make_hparams(method, config.method.options)
    registry.check_averaging(method, hparams, config.trust.averaging)
    aggregation = Aggregation(
        method, hparams, config, log=server.federation.directory / "worker.log"
    )
    aggregation.tell = lambda text: server.note("warning", "worker", text)
    try:
        info, probe = await aggregation.load_backbone()
        registry.check_uploads(method, hparams, info)
        check_privacy(method, hparams, info, config.privacy.terms)
        digest = registry.schema_digest(method, hparams, info, config.privacy.terms)
        tell_ignored(server.note, method, hparams, config)
        if row is None:
            facts = rundir.describe_environment(aggregation.described, threads=threads_of(config))
            if choice is not None:
                facts["budget"] = choice.fields()
            row = _begin(server, config, method, hparams, info, digest, facts)
        else:
            check_resumed(row, method, info, digest)
        terms = Terms(config, method, hparams, info, digest, aggregation)
        opened = _assemble(server, row, terms, probe, chosen)
        fork = await ensure_state(opened.coordinator.kit, server.federation.directory)
        if fork is None:
            return opened
        opened.coordinator.kit.spool.close()
        return _assemble(server, fork, terms, probe, chosen)
    except BaseException:
        await aggregation.close()
        raise


def _begin(
    server: Server,
    config: Config,
    method: Method,
    hparams: Hparams,
    info: BackboneInfo,
    digest: str,
    facts: dict[str, Any],
) -> Run:
    run = new_run_id()
    with server.ledger.transaction():  # a run without its listed classes would wait for others
        row = server.ledger.new_run(
            run,
            method=method.name,
            method_version=method.version,
            # Sinks are the server's, not the run's; and an address may hold a password.
            config=configuration.to_toml(config.model_copy(update={"sinks": SinksSection()})),
            hparams=hparams.model_dump(mode="json"),
            backbone=backbone_fields(info),
            schema_digest=digest,
            seed=config.run.seed,
            environment=facts,
        )
        if config.tasks.schedule == "listed":
            ClassRegistry(server.ledger, run).register_listed(config.tasks.classes)
        server.ledger.add_audit(f"uid {os.getuid()}", "run_begun", run)
    server.note("info", "run_begun", f"run {run} begins with method {method.name}")
    return row


def check_resumed(row: Run, method: Method, info: BackboneInfo, digest: str) -> None:
    """Refuse to go on with a run that was begun with something else.

    Raises:
        BackboneMismatch, RunFailed: with both, and what to do.
    """
    if row.backbone.get("digest") != info.digest:
        raise BackboneMismatch(
            f"run {row.run_id} was started with backbone weights "
            f"{str(row.backbone.get('digest'))[:12]}, now they are {info.digest[:12]}.",
            action="Give the same weights file, or start a new run: fcil-server serve --new-run",
        )
    if row.method_version != method.version or row.schema_digest != digest:
        raise RunFailed(
            f"run {row.run_id} was started with {row.method} {row.method_version} (schema "
            f"{row.schema_digest[:12]}), installed is {method.version} (schema {digest[:12]}).",
            action="Install that version, or start a new run: fcil-server serve --new-run",
        )


def _assemble(
    server: Server,
    row: Run,
    terms: Terms,
    probe: NDArray[np.float32] | None,
    chosen: list[Chosen],
) -> OpenRun:
    sinks = Sinks(server.federation.directory, row.run_id, chosen, server.note)
    send, lag = server.sessions.send, server.lag.take
    desk = Desk(
        notify=server.note, peers=server.peers, send=send, lag=lag, attended=not server.until_done
    )
    kit = make_kit(server.federation, row, terms, desk)
    coordinator = Coordinator(
        kit=kit,
        drain=server.drain,
        round_opens=server.round_opens,
        round_closed=server.round_closed,
        drained=server.drained,
        task_closed=sinks.wake,
    )
    house = House(
        federation=server.federation.id,
        certificate=server.federation.certificate.to_bytes(),
        run=row.run_id,
        method=kit.method,
        hparams=kit.hparams,
        info=kit.info,
        probe=probe,
        schema_digest=kit.schema_digest,
        max_payload_bytes=int(kit.config.wire.max_payload_mb * 1e6),
        credit=kit.config.wire.credit,
        privacy=kit.config.privacy.terms,
        package=version("fcil"),
        method_package=registry.package_of(kit.method.name),
    )
    directory = server.federation.run_directory(row.run_id)
    return OpenRun(server, directory, coordinator, kit.publisher, kit.aggregation, house, sinks)
