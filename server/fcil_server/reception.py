"""What intake may accept for the round under way, and how an accepted update is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_adapters import registry
from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import (
    AlreadyHave,
    RoundClosed,
    SchemaMismatch,
    StaleUpdate,
    WrongFederation,
)
from fcil_protocol.header import Core
from fcil_protocol.ids import ClientId, UpdateId
from fcil_protocol.payload import Payload
from fcil_protocol.wellknown import EVALUATE, EVALUATE_SCHEMA, result_faults
from fcil_server.intake import Accepted, Expectation
from fcil_server.ledger_rows import RoundKey
from fcil_server.position import Kit, Position
from fcil_server.roster import refusal


@dataclass
class Reception:
    """Answers intake's questions about the round under way.

    Attributes:
        updated: told which client's update is on disk and in the ledger.
    """

    kit: Kit
    at: Position
    updated: Callable[[ClientId], None]

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return what the open round lets this client send.

        Raises:
            WrongFederation, RoundClosed, StaleUpdate, AlreadyHave, SchemaMismatch.
        """
        kit, at = self.kit, self.at
        if core.run != kit.run:
            raise WrongFederation(f"the update is of run {core.run}, this is {kit.run}.")
        key = RoundKey(kit.run, core.task, core.kind, core.round)
        if not at.is_open or at.round is None or at.task is None or key != at.key(kit.run):
            raise RoundClosed(f"task {core.task} {core.kind} round {core.round} is not open.")
        if client not in at.round.answers:
            raise RoundClosed("this client was not asked for an update in this round.")
        self._must_be_member(client)
        if kit.ledger.update_of(key, client) is not None:
            raise AlreadyHave("an update of this client for this round is already stored.")
        if core.base != at.base:
            raise StaleUpdate(
                f"the update starts from state {core.base}, the round from state {at.base}."
            )
        if (core.method, core.schema) != (kit.method.name, kit.schema_digest):
            raise SchemaMismatch(
                f"the update is of method {core.method} with schema {core.schema[:12]}, expected "
                f"{kit.method.name} with {kit.schema_digest[:12]}."
            )
        return self._expectation(at.task, core)

    def _must_be_member(self, client: ClientId) -> None:
        row, now = self.kit.ledger.client(client), self.kit.ledger.now
        if row is None or not row.may_join(now):
            raise refusal(row, now)

    def _expectation(self, task: TaskInfo, core: Core) -> Expectation:
        kit = self.kit
        if core.kind == EVALUATE:
            dims = {"seen": len(task.seen)}
            return Expectation(task, EVALUATE_SCHEMA, dims, _check_results)
        exchange = registry.find_exchange(kit.method, kit.hparams, kit.info, core.kind)
        dims = kit.method.dims(kit.hparams, kit.info, task)
        return Expectation(task, exchange.upload, dims, exchange.check)

    def recorded(self, client: ClientId, core: Core, digest: str) -> bool:
        """Say whether the ledger has this very update."""
        key = RoundKey(self.kit.run, core.task, core.kind, core.round)
        row = self.kit.ledger.update_of(key, client)
        return row is not None and row.update_id == digest

    def stored(self, accepted: Accepted) -> None:
        """Commit a durable update to the ledger; the Ack follows.

        Raises:
            AlreadyHave: another one of this client for this round was first.
            TrustError: the client is a member no more.
        """
        core, ledger = accepted.core, self.kit.ledger
        self._must_be_member(accepted.client)  # it may have been revoked while this was stored
        key = RoundKey(self.kit.run, core.task, core.kind, core.round)
        with ledger.transaction():
            ledger.accept_update(
                key,
                accepted.client,
                update_id=UpdateId(accepted.digest),
                samples=accepted.samples,
                tensor_bytes=accepted.tensor_bytes,
                sealed_bytes=accepted.sealed_bytes,
            )
            if accepted.samples == 0 and core.kind != EVALUATE:
                ledger.exclude_update(key, accepted.client, "it was made from no samples")
        self.updated(accepted.client)


def _check_results(payload: Payload, task: TaskInfo) -> list[str]:
    return result_faults(payload, task.seen)
