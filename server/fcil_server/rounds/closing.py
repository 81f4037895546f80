"""End of a round: aggregate, commit, evaluate, notify."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from fcil_adapters.contract import Part, State, TaskInfo
from fcil_adapters.masks.exchanges import UNMASK
from fcil_protocol.errors import DataError, FcilError, RunFailed, StorageError
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId
from fcil_protocol.messages.messages import RoundClosed, Verdict
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.aggregation.combining import Combined
from fcil_server.aggregation.staleness import NO_OLDER_STATES, OlderStates, load_older
from fcil_server.event_loop import Yielder
from fcil_server.federation.roster import WITHDRAWN
from fcil_server.ledger.enums import (
    CENTRAL,
    SILENT,
    SPLIT_SUM,
    Answer,
    Outcome,
    UpdateStatus,
)
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import UpdateRow
from fcil_server.rounds import events as machine
from fcil_server.rounds import notes
from fcil_server.rounds.position import RunContext, RunProgress, method_context
from fcil_server.rounds.schedule import Step

NOT_TESTED: Mapping[str, int] = MappingProxyType({})
MAX_VOID = 3  # void rounds in a row that pause the run, as does each further one


def needed_updates(ledger: Ledger, run: RunId) -> set[str]:
    """Return the updates that the spool must keep: the open round's and the newest state's."""
    row = ledger.rounds.current(run)
    made = ledger.states.newest_combined(run)
    updates = ledger.updates.accepted(row.key) if row else []
    updates += ledger.updates.of_round(made.key) if made else []
    return {str(u.record) for u in updates if u.reason not in (WITHDRAWN, SPLIT_SUM)}


async def save(
    context: RunContext, progress: RunProgress, state: State, task: TaskInfo
) -> tuple[int, Digest]:
    """Save the next state on disk; the ledger makes it the run's."""
    number = progress.number + 1
    # A server that has lost its ledger must not take this number from the next one.
    context.ledger.database.check_still_in_place()
    digest = await asyncio.to_thread(
        context.states.save, number, state, progress.digest, task.index
    )
    return number, digest


@dataclass
class Closing:
    """Closes rounds of one run and remembers the verdicts on updates.

    Attributes:
        progress: progress of the run, read only.
        adopt: called with a committed state, as `RunProgress.adopt` is.
        also_kept: further states whose files stay.
    """

    context: RunContext
    progress: RunProgress
    adopt: Callable[[State, int, Digest, tuple[Part, ...]], None]
    also_kept: set[int] = field(default_factory=set)
    _verdicts: dict[ClientId, Verdict | None] = field(default_factory=dict)  # of synced rounds
    _judged: dict[ClientId, Verdict] = field(default_factory=dict)  # of the round that is closing
    _noted_conflicts: set[int] = field(default_factory=set)  # classes that a note has named
    _tidying: asyncio.Task[None] | None = None
    _cause: str = ""  # of the last void round
    _best: tuple[int, ...] | None = None  # number of the best state, if any; None: look it up

    async def close(
        self, task: TaskInfo, step: Step, close: machine.Close, collect_s: float
    ) -> None:
        """Close a round in the ledger and notify the asked clients."""
        key = RoundKey(self.context.run, task.index, step.kind, step.round)
        if step.kind == EVALUATE:
            self._best = None
            rows = self.context.ledger.updates.accepted(key)
            results = await asyncio.to_thread(self._open_evaluations, rows)
            evaluations = self.context.ledger.evaluations
            with self.context.ledger.transaction(waits=False):
                # Without clients revoked meanwhile. Who evaluated before and not now keeps its row.
                for row in self.context.ledger.updates.accepted(key):
                    evaluations.add(key.run, key.task, row.client, results[row.client])
                outcome = self._commit(key, close, {"collect_s": collect_s})
        elif self._is_in_vain(close):
            outcome = self._too_few(key, close, {}, {"collect_s": collect_s})
        else:
            outcome = await self._aggregate(task, step, key, close, collect_s)
        await asyncio.to_thread(self.context.ledger.sync)
        self._verdicts |= self._judged
        await self._tell(key, step, close, outcome)
        if outcome is Outcome.DONE:
            self._tell_pace(task, step, key)
        await asyncio.to_thread(self.context.aggregation.settled)
        await self.wait_until_tidied()
        # The updates of the newest state stay: if its file is damaged, it is computed again. Chosen
        # now, while no round takes updates; the others are removed during the next round.
        self.context.spool.end_round()
        needed = needed_updates(self.context.ledger, self.context.run)
        victims = sorted(set(self.context.spool.keys()) - needed)
        if self._best is None:
            best = self.context.ledger.evaluations.best(self.context.run)
            self._best = () if best is None else (best.state,)
        run = self.context.ledger.runs.get(self.context.run)
        promoted = () if run is None or run.promoted is None else (run.promoted,)
        self._tidying = asyncio.create_task(
            self._tidy(victims, (*self._best, *promoted, *self.also_kept))
        )

    def _tell_pace(self, task: TaskInfo, step: Step, key: RoundKey) -> None:
        """Say after the first round of a kind how long the others take."""
        row = self.context.ledger.rounds.get(key)
        if row is not None and row.closed_at is not None:
            text = notes.describe_pace(task.index, step, row.closed_at - row.opened_at)
            if text:
                self.context.notify("info", "pace", text)

    async def _tidy(self, victims: Sequence[str], kept: Sequence[int]) -> None:
        """Remove updates and states that are no longer needed; ``kept`` are further states."""
        try:
            await asyncio.to_thread(self.context.spool.remove, victims)
            await asyncio.to_thread(self.context.states.prune, kept)
        except StorageError as error:  # the next round tries again
            self.context.notify("warning", error.code, str(error))

    async def wait_until_tidied(self) -> None:
        """Wait until the leftovers of closed rounds are removed."""
        if self._tidying is not None:
            await asyncio.shield(self._tidying)

    async def _aggregate(
        self, task: TaskInfo, step: Step, key: RoundKey, close: machine.Close, collect_s: float
    ) -> Outcome:
        context, progress, loop = self.context, self.progress, asyncio.get_running_loop()
        began, least = loop.time(), self._least()
        older = await self._load_older(key)
        while len(updates := self._usable(key)) >= least:
            ctx = method_context(context, task, step)
            combined = await context.aggregation.aggregate(ctx, progress.state, updates, older)
            state, excluded = combined.state, combined.excluded
            aggregated = loop.time()
            phases = {"collect_s": collect_s, "aggregate_s": aggregated - began}
            if state is None:
                return self._void(key, close, combined, phases)
            counted = [u for u in updates if u.client not in excluded]
            if len(counted) < least or not self._suffice(counted):
                return self._too_few(key, close, excluded, phases)
            await asyncio.to_thread(context.aggregation.keep, counted)
            number, digest = await save(context, progress, state, task)
            saved = loop.time()
            tested = await self._test_round(task, step, state, combined.parts)
            if self._usable(key) == updates:
                break
            # A client was revoked meanwhile: the state must not contain its update.
            context.states.discard_after(progress.number)
            context.aggregation.undo_keep(updates)
        else:
            return self._too_few(key, close, {}, {"collect_s": collect_s})
        phases["save_s"] = saved - aggregated
        if tested:
            phases["evaluate_s"] = loop.time() - saved
        with context.ledger.transaction(waits=False):
            for client, reason in excluded.items():
                context.ledger.updates.exclude(key, client, reason)
            context.ledger.states.add(key, number, digest, progress.digest)
            outcome = self._commit(key, close, phases, number, tested)
        for client, reason in excluded.items():
            context.notify("warning", "excluded", f"{context.name_of(client)}: {reason}")
        self._warn_of_names()
        self.adopt(state, number, digest, combined.parts)
        return outcome

    async def _load_older(self, key: RoundKey) -> OlderStates:
        """Load the older states that updates start from; updates without theirs are excluded."""
        context = self.context
        rows = [u for u in self._usable(key) if u.base_state is not None]
        if not rows:
            return NO_OLDER_STATES
        older, unreadable = await asyncio.to_thread(
            load_older, context.states.load, self.progress.base, rows
        )
        for row in rows:
            error = unreadable.get(row.base_state or 0)
            if error is None:
                continue
            reason = f"the state that it starts from cannot be read: {error.message}"
            context.ledger.updates.exclude(key, row.client, reason)
            context.notify("error", error.code, f"{context.name_of(row.client)}: {reason}")
        return older

    def _is_in_vain(self, close: machine.Close) -> bool:
        """Return True if the updates of a masked round make no state, even if they are many."""
        return self._suffices is not None and close.outcome is Outcome.SKIPPED

    def _suffice(self, updates: Sequence[UpdateRow]) -> bool:
        """Return True if these updates let a masked round continue.

        Otherwise clients would refuse each later round of it, and the server would wait for them
        without limit.
        """
        return self._suffices is None or self._suffices([u.client for u in updates])

    @property
    def _suffices(self) -> Callable[[Collection[ClientId]], bool] | None:
        assert self.progress.round is not None
        return self.progress.round.rules.suffices

    def _least(self) -> int:
        """Return the number of updates that the round needs to change anything."""
        assert self.progress.round is not None
        return self.progress.round.rules.min_updates

    def _usable(self, key: RoundKey) -> list[UpdateRow]:
        """Return the updates that can be aggregated now."""
        return [u for u in self.context.ledger.updates.accepted(key) if u.samples > 0]

    def _too_few(
        self,
        key: RoundKey,
        close: machine.Close,
        excluded: Mapping[ClientId, str],
        phases: dict[str, float],
    ) -> Outcome:
        """Close a round whose updates make no state; the state stays."""
        context, least = self.context, self._least()
        masked = self._suffices is not None
        with context.ledger.transaction(waits=False):
            for client, reason in excluded.items():
                context.ledger.updates.exclude(key, client, reason)
            usable = self._usable(key)
            for row in usable:
                reason = (
                    f"a round needs {least} updates to change anything and had {len(usable)} "
                    "(round.min_updates)"
                )
                if masked:
                    reason = "too few updates of its masked round can be used"
                context.ledger.updates.exclude(key, row.client, reason)
            if usable and close.why is not machine.Why.REST:  # which the ledger must remember
                close = replace(close, why=machine.Why.TOO_FEW)
            outcome = self._commit(key, close, phases)
        for client, reason in excluded.items():
            context.notify("warning", "excluded", f"{context.name_of(client)}: {reason}")
        if usable or masked:
            text = notes.describe_too_few(self.progress, len(usable), least)
            if masked:
                text = notes.describe_masked_in_vain(self.progress, len(usable))
            context.notify("warning", "too_few_updates", text)
        return outcome

    def _void(
        self,
        key: RoundKey,
        close: machine.Close,
        combined: Combined,
        phases: dict[str, float],
    ) -> Outcome:
        """Close a round whose updates cannot be combined, none being at fault; the state stays."""
        context = self.context
        assert combined.failure is not None
        why = self._cause = combined.failure.message
        with context.ledger.transaction(waits=False):
            for row in self._usable(key):
                reason = f"the round is void, and no update is to blame: {why}"
                context.ledger.updates.exclude(key, row.client, reason)
            if close.why is not machine.Why.REST:  # which the ledger must remember
                close = replace(close, why=machine.Why.VOID)
            outcome = self._commit(key, close, phases)
        context.notify("error", "void", notes.describe_void(self.progress, why))
        return outcome

    def check_void(self, key: RoundKey) -> str:
        """Return a reason to pause the run after several void rounds in a row, else nothing.

        Without a pause the run would continue in vain.

        Args:
            key: of the round that was just closed.

        Raises:
            RunFailed: no operator is there to resume the run (``--until-done``).
        """
        context, row = self.context, self.context.ledger.rounds.get(key)
        count = context.ledger.rounds.count_void(context.run)
        if count < MAX_VOID or row is None or row.why != machine.Why.VOID:
            return ""
        cause = f": {self._cause.rstrip('.')}" if self._cause else ""
        text = f"the last {count} rounds are void: their updates could not be combined{cause}"
        log = context.aggregation.log
        action = f"Fix the causes that the notes and {log} name (memory, the method), then: "
        if not context.attended:
            raise RunFailed(
                f"{text}.",
                action=f"{action}fcil-server serve; the run continues with the next round.",
            )
        context.notify("error", "paused", f"{text}. The run is paused. {action}fcil-server resume")
        return text

    def _warn_of_names(self) -> None:
        """Warn, once for a class, that two clients seem to mean different things by its name."""
        names = self.context.classes.names()
        for class_id, one, other in self.context.aggregation.class_conflicts:
            if class_id not in self._noted_conflicts:
                self._noted_conflicts.add(class_id)
                both = f"{self.context.name_of(one)} and {self.context.name_of(other)}"
                text = f"{both} seem to mean different things by {names[class_id]!r}: their images"
                self.context.notify(
                    "warning", "far_apart", f"{text} are as far apart as different classes"
                )

    def _commit(
        self,
        key: RoundKey,
        close: machine.Close,
        phases: dict[str, float],
        new_state: int | None = None,
        tested: Mapping[str, int] = NOT_TESTED,
    ) -> Outcome:
        ledger = self.context.ledger
        assert self.progress.round is not None
        for client in close.answers:  # a client that asks before the sync gets the last round's
            self.verdict(client)
        with ledger.transaction(waits=False):
            # Updates that landed while the last ones were synced to disk count like the others.
            rows = ledger.updates.of_round(key)
            updated = {u.client for u in rows}
            explained = {a.client for a in ledger.answers.of_round(key) if a.reason}
            outcome = close.outcome
            if updated and outcome is Outcome.SKIPPED:
                outcome = Outcome.SHORT
            silent = []
            for client, answer in close.answers.items():
                if answer in SILENT and client not in updated:
                    reason = self.progress.round.reasons.get(client, "")
                    # A machine that was restarted does not know the reason that the ledger has.
                    kept = answer is Answer.DECLINED and client in explained
                    if reason or not kept:
                        silent.append((client, answer, reason))
            ledger.answers.set_each(key, silent)
            ledger.updates.mark_counted(key)
            if all(u.status is UpdateStatus.EXCLUDED for u in rows):
                outcome = Outcome.SKIPPED
            ledger.rounds.close(
                key,
                outcome,
                why=close.why,
                new_state=new_state,
                phases=phases,
                metrics={**self.context.lag().to_fields(), **tested},
            )
        self._judged = {row.client: _verdict(row) for row in rows}
        return outcome

    def _open_evaluations(self, rows: Sequence[UpdateRow]) -> dict[str, dict[int, tuple[int, int]]]:
        """Return client -> class id -> (correct, total); runs in a thread beyond the event loop."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for row in rows:
            payload = self.context.aggregation.open_update(row)
            columns = (payload.i64(c).tolist() for c in ("classes", "correct", "total"))
            found[row.client] = {c: (right, n) for c, right, n in zip(*columns, strict=True)}
        return found

    async def _tell(
        self, key: RoundKey, step: Step, close: machine.Close, outcome: Outcome
    ) -> None:
        """Notify the asked clients, except those whose work continues into the next round."""
        continues = self.context.continues_after(step) and close.why is not machine.Why.REST
        turns = Yielder()
        updated = self._judged.keys()
        for client, answer in close.answers.items():
            await turns.yield_if_long()
            peer = self.context.peers.by_client(client)
            at_work = answer in (Answer.SURPLUS, Answer.LOST) and client not in updated
            if peer is None or (continues and at_work):
                continue
            peer.progress, peer.paused = None, False
            message = RoundClosed(
                run=self.context.run,
                task=key.task,
                kind=key.kind,
                round=key.round,
                outcome=outcome.value,
                answer=(Answer.UPDATED if client in updated else answer).word,
                verdict=self.verdict(client),
            )
            self.context.send(peer, message)

    def verdict(self, client: ClientId) -> Verdict | None:
        """Return the verdict on a client's last update whose round is closed."""
        if client not in self._verdicts:
            judged = self.context.ledger.updates.last_judged(self.context.run, client)
            self._verdicts[client] = None if judged is None else _verdict(judged)
        return self._verdicts[client]

    async def central_evaluation(self, task: TaskInfo) -> None:
        """Test the global model on the server's own folder, if one is configured.

        A folder that is not there, or cannot be read, costs its test and not the run.

        Raises:
            FcilError: the worker failed; the test is repeated when the run is resumed.
        """
        if not self.context.config.run.central_test:
            return
        try:
            counts = await self._test(task, self.progress.state, self.progress.parts)
        except DataError as error:
            text = f"task {task.index} is not tested on run.central_test: {error}"
            self.context.notify("error", error.code, text)
            return
        self.context.ledger.evaluations.add(self.context.run, task.index, CENTRAL, counts)

    async def _test_round(
        self, task: TaskInfo, step: Step, state: State, parts: Sequence[Part]
    ) -> Mapping[str, int]:
        """Test a round's state if it is its turn: how many images it gets right, and of how many.

        A curve is not worth a run: a test that fails is a warning.
        """
        context = self.context
        every = context.config.run.central_test_every
        repeated = {e.kind for e in context.exchanges if e.rounds is None} if every else set()
        if repeated & context.masked_kinds:  # only then does the method's state change
            repeated = {UNMASK}
        if step.kind not in repeated or (step.round + 1) % every:
            return NOT_TESTED
        try:
            counts = await self._test(task, state, parts)
        except FcilError as error:
            text = f"task {task.index} {step.kind} round {step.round} is not tested: {error}"
            context.notify("warning", error.code, text)
            return NOT_TESTED
        right, total = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
        return {"test_correct": right, "test_total": total}

    async def _test(
        self, task: TaskInfo, state: State, parts: Sequence[Part]
    ) -> dict[int, tuple[int, int]]:
        """Test a state on the server's own folder: class id -> (correct, total)."""
        self._best = None
        aggregation, folder = self.context.aggregation, self.context.config.run.central_test
        ctx = method_context(self.context, task, Step(EVALUATE, 0, 1))
        ids = self.context.classes.keyed(task.seen)  # a folder may have a class's other name
        shown = parts or await aggregation.broadcast(ctx, state)
        return await aggregation.evaluate(ctx, shown, folder, ids)


def _verdict(row: UpdateRow) -> Verdict:
    """Return the verdict on an update whose round is closed, or is just being closed."""
    counted = row.status is not UpdateStatus.EXCLUDED
    return Verdict(update=row.update_id, counted=counted, reason=row.reason)
