"""Acceptance of updates for the round under way, and their record in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from fcil_adapters.contract import Exchange, State, TaskInfo
from fcil_adapters.masks.checks import upload_faults
from fcil_adapters.masks.record import MaskRecord
from fcil_adapters.numerics.relay_sums import (
    MOST_SUMMED,
    sum_faults,
    sum_schema,
)
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
from fcil_protocol.payloads.builtin import (
    EVALUATE,
    EVALUATE_SCHEMA,
    metric_faults,
    result_faults,
    training_metrics,
    with_training_metrics,
    without_training_metrics,
)
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.process.terminal import count_of
from fcil_server.federation.eligibility import refusal
from fcil_server.ledger.enums import Answer, Outcome
from fcil_server.rounds.events import Why
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

    context: RunContext
    progress: RunProgress
    updated: Callable[[ClientId], None]
    empty: Callable[[ClientId, str], None]
    _masks: tuple[State, MaskRecord | None] | None = None  # of the state that was read last
    _expected: dict[str, Expectation] = field(default_factory=dict)  # by kind, of the last task

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return the update that the open round expects of this client.

        Raises:
            WrongFederation, RoundClosed, Surplus, StaleUpdate, AlreadyHave, SchemaMismatch.
            NotYet: no round takes it now, and one will.
        """
        context, progress = self.context, self.progress
        self._must_be_of_run(core)
        key = self._round_at_offer(core, client)
        assert progress.round is not None
        assert progress.task is not None
        if client not in progress.round.answers:
            if progress.round.rules.asynchronous and client not in progress.round.connected:
                raise NotYet("this client has just connected, and is asked shortly.")
            raise RoundClosed("this client was not asked for an update in this round.")
        self._must_be_member(client)
        if context.ledger.updates.get(key, client) is not None:
            raise AlreadyHave("an update of this client for this round is already stored.")
        self._must_have_room(key)
        self._must_start_from_allowed_state(core, key)
        self._must_be_of_method(core)
        return self._expectation(progress.task, core)

    def expect_sum(self, core: Core) -> Expectation:
        """Return what a relay's sum of updates for the open round must be.

        Raises:
            WrongFederation, RoundClosed, StaleUpdate, SchemaMismatch.
        """
        context, progress = self.context, self.progress
        self._must_be_of_run(core)
        key = RoundKey(context.run, core.task, core.kind, core.round)
        if progress.task is None or not progress.is_open or key != progress.key(context.run):
            raise RoundClosed(f"task {key.task} {key.kind} round {key.round} is not open.")
        self._must_start_from_allowed_state(core, key)
        self._must_be_of_method(core)
        exchange = self._summable(core.kind)
        if exchange is None or exchange.additive is None:
            raise SchemaMismatch(f"updates of {core.kind} rounds of this run are not added up.")
        dims = context.method.dims(context.hparams, context.info, progress.task)
        dims = {**dims, "most_summed": MOST_SUMMED}
        check = partial(sum_faults, exchange)
        return Expectation(progress.task, sum_schema(exchange.additive), dims, check)

    def may_be_summed(self, kind: str) -> bool:
        """Return True if relays may add up the updates of a kind of round."""
        return self._summable(kind) is not None

    def _summable(self, kind: str) -> Exchange | None:
        exchange = self.context.exchange(kind)
        allowed = self.context.config.privacy.relay_sums
        return exchange if allowed and exchange is not None and exchange.summable else None

    def _must_be_of_run(self, core: Core) -> None:
        if core.run != self.context.run:
            raise WrongFederation(f"the update is of run {core.run}, this is {self.context.run}.")

    def _must_be_of_method(self, core: Core) -> None:
        context = self.context
        if (core.method, core.schema) != (context.method.name, context.schema_digest):
            raise SchemaMismatch(
                f"the update is of method {core.method} with schema {core.schema[:12]}, expected "
                f"{context.method.name} with {context.schema_digest[:12]}."
            )

    def _round_at_offer(self, core: Core, client: ClientId) -> RoundKey:
        """Return the open round that takes an offered update: its own or a later, asynchronous one.

        Raises:
            RoundClosed, Surplus, NotYet: there is none, or none yet.
        """
        context, progress = self.context, self.progress
        key = RoundKey(context.run, core.task, core.kind, core.round)
        current = progress.key(context.run)
        if progress.is_open and key == current:
            return key
        if not context.is_asynchronous(core.kind) or not self._comes_again(key, current):
            raise self._closed(key, client)
        if current is not None and progress.is_open:
            return current
        raise _in_the_next_round(key)

    def _comes_again(self, key: RoundKey, current: RoundKey | None) -> bool:
        """Return True if a later round of an update's task and kind is open, or will open."""
        ledger, step = self.context.ledger, self.progress.step
        if current is None or step is None:  # between tasks, or the server has just started
            tasks = ledger.tasks.all(self.context.run)
            return bool(tasks) and tasks[-1].task == key.task and tasks[-1].closed_at is None
        if key != current and not key.precedes(current):
            return False
        row = ledger.rounds.get(current)
        if row is None or row.closed_at is None:
            return True
        stopped = ledger.rounds.was_closed_by(self.context.run, key.task, Why.REST.value)
        return not step.is_last and not stopped

    def _must_start_from_allowed_state(self, core: Core, key: RoundKey) -> None:
        """Refuse an update that starts from a state that the open round does not take."""
        progress, oldest = self.progress, self.progress.oldest_base
        if core.base == progress.base:
            return
        if oldest < 0:
            raise StaleUpdate(
                f"the update starts from state {core.base}, the round from state {progress.base}."
            )
        if core.base < oldest:
            raise StaleUpdate(
                f"the update starts from state {core.base}, and the oldest that the round takes is "
                f"state {oldest} (round.max_staleness)."
            )
        began = self.context.ledger.rounds.get(key._replace(round=core.round))
        if began is None or began.base_state != core.base:
            raise StaleUpdate(
                f"the update says that it starts from state {core.base} and round {core.round}, "
                "and that round did not start from that state."
            )

    def _closed(self, key: RoundKey, client: ClientId) -> FcilError:
        """Return the error for a round that no longer takes this client's update."""
        name = f"task {key.task} {key.kind} round {key.round}"
        row = self.context.ledger.rounds.get(key)
        if row is not None and row.closed_at is None and self.progress.round is None:
            # A restarted server that has not reached the round: the client keeps the update and
            # offers it again.
            return NotYet(f"{name} resumes shortly; the server has just started.")
        if row is None or row.outcome in (None, Outcome.REOPENED):
            return RoundClosed(f"{name} is not open.")
        answer = self.context.ledger.answers.get(key, client)
        if answer is not None and answer.answer is Answer.SURPLUS:
            return Surplus(f"{name} closed with enough updates before this one came.")
        return RoundClosed(f"{name} continued without this update and is closed ({row.why}).")

    def _must_have_room(self, key: RoundKey) -> None:
        assert self.progress.round is not None
        take = self.progress.round.rules.take
        if take and self.context.ledger.updates.count_accepted(key) >= take:
            taken = count_of(take, "update")
            step = self.progress.step
            if step is not None and self.context.continues_after(step):
                raise NotYet(
                    f"the round has the {taken} that it takes; the next one opens shortly."
                )
            raise Surplus(
                f"task {key.task} {key.kind} round {key.round} takes {taken} and has them."
            )

    def _must_be_member(self, client: ClientId) -> None:
        clients = self.context.ledger.clients
        if not clients.may_join(client):
            raise refusal(clients.get(client), self.context.ledger.now)

    def _expectation(self, task: TaskInfo, core: Core) -> Expectation:
        """Return what an update of the open round must be; unmasked, it is the same for each."""
        expected = self._expected.get(core.kind)
        if expected is None or expected.task is not task:
            expected = self._expected[core.kind] = self._expectation_of(task, core.kind)
        exchange = self.context.exchange(core.kind)
        if exchange is not None and exchange.masking:
            return replace(expected, check=self._mask_check(core))
        return expected

    def _expectation_of(self, task: TaskInfo, kind: str) -> Expectation:
        context = self.context
        if kind == EVALUATE:
            return Expectation(task, EVALUATE_SCHEMA, {"seen": len(task.seen)}, _check_results)
        exchange = context.exchange(kind)
        assert exchange is not None, "the round is of one of the method's kinds"
        dims = context.method.dims(context.hparams, context.info, task)
        if not context.method.reports_training(exchange):
            return Expectation(task, exchange.upload, dims, exchange.check)

        def check(payload: Payload, task: TaskInfo) -> list[str]:
            faults = metric_faults(training_metrics(payload))
            return faults or exchange.check(without_training_metrics(payload), task)

        return Expectation(task, with_training_metrics(exchange.upload), dims, check)

    def _mask_check(self, core: Core) -> Callable[[Payload, TaskInfo], list[str]]:
        """Return the check of an upload of a masked round, by the state that it starts from."""
        context, client = self.context, ClientId(core.sender)
        key = RoundKey(context.run, core.task, core.kind, core.round)
        row, record = context.ledger.clients.get(client), self._mask_record()
        signing, about = b"" if row is None else row.signing, self.progress.about

        def check(payload: Payload, _task: TaskInfo) -> list[str]:
            return upload_faults(record, key, client, signing, payload, about)

        return check

    def _mask_record(self) -> MaskRecord | None:
        """Return the record in the round's state; with a thousand members it is read once."""
        state = self.progress.state
        if self._masks is None or self._masks[0] is not state:
            self._masks = (state, MaskRecord.read(state))
        return self._masks[1]

    def recorded(self, digest: str) -> bool:
        """Return True if the ledger has exactly this update or sum, whichever round counts it."""
        return self.context.ledger.updates.holds(self.context.run, digest)

    def stored(self, accepted: Accepted) -> None:
        """Record an update, or all updates of a sum, in the ledger; the Ack follows its sync.

        Raises:
            AlreadyHave: another update of this client for this round came first.
            TrustError: the client is no longer a member.
            Surplus: the round has as many as it takes; the first ones on disk count.
            NotYet: the asynchronous round that expected it has closed, and the next is not open.
            StaleUpdate: too many such rounds have closed.
        """
        with self.context.ledger.transaction(waits=False):
            for update in accepted.summed:
                self._store(update, UpdateId(accepted.digest))
            if not accepted.summed:
                self._store(accepted, None)

    def _store(self, accepted: Accepted, sum_id: UpdateId | None) -> None:
        core, ledger = accepted.core, self.context.ledger
        self._must_be_member(accepted.client)  # it may have been revoked while this was stored
        key = self._round_at_commit(core)
        nothing = _is_of_nothing(accepted)
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
                base_state=None if core.base == self.progress.base else core.base,
                sum_id=sum_id,
                **accepted.metrics,
            )
            if nothing:
                ledger.updates.exclude(key, accepted.client, NO_SAMPLES)

    def committed(self, accepted: Accepted) -> None:
        """Tell the round of an update, or of those in a sum, committed to the ledger."""
        for update in accepted.summed:
            self.updated(update.client)
        if accepted.summed:
            return
        if _is_of_nothing(accepted):
            self.empty(accepted.client, NO_SAMPLES)
        else:
            self.updated(accepted.client)

    def _round_at_commit(self, core: Core) -> RoundKey:
        """Return the round in which an update that was expected is recorded, on disk by now.

        Raises:
            NotYet: the asynchronous round that expected it has closed, and the next is not open.
            StaleUpdate: too many such rounds have closed meanwhile.
        """
        key = RoundKey(self.context.run, core.task, core.kind, core.round)
        current = self.progress.key(self.context.run)
        if current is None or current == key or not self.context.is_asynchronous(core.kind):
            return key
        under_way = self.context.ledger.rounds.current(self.context.run)
        if under_way is None or under_way.key != current or not key.precedes(current):
            raise _in_the_next_round(key)
        self._must_start_from_allowed_state(core, current)
        return current


def _is_of_nothing(accepted: Accepted) -> bool:
    return accepted.samples == 0 and accepted.core.kind != EVALUATE


def _in_the_next_round(key: RoundKey) -> NotYet:
    return NotYet(f"task {key.task} {key.kind} takes updates again in its next round.")


def _check_results(payload: Payload, task: TaskInfo) -> list[str]:
    return result_faults(payload, task.seen)
