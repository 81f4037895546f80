"""Combination of a round's updates; updates on which it fails are found and excluded.

`culprits` decides the tries; this module carries them out, within one deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fcil_adapters.contract import Part, State
from fcil_protocol.errors import (
    CorruptFile,
    FcilError,
    OutOfMemory,
    RunFailed,
    StorageError,
    WorkerDied,
    WorkerStalled,
)
from fcil_protocol.ids import ClientId
from fcil_server.aggregation.culprits import Found, Numbers, find
from fcil_server.aggregation.trials import Trials
from fcil_server.ledger.rows import UpdateRow

TRIES = 2  # of all updates together, before the search for single ones


@dataclass(frozen=True)
class Combined:
    """Result of combining a round's updates.

    Attributes:
        state: the combined state; None: there is none.
        parts: its broadcast, checked.
        excluded: clients whose updates are excluded, with the reason.
        failure: why there is no state, if no update in particular is at fault.
    """

    state: State | None
    parts: tuple[Part, ...] = ()
    excluded: Mapping[ClientId, str] = field(default_factory=dict)
    failure: FcilError | None = None


def limit_s(stall_s: float, count: int) -> float | None:
    """Return the time limit for all tries after a first failure, seconds; None: no limit.

    The longest silence of one try (`[run] work_timeout_s`, 0: for ever), times the tries that it
    takes to find one culprit.
    """
    return stall_s * (4 + 2 * math.ceil(math.log2(max(count, 1)))) if stall_s else None


@dataclass
class Combining:
    """One aggregation.

    Attributes:
        combine: combines some of the updates, or raises.
        updates: of the round, in ClientId order.
        trials: tries before a restart.
        limit_s: seconds for everything after the first failure; None: no limit.
        notify: receives a sentence when it fails and is tried again.
    """

    combine: Callable[[Sequence[UpdateRow]], Awaitable[Combined]]
    updates: Sequence[UpdateRow]
    trials: Trials
    limit_s: float | None
    notify: Callable[[str], None]
    _spent_s: float = 0.0  # by earlier starts
    _began: float = math.inf  # when this start had its first failure
    _failure: FcilError | None = None  # the last one of all updates together
    _best: tuple[Numbers, Combined] = ((), Combined(None))
    _lacked: bool = False  # memory, for several updates together

    async def run(self) -> Combined:
        """Return the state of all updates, or of those that can be combined.

        Raises:
            StorageError: the disk is at fault.
        """
        everybody = tuple(range(len(self.updates)))
        reason = self.trials.shown(self._all_together())
        if reason:
            self._failure = RunFailed(reason)
        else:
            try:
                return await self.combine(self.updates)
            except FcilError as error:
                self._take(error)
        self._began, self._spent_s = self._now(), self.trials.spent_s
        left = None if self.limit_s is None else self.limit_s - self._spent_s
        if left is None or left > 0:
            try:
                async with asyncio.timeout(left) as deadline:
                    return await self._go_on(everybody, known=bool(reason))
            except TimeoutError:
                if not deadline.expired():
                    raise
        assert self._failure is not None
        text = f"{self._failure.message} Finding out why took longer than {self.limit_s:.0f} s."
        return Combined(None, failure=RunFailed(text))

    async def _go_on(self, everybody: Numbers, *, known: bool) -> Combined:
        """Try all of them once more, and then search for those on which it fails."""
        if not known:
            for _ in range(TRIES - 1):
                assert self._failure is not None
                text = f"an aggregation failed and is tried again: {self._failure.message}"
                self.notify(text)
                try:
                    return await self.combine(self.updates)
                except FcilError as error:
                    self._take(error)
            await self._note(self._all_together(), self._failure)
            # A worker that died may have been killed from outside: the search tries them again.
            if not isinstance(self._failure, WorkerDied):
                await self._note(self._names(everybody), self._failure)
        found, reasons = await self._search()
        # If memory lacks for one more update, that update is not to blame.
        if found.nobody or (found.together and self._lacked):
            return Combined(None, failure=self._failure)
        if self._best[0] != found.good:  # it worked before a restart
            self._best = found.good, await self.combine(self._rows(found.good))
        combined = self._best[1]
        blamed = {self.updates[n].client: reasons[n] for n in (*found.alone, *found.together)}
        return replace(combined, excluded={**blamed, **combined.excluded})

    async def _search(self) -> tuple[Found, dict[int, str]]:
        """Return the updates that can be combined, and a reason for each other one."""
        search, reasons = find(len(self.updates)), dict[int, str]()
        wanted, before = next(search), ""
        try:
            while True:
                reason = await self._try(wanted)
                if len(wanted) == 1:
                    reasons[wanted[0]] = (
                        f"aggregation failed on it: {reason}"
                        if reason
                        else f"aggregation failed on it with the others', not on it alone: {before}"
                    )
                wanted, before = search.send(not reason), reason
        except StopIteration as end:
            return end.value, reasons

    async def _try(self, wanted: Numbers) -> str:
        """Try some of the updates; return why they cannot be combined, or an empty string."""
        shown = self.trials.shown(self._names(wanted))
        if shown is not None:
            return shown
        try:
            result = await self._twice_if_it_dies(wanted)
        except FcilError as error:
            self._take(error, joint=False)
            self._lacked |= isinstance(error, OutOfMemory) and len(wanted) > 1
            await self._note(self._names(wanted), error)
            return error.message
        if set(self._best[0]) <= set(wanted):
            self._best = wanted, result
        await self._note(self._names(wanted), None)
        return ""

    async def _twice_if_it_dies(self, wanted: Numbers) -> Combined:
        """Combine some updates; again if the worker dies, which may have another cause."""
        try:
            return await self.combine(self._rows(wanted))
        except WorkerStalled:
            raise
        except WorkerDied:
            return await self.combine(self._rows(wanted))

    def _take(self, error: FcilError, *, joint: bool = True) -> None:
        """Accept a failure as one of combining; raise it if the disk is at fault.

        A damaged file belongs to one update: the search for single ones finds it.
        """
        if isinstance(error, StorageError) and not isinstance(error, CorruptFile):
            raise error
        if joint or isinstance(error, CorruptFile):
            self._failure = error

    async def _note(self, names: list[str], error: FcilError | None) -> None:
        # Disk space or memory that lacked may be there after a restart.
        if not isinstance(error, StorageError | OutOfMemory):
            spent = self._spent_s + self._now() - self._began
            reason = "" if error is None else error.message
            await asyncio.to_thread(self.trials.note, names, reason, spent)

    def _all_together(self) -> list[str]:
        return [*(u.update_id for u in self.updates), "together"]

    def _names(self, wanted: Numbers) -> list[str]:
        return [self.updates[n].update_id for n in wanted]

    def _rows(self, wanted: Numbers) -> list[UpdateRow]:
        return [self.updates[n] for n in wanted]

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
