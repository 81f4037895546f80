"""Recovery of a run whose newest state cannot be read: compute it again, or fork.

The updates of the round that made the newest state stay in the spool until the next state is
committed. So a damaged state is computed again from the one before it and those updates, and used
only if it is byte-identical. If that fails, the run goes back to the newest readable state, as a
new run, since clients have seen the later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from fcil_adapters.contract import State
from fcil_protocol.errors import CorruptFile, FcilError, RunFailed, TrustError, WireError
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.payload import pack, unpack
from fcil_server.aggregation.staleness import load_older
from fcil_server.aggregation.store import kept_states
from fcil_server.federation.roster import WITHDRAWN
from fcil_server.ledger.enums import OPENING, SPLIT_SUM, RunStatus, UpdateStatus
from fcil_server.ledger.rows import RunRow, StateRow, UpdateRow
from fcil_server.reports import run_directory
from fcil_server.rounds.position import RunContext, method_context
from fcil_server.rounds.schedule import Step, task_steps
from fcil_server.runs.fork import fork


async def ensure_state(context: RunContext, directory: Path) -> RunRow | None:
    """Ensure that the run's newest state can be read; return the fork if one was needed.

    Args:
        context: the run's.
        directory: the federation's.

    Raises:
        CorruptFile: no state of the run can be read.
        RunFailed: the newest one is unreadable, and computing it again failed for another reason.
    """
    newest = context.ledger.states.newest(context.run)
    if newest is None:
        return None
    recovery = Recovery(context)
    try:
        await recovery.have(newest)
    except CorruptFile as error:
        row = context.ledger.runs.get(context.run)
        if row is None or row.status is not RunStatus.DONE:
            await recovery.restore_opening()
            return _fall_back(context, directory, newest, error)
        context.notify(
            "error", error.code, f"{error.message} The run is complete; its results stay."
        )
    return None


class Recovery:
    """Reads states, and computes unreadable ones again."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._rows = context.ledger.states.all(context.run)

    async def have(self, row: StateRow) -> State:
        """Return a committed state; a recomputed one is on disk again.

        Raises:
            CorruptFile: it cannot be recovered; the message says why.
        """
        try:
            return await asyncio.to_thread(self._read, row)
        except CorruptFile as error:
            damage = error
        state = await self._compute(row, damage)
        await asyncio.to_thread(self._context.states.save, row.state, state, row.parent, row.task)
        text = f"{damage.message} It was computed again and is identical to the byte."
        self._context.notify("warning", "state_recomputed", text)
        return state

    async def restore_opening(self) -> None:
        """Compute the newest recoverable opening of a task again: it needs no updates."""
        for row in reversed(self._rows):
            if row.kind == OPENING:
                with contextlib.suppress(CorruptFile):
                    await self.have(row)
                    return

    def _read(self, row: StateRow) -> State:
        states = self._context.states
        state = states.load(row.state)
        if states.record(row.state).digest != row.digest:
            raise CorruptFile(
                f"{states.path(row.state)} is an intact state, but not the one in the ledger."
            )
        return state

    async def _compute(self, row: StateRow, damage: CorruptFile) -> State:
        """Compute a state again, in the way that gives the same bytes.

        Raises:
            CorruptFile: none does.
        """
        copy = self._context.states.directory.parent / run_directory.FINAL_MODEL
        if copy.exists() and hashlib.sha256(data := copy.read_bytes()).hexdigest() == row.digest:
            return unpack(data)
        why = "the result differs"
        try:
            # Before any computing: a missing update would otherwise show only after a walk to the
            # run's start.
            attempts = self._attempts(row)
            base = await self._base(row)
            for attempt in attempts:
                state = await self._step(row, base, attempt)
                if hashlib.sha256(pack(state)).hexdigest() == row.digest:
                    return state
        except (CorruptFile, TrustError, WireError) as error:
            why = error.message
        except FcilError as error:  # it may pass: no reason to drop a state
            raise RunFailed(
                f"{damage.message} Computing it again failed: {error.message}",
                action="Start the server again; if that does not help, go back with: "
                "fcil-server run rollback",
            ) from error
        raise CorruptFile(f"{damage.message} It cannot be computed again: {why}") from damage

    async def _base(self, row: StateRow) -> State | None:
        if row.parent is None:
            return None
        # Some openings change nothing: they have the digest of the state before.
        before = [r for r in self._rows if r.state < row.state and r.digest == row.parent]
        if not before:
            raise CorruptFile("the state before it is not in the ledger.")
        return await self.have(before[-1])

    def _attempts(self, row: StateRow) -> list[list[UpdateRow]]:
        """Return the sets of updates that may have made a state.

        Aggregation itself excludes some by comparison with the others: those belong to its input.
        An update that was excluded for another reason was not there.
        """
        if row.kind == OPENING:
            return [[]]
        rows = [u for u in self._context.ledger.updates.of_round(row.key) if u.samples > 0]
        counted = [u for u in rows if u.status is UpdateStatus.COUNTED]
        held = {
            *self._context.spool.keys(),
            *(self._context.kept.names() if self._context.kept else ()),
        }
        lost = [u for u in counted if u.record not in held]
        if lost or not counted:
            raise CorruptFile(f"{len(lost)} of its {len(counted)} updates are not kept.")
        absent = {WITHDRAWN, SPLIT_SUM}
        given = [u for u in rows if u in counted or (u.record in held and u.reason not in absent)]
        return [given] if given == counted else [given, counted]

    async def _step(self, row: StateRow, base: State | None, updates: list[UpdateRow]) -> State:
        state, _ = await take_step(self._context, row, base, updates)
        if state is None:
            raise CorruptFile("none of its updates can be used any more.")
        return state


async def take_step(
    context: RunContext,
    row: StateRow,
    base: State | None,
    updates: list[UpdateRow],
    load: Callable[[int], State] | None = None,
) -> tuple[State | None, dict[ClientId, str]]:
    """Compute a state again as its row describes, from a base and updates.

    Args:
        context: the run's.
        row: of the state.
        base: the state before it.
        updates: of the round; those whose older start cannot be read are left out.
        load: returns older states, from which some updates start; None: those on disk.

    Returns:
        The state, and the excluded clients with reasons; None if all are excluded.

    Raises:
        FcilError: combining them fails, and no update in particular is to blame.
    """
    task = context.classes.task_info(row.task)
    if row.kind == OPENING:
        ctx = method_context(context, task, Step(OPENING, 0, 1))
        before = base if base is not None else await context.aggregation.init(ctx)
        return await context.aggregation.open_task(ctx, before), {}
    assert base is not None, "a round starts from a state"
    steps = task_steps(
        context.exchanges,
        context.config.round.rounds_per_task,
        task=row.task,
        evaluate=True,
    )
    ours = [s for s in steps if (s.kind, s.round) == (row.kind, row.round)]
    step = ours[0] if ours else Step(row.kind, row.round, row.round + 1)
    older, unreadable = await asyncio.to_thread(
        load_older, load or context.states.load, row.state - 1, updates
    )
    lost = {
        u.client: unreadable[u.base_state].message for u in updates if u.base_state in unreadable
    }
    updates = [u for u in updates if u.client not in lost]
    if not updates:
        return None, lost
    combined = await context.aggregation.aggregate(
        method_context(context, task, step), base, updates, older
    )
    context.aggregation.settled()
    if combined.failure is not None:
        raise combined.failure
    return combined.state, {**lost, **combined.excluded}


def _fall_back(
    context: RunContext, directory: Path, newest: StateRow, error: CorruptFile
) -> RunRow:
    """Fork the run at the newest readable state, and report the loss."""
    found = kept_states(context.ledger, directory, context.run)
    if not found:
        raise CorruptFile(
            f"none of the states in {context.states.directory} can be read: {error.message}",
            action="Restore a backup (fcil-server restore), or start a new run: "
            "fcil-server serve --new-run",
        )
    kept, actor = found[-1], "fcil-server serve"
    row = fork(context.ledger, directory, context.run, kept.state, actor=actor, action="fall_back")
    lost = [
        f"task {r.task} {r.kind} round {r.round}"
        for r in context.ledger.rounds.all(context.run)
        if r.new_state is not None and r.new_state > kept.state
    ]
    shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    context.notify(
        "error",
        "state_lost",
        f"{error.message} The run goes back from state {newest.state} to {kept.state}, as run "
        f"{row.run_id}; lost: {shown or 'the opening of the task'}. A backup may hold more "
        "(fcil-server restore); check the disk, then: fcil-server check",
    )
    return row
