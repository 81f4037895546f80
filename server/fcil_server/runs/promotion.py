"""The state that the operator promotes: clients use its model until that ends.

The ledger remembers it. Its parts are published beside those of the rounds, which continue. Each
client gets a signed `UseModel` at once, or when it connects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil_adapters.contract import TaskInfo
from fcil_adapters.masks.exchanges import UNMASK
from fcil_adapters.masks.record import is_of_masks
from fcil_protocol.errors import CorruptFile, FcilError, NotNow, UsageError
from fcil_protocol.messages.messages import PartRef, UseModel
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_protocol.process.terminal import count_of
from fcil_server.event_loop import Yielder
from fcil_server.ledger.enums import OPENING, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow, StateRow
from fcil_server.rounds.asking import class_registry
from fcil_server.rounds.closing import Closing
from fcil_server.rounds.position import RunContext, header_stamp, method_context
from fcil_server.rounds.schedule import Step, task_steps
from fcil_server.runs.state_choice import LAST, find_state
from fcil_server.sessions.peers import Peer

NONE = -1  # as a message says that no state is promoted


@dataclass(frozen=True)
class _Published:
    """A state whose parts clients may fetch.

    Attributes:
        step: the round that would start from it.
        promoted: clients keep it; False: until a newer one comes.
    """

    row: StateRow
    task: TaskInfo
    step: Step
    refs: tuple[PartRef, ...]
    promoted: bool


class Promotion:
    """Promotes states of one run, and offers the promoted one to clients.

    Args:
        context: the run's.
        closing: removes the files of old states.
        directory: the federation's.
    """

    def __init__(self, context: RunContext, closing: Closing, directory: Path) -> None:
        self._context = context
        self._closing = closing
        self._directory = directory
        self._published: _Published | None = None
        self._turn = asyncio.Lock()
        self._offers: set[asyncio.Task[bool]] = set()

    @property
    def number(self) -> int:
        """The promoted state; -1: none."""
        row = self._row()
        return NONE if row.promoted is None else row.promoted

    async def restore(self) -> None:
        """Offer the state that was promoted before this start.

        The run goes on without it if the state cannot be read.
        """
        context = self._context
        async with self._turn:
            number = self.number
            row = self._row()
            complete = row.status is RunStatus.DONE  # then no round brings the newest model
            ended = context.ledger.runs.had_promotion(row.run_id)
            if number == NONE and not (complete and ended):
                return
            wanted = LAST if number == NONE else str(number)
            try:
                chosen = await self._choose(wanted)
                self._published = await self._publish(chosen, promoted=number != NONE)
            except FcilError as error:
                text = f"state {wanted} cannot be offered: {error}"
                context.notify("error", error.code, text)
                return
        await self._tell_all()  # those that were ready before

    async def on_run_complete(self) -> None:
        """Offer the newest state after the last round, if a promotion has ended in this run."""
        if self.number == NONE:
            await self.restore()

    async def promote(self, state: str, actor: str) -> dict[str, Any]:
        """Promote a state, or let clients follow the newest again, and offer it to those connected.

        Args:
            state: ``best``, a number, or ``last``: the newest, now and from now on.
            actor: the caller, for the audit log.

        Returns:
            ``run``, ``state``, ``task``, ``promoted`` and ``clients``: how many got the offer.

        Raises:
            UsageError: there is no such state, or it has learned nothing.
            CorruptFile: its file is damaged.
            NotNow: a promotion is under way.
        """
        context, ledger = self._context, self._context.ledger
        if self._turn.locked():
            raise NotNow(
                "nothing was done: another state is being promoted.", action="Try again later."
            )
        async with self._turn:
            before, promoted = self._row().promoted, state != LAST
            chosen = await self._choose(state)
            if not promoted and before is None:
                raise _nothing_promoted()
            # First in the ledger, so that tidying keeps its file from now on.
            undo = _record(ledger, chosen, actor, promoted=promoted)
            self._closing.also_kept |= {chosen.state, *([] if before is None else [before])}
            try:
                await self._closing.wait_until_tidied()
                published = await self._publish(chosen, promoted=promoted)
                await asyncio.to_thread(ledger.sync)
            except BaseException:
                with ledger.transaction():
                    ledger.runs.undo_promote(context.run, undo)
                    ledger.audit.add(actor, "promote", "it failed and was undone")
                raise
            finally:
                self._closing.also_kept.clear()
            self._published = published
        text = f"state {chosen.state} (task {chosen.task}) is promoted: clients use its model"
        if not promoted:
            text = "no state is promoted any more: clients use the newest model"
        context.notify("info", "promoted", text)
        return _done(chosen, promoted=promoted, clients=await self._tell_all())

    async def _tell_all(self) -> int:
        """Offer the published state to all connected clients; return to how many."""
        told, yielder = 0, Yielder()
        for peer in self._context.peers:
            told += peer.announced and await self._offer(peer)
            await yielder.yield_if_long()
        return told

    def on_client_ready(self, peer: Peer) -> None:
        """Offer the promoted state to a client that has announced its classes.

        Or the newest one, if a promotion has ended since its Welcome, or in a complete run.
        """
        found = self._published
        ended = peer.promoted != self.number or self._row().status is RunStatus.DONE
        if found is not None and (found.promoted or ended):
            task = asyncio.get_running_loop().create_task(self._offer(peer))
            self._offers.add(task)
            task.add_done_callback(self._offers.discard)

    async def _offer(self, peer: Peer) -> bool:
        try:
            return await self._tell(peer)
        except FcilError as error:  # it is offered again when the client connects again
            self._context.notify("warning", error.code, f"{peer.name} gets no model: {error}")
            return False

    async def close(self) -> None:
        """Cancel offers under way."""
        for task in self._offers:
            task.cancel()
        await asyncio.gather(*self._offers, return_exceptions=True)

    async def _tell(self, peer: Peer) -> bool:
        """Offer the published state to a client that takes models; True if it was sent."""
        found = self._published
        if found is None or not peer.takes_models:
            return False
        context = self._context
        stamp = header_stamp(context, found.row.state, found.task, found.step)
        registry = await context.publisher.publish_for(
            peer.client, class_registry(context, peer, found.task), stamp, beside=True
        )
        message = UseModel(
            run=context.run,
            task=found.task.index,
            kind=found.step.kind,
            round=found.step.round,
            rounds=found.step.rounds,
            base=found.row.state,
            classes=list(found.task.classes),
            past=list(found.task.past),
            parts=[*found.refs, registry],
            promoted=found.promoted,
        )
        sent = context.send(peer, message)
        if sent:
            peer.promoted = found.row.state if found.promoted else NONE
        return sent

    def _row(self) -> RunRow:
        row = self._context.ledger.runs.get(self._context.run)
        assert row is not None, "the run is being served"
        return row

    async def _choose(self, state: str) -> StateRow:
        """Return a state of the run whose file is intact."""
        path, row = self._context.ledger.path, self._row()

        def choose() -> StateRow:
            with Ledger(path, read_only=True) as ledger:
                return choose_promoted(ledger, self._directory, row, state)

        return await asyncio.to_thread(choose)

    async def _publish(self, row: StateRow, *, promoted: bool) -> _Published:
        """Seal the parts of a state beside those of the rounds."""
        context = self._context
        task = context.classes.task_info(row.task)
        state = await asyncio.to_thread(context.states.load, row.state)
        if context.states.record(row.state).digest != row.digest:
            raise CorruptFile(f"the file of state {row.state} is not the one in the ledger.")
        step = self._next_step(row)
        ctx = method_context(context, task, step)
        parts = await context.aggregation.broadcast(ctx, state)
        parts = tuple(part for part in parts if not is_of_masks(part.name))
        stamp = header_stamp(context, row.state, task, step)
        refs = await context.publisher.publish_beside(parts, stamp)
        return _Published(row, task, step, tuple(refs), promoted)

    def _next_step(self, row: StateRow) -> Step:
        """Return the round that would start from a state: it says how far its learning is."""
        context = self._context
        rows = [s for s in context.ledger.states.all(context.run) if s.task == row.task]
        opened = context.ledger.tasks.all(context.run)
        if row.state == rows[-1].state and opened[row.task].closed_at is not None:
            return Step(EVALUATE, 0, 1)
        rounds = context.config.round.rounds_per_task
        steps = task_steps(context.exchanges, rounds, task=row.task, evaluate=True)
        if row.kind == OPENING:
            return steps[0]
        if context.masked_kinds:  # of several states of a round, one has learned
            done = sum(s.kind == UNMASK for s in rows if s.state <= row.state)
            return steps[min(done, len(steps) - 1)]
        here = [i for i, s in enumerate(steps) if (s.kind, s.round) == (row.kind, row.round)]
        after = steps[here[0] + 1 :] if here else ()
        return after[0] if after else Step(EVALUATE, 0, 1)


def choose_promoted(ledger: Ledger, directory: Path, row: RunRow, state: str) -> StateRow:
    """Return the state to promote.

    Raises:
        UsageError: there is no such state, or it has learned nothing.
        CorruptFile: its file is damaged.
    """
    chosen = find_state(ledger, directory, row, task=None, state=state)
    if chosen.kind == OPENING and chosen.task == 0:
        raise UsageError(
            f"state {chosen.state} of run {row.run_id} has learned nothing yet.",
            action="Wait for the first round, or name another: best, or a number.",
        )
    return chosen


def promote_offline(ledger: Ledger, directory: Path, state: str, actor: str) -> dict[str, Any]:
    """Promote a state of the newest run while no server runs; clients hear of it when one does.

    Raises:
        UsageError, CorruptFile: as `Promotion.promote`.
    """
    row, promoted = ledger.runs.named(None), state != LAST
    if not promoted and row.promoted is None:
        raise _nothing_promoted()
    chosen = choose_promoted(ledger, directory, row, state)
    _record(ledger, chosen, actor, promoted=promoted)
    return _done(chosen, promoted=promoted, clients=None)


def _record(ledger: Ledger, chosen: StateRow, actor: str, *, promoted: bool) -> int | None:
    """Record in the ledger what clients use, and who decided it; return how to undo it."""
    what = f"state {chosen.state}" if promoted else "the newest state"
    with ledger.transaction():
        ledger.audit.add(actor, "promote", f"{what} of {chosen.run}")
        return ledger.runs.promote(chosen.run, chosen.state if promoted else None)


def describe_promoted(told: Mapping[str, Any]) -> str:
    """Return the sentence for a completed promotion."""
    what = f"the model of state {told['state']}, of task {told['task']}"
    if not told["promoted"]:
        what = "the newest model from now on"
    if told["clients"] is None:
        return f"Clients use {what}, once the server runs: fcil-server serve"
    return f"Clients use {what}: {count_of(told['clients'], 'connected client')} told."


def _done(row: StateRow, *, promoted: bool, clients: int | None) -> dict[str, Any]:
    return {
        "run": row.run,
        "state": row.state,
        "task": row.task,
        "promoted": promoted,
        "clients": clients,
    }


def _nothing_promoted() -> UsageError:
    return UsageError(
        "no state is promoted: clients use the newest as it is.",
        action="Promote one with: fcil-server run promote best",
    )
