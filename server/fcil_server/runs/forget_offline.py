"""Forgetting of a client while the server is stopped: open the run, compute, commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_adapters.contract.half_precision import forms_of
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.federation.allow_list import AllowList
from fcil_server.federation.directory import Federation
from fcil_server.federation.roster import Roster, ever_named
from fcil_server.ledger.rows import RunRow
from fcil_server.runs.forget import (
    Forgetting,
    Forgotten,
    finish_emptying,
    plan,
    training_kinds,
    why_not_exact,
)
from fcil_server.runs.frozen_config import as_begun
from fcil_server.runs.resources import RunSetup, make_context
from fcil_server.runs.run_queue import config_for
from fcil_server.runs.run_record import check_resumed
from fcil_server.sessions.peers import Peers
from fcil_server.sessions.run_ports import RunPorts

REVOKED_WITH_IT = "the operator forgot it"

Notify = Callable[[str, str, str], None]


async def forget(
    federation: Federation, name: str, run: str | None, *, actor: str, notify: Notify, revoke: bool
) -> Forgotten:
    """Recompute a run as if a client had never taken part.

    Args:
        federation: open, and so not served.
        name: the client's, or the beginning of its id; also a former member's.
        run: the run's id or its beginning; None: the newest.
        actor: the caller, for the audit log.
        notify: writes a note for the operator: (level, code, text).
        revoke: also end its membership.

    Raises:
        UsageError: there is nothing to forget, or not exactly; the message names alternatives.
        BackboneMismatch, RunFailed: the installed packages cannot compute the run.
        CorruptFile, DiskFull, StorageError: run and membership are unchanged.
    """
    ledger, directory = federation.ledger, federation.directory
    finish_emptying(ledger, directory)  # of an earlier one that a kill interrupted
    row, roster = ledger.runs.named(run), Roster(federation, AllowList())
    client = ever_named(ledger, name)
    setup = _setup(federation, row, notify)
    why_not, trains = why_not_exact(setup), training_kinds(setup)
    prepared = plan(ledger, directory, row, client, why_not, trains)
    try:
        info, _ = await setup.aggregation.load_backbone()
        privacy = setup.config.privacy.terms
        digest = registry.schema_digest(setup.method, setup.hparams, info, privacy)
        check_resumed(row, setup.method, info, digest)
        context = make_context(federation, row, setup, RunPorts(notify=notify, peers=Peers()))
        try:
            work = Forgetting(context, prepared, directory)
            fork, states = await work.run()
        finally:
            context.spool.close()
    finally:
        await setup.aggregation.close()
    end = partial(roster.revoke, client, REVOKED_WITH_IT, actor) if revoke else None
    return work.commit(fork, states, actor, revoke=end)


def _setup(federation: Federation, row: RunRow, notify: Notify) -> RunSetup:
    config = as_begun(row, config_for(row, None, federation.config, federation.overrides))
    method = registry.load_method(config.method.name)
    method = registry.with_forms(method, forms_of(config.wire.half, method.name, method.half))
    hparams = registry.make_hparams(method, config.method.options)
    log = federation.directory / "worker.log"
    aggregation = Aggregation(
        method, hparams, config, log=log, notify=lambda text: notify("warning", "worker", text)
    )
    info = backbone_from_fields(dict(row.backbone))
    return RunSetup(config, method, hparams, info, row.schema_digest, aggregation)
