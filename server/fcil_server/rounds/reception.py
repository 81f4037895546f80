"""Acceptance of updates for the round under way, and their record in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_adapters.contract import TaskInfo, registry
from fcil_protocol.envelopes.header import Core
from fcil_protocol.errors import (
    AlreadyHave,
    FcilError,
    NotYet,
    RoundClosed,
    SchemaMismatch,
    StaleUpdate,
    Surplus,
    WrongFederation,
)
from fcil_protocol.ids import ClientId, RoundKey, UpdateId
from fcil_protocol.payloads.builtin import EVALUATE, EVALUATE_SCHEMA, result_faults
from fcil_protocol.payloads.payload import Payload
from fcil_server.federation.eligibility import refusal
from fcil_server.ledger.enums import Outcome
from fcil_server.rounds.position import RunContext, RunProgress
from fcil_server.sessions.uploads import Accepted, Expectation

NO_SAMPLES = "it was made from no samples"


@dataclass
class Reception:
    """Answers intake's questions about the round under way.

    Attributes:
        updated: receives the client whose update is on disk and in the ledger.
        empty: receives the client whose update was made from no samples, and the reason.
    """

    kit: RunContext
    at: RunProgress
    updated: Callable[[ClientId], None]
    empty: Callable[[ClientId, str], None]

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return the update that the open round expects of this client.

        Raises:
            WrongFederation, RoundClosed, StaleUpdate, AlreadyHave, SchemaMismatch.
            NotYet: the round is open, but this server has not reached it yet.
        """
        kit, at = self.kit, self.at
        if core.run != kit.run:
            raise WrongFederation(f"the update is of run {core.run}, this is {kit.run}.")
        key = RoundKey(kit.run, core.task, core.kind, core.round)
        if not at.is_open or at.round is None or at.task is None or key != at.key(kit.run):
            raise self._closed(key, client)
        if client not in at.round.answers:
            raise RoundClosed("this client was not asked for an update in this round.")
        self._must_be_member(client)
        if kit.ledger.updates.get(key, client) is not None:
            raise AlreadyHave("an update of this client for this round is already stored.")
        self._must_have_room(key)
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

    def _closed(self, key: RoundKey, client: ClientId) -> FcilError:
        """Return the error for a round that no longer takes this client's update."""
        name = f"task {key.task} {key.kind} round {key.round}"
        row = self.kit.ledger.rounds.get(key)
        if row is not None and row.closed_at is None and self.at.round is None:
            # A restarted server that has not reached the round: the client keeps the update and
            # offers it again.
            return NotYet(f"{name} resumes shortly; the server has just started.")
        if row is None or row.outcome in (None, Outcome.REOPENED):
            return RoundClosed(f"{name} is not open.")
        answers = {a.client: a.answer.value for a in self.kit.ledger.answers.of_round(key)}
        if answers.get(client) == "surplus":
            return Surplus(f"{name} had as many updates as it takes before this one came.")
        return RoundClosed(f"{name} went on without this update and is closed ({row.why}).")

    def _must_have_room(self, key: RoundKey) -> None:
        assert self.at.round is not None
        take = self.at.round.rules.take
        if take and len(self.kit.ledger.updates.accepted(key)) >= take:
            raise Surplus(
                f"task {key.task} {key.kind} round {key.round} takes {take} updates and has them."
            )

    def _must_be_member(self, client: ClientId) -> None:
        row, now = self.kit.ledger.clients.get(client), self.kit.ledger.now
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
        """Return True if the ledger has exactly this update."""
        key = RoundKey(self.kit.run, core.task, core.kind, core.round)
        row = self.kit.ledger.updates.get(key, client)
        return row is not None and row.update_id == digest

    def stored(self, accepted: Accepted) -> None:
        """Commit an update to the ledger; the Ack follows when the ledger is synced.

        Raises:
            AlreadyHave: another update of this client for this round came first.
            TrustError: the client is no longer a member.
            Surplus: the round has as many as it takes; the first ones on disk count.
        """
        core, ledger = accepted.core, self.kit.ledger
        self._must_be_member(accepted.client)  # it may have been revoked while this was stored
        key = RoundKey(self.kit.run, core.task, core.kind, core.round)
        nothing = accepted.samples == 0 and core.kind != EVALUATE
        if not nothing:
            self._must_have_room(key)
        with ledger.transaction(waits=False):
            ledger.updates.accept(
                key,
                accepted.client,
                update_id=UpdateId(accepted.digest),
                samples=accepted.samples,
                tensor_bytes=accepted.tensor_bytes,
                sealed_bytes=accepted.sealed_bytes,
            )
            if nothing:
                ledger.updates.exclude(key, accepted.client, NO_SAMPLES)
        if nothing:
            self.empty(accepted.client, NO_SAMPLES)
        else:
            self.updated(accepted.client)


def _check_results(payload: Payload, task: TaskInfo) -> list[str]:
    return result_faults(payload, task.seen)
