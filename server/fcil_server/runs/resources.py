"""Construction of a run's context: the stores in its directory, and other parts it needs."""

from __future__ import annotations

from dataclasses import dataclass

from fcil_adapters.contract import BackboneInfo, Hparams, Method
from fcil_protocol.ids import RunId
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation import trials
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.kept_updates import KeptUpdates, kept_folder
from fcil_server.aggregation.object_store import ObjectStore
from fcil_server.aggregation.publisher import Publisher
from fcil_server.aggregation.start import RunStart
from fcil_server.aggregation.store import PartStore, StateStore
from fcil_server.federation.config import Config
from fcil_server.federation.directory import Federation
from fcil_server.ledger.rows import RunRow
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.position import RunContext
from fcil_server.sessions.run_ports import RunPorts


@dataclass(frozen=True)
class RunSetup:
    """Everything a run computes with, before its stores are open."""

    config: Config
    method: Method
    hparams: Hparams
    info: BackboneInfo
    schema_digest: str
    aggregation: Aggregation

    @property
    def keeps_updates(self) -> bool:
        """True if counted updates stay: configured, and useful with the method."""
        return self.config.run.keep_updates and not self.method.forgets(self.hparams)


def make_context(
    federation: Federation, row: RunRow, setup: RunSetup, ports: RunPorts
) -> RunContext:
    """Open a run's stores, and make the objects around them.

    Raises:
        StorageError: the directory cannot be used.
    """
    run, ledger, config = row.run_id, federation.ledger, setup.config
    directory = federation.run_directory(run)
    with storage_errors("create the run directory", directory):
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("states", "parts", "spool", "incoming"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
    spool = Spool(directory / "spool")
    for text in spool.recovered:
        ports.notify("warning", "spool_recovered", text)
    if erased := ledger.updates.of_erased(run):  # perhaps a kill or a full disk left them
        spool.purge(map(str, erased))
    kept = _kept(federation, run) if setup.keeps_updates else None
    setup.aggregation.use(
        setup.info,
        federation.keys,
        spool,
        kept,
        trials=directory / trials.NAME,
        start=RunStart.of(directory, row.environment),
    )
    return RunContext(
        run=run,
        config=config,
        method=setup.method,
        hparams=setup.hparams,
        info=setup.info,
        schema_digest=setup.schema_digest,
        ledger=ledger,
        classes=ClassRegistry(
            ledger,
            run,
            quota=config.trust.max_classes_per_client,
            confirm=config.tasks.admit == "confirm",
        ),
        states=StateStore(directory / "states", keep=kept_states(config)),
        spool=spool,
        publisher=_publisher(federation, row, config, ports),
        aggregation=setup.aggregation,
        peers=ports.peers,
        send=ports.send,
        notify=ports.notify,
        lag=ports.lag,
        kept=kept,
        forgotten=ledger.updates.forgotten(run),
        attended=ports.attended,
    )


def kept_states(config: Config) -> int:
    """Return the number of newest states to keep: also those that updates may start from."""
    section = config.round
    # The newest, the one before, from which a damaged newest is computed again, and the older ones.
    needed = section.max_staleness + 2 if section.mode == "async" else 1
    return max(config.storage.keep_states, needed)


def _kept(federation: Federation, run: RunId) -> KeptUpdates:
    """Return the kept updates of a run, without those of a round that a kill ended."""
    kept = KeptUpdates(kept_folder(federation.directory, run))
    kept.remove(set(kept.names()) - federation.ledger.updates.counted_ids(run))
    return kept


def _publisher(federation: Federation, row: RunRow, config: Config, ports: RunPorts) -> Publisher:
    objects = None
    if config.parts.store and ports.serves:
        objects = ObjectStore(config.parts, federation.id, ports.notify)
    return Publisher(
        federation=federation.id,
        run=row.run_id,
        keys=federation.keys,
        ledger=federation.ledger,
        store=PartStore(federation.run_directory(row.run_id) / "parts"),
        max_plain_bytes=int(config.wire.max_payload_mb * 1e6),
        compact=config.wire.compact,
        send=ports.send,
        objects=objects,
    )
