"""One round as a pure machine: events in, instructions out, no clock, no sockets, no disk.

Phases: ``gathering`` (too few clients), ``open`` (asked, collecting), ``closed``.

    gathering --Present/Available/Left/Tick/Resume (enough)--> open
        |  open --Updated/Declined/Withdrawn/Tick/Stop--> closed
        |  open --Tick (deadline without quorum)--> open, reopened
        +--Stop, or one of the first line (too few have data)--> closed, skipped

No round closes as done or short with fewer updates than ``RoundRules.min_updates``: it is skipped.

``Round.TABLE`` at the end of the file is the complete transition table; the events and instructions
are in `rounds.events`. Time is a number of seconds of server uptime that the daemon passes in, so
deadlines do not run while it is down.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer, Outcome
from fcil_server.rounds.events import (
    Answers,
    Ask,
    Available,
    Close,
    Declined,
    Event,
    Hold,
    Instruction,
    Left,
    Opened,
    Phase,
    Present,
    Reopened,
    Resume,
    RoundRules,
    SetTimer,
    Stop,
    Tick,
    Unable,
    Unheld,
    Updated,
    Why,
    Widened,
    Withdrawn,
)

Handler = Callable[..., list[Instruction]]

_MAY_OPEN = (Phase.GATHERING, Phase.OPEN, Phase.CLOSED)
_MAY_CLOSE = (Phase.OPEN, Phase.CLOSED)
_MOST_BACKOFF = 5  # steps of the wait for clients that have declined, each four times as long


@dataclass
class Round:
    """State of one round; only `handle` changes it.

    Attributes:
        opens_at: set while enough clients are connected and others may follow, or may have data
            soon.
        first: the first round of its task: connected clients may not have announced yet which of
            its classes they hold.
        hearing: set while it waits only for connected clients to announce that.
        held: between `Hold` and `Resume`.
        unheld_since: since when enough clients are connected of which too few have data; the next
            round of the task inherits it.
        timed: its end has a timer.
        excluded: asked clients that can no longer answer: revoked, or with a void update.
        stuck_until: set while too few updates have come and no asked client is at work.
        resting: asked clients that declined and will ask in again.
    """

    rules: RoundRules
    seed: tuple[int, ...]  # numbers that the sample of clients depends on
    phase: Phase = Phase.GATHERING
    connected: dict[ClientId, bool] = field(default_factory=dict)  # client -> holds data
    answers: Answers = field(default_factory=Answers)  # keys: the asked clients
    reasons: dict[ClientId, str] = field(default_factory=dict)
    away_since: dict[ClientId, float] = field(default_factory=dict)
    deadline: float = 0.0
    reopens: int = 0
    opens_at: float | None = None
    first: bool = False
    hearing: bool = False
    held: bool = False
    unheld_since: float | None = None
    timed: bool = False
    excluded: set[ClientId] = field(default_factory=set)
    stuck_until: float | None = None
    resting: set[ClientId] = field(default_factory=set)
    _excluded_then: int = -1  # how many were excluded when `_hopeless` was found out
    _hopeless: bool = False

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return the instructions that follow, in order."""
        handler, _ = self.TABLE.get((self.phase, type(event)), (None, ()))
        return handler(self, event) if handler is not None else []

    # --- gathering --------------------------------------------------------------------------

    def _on_present(self, event: Present) -> list[Instruction]:
        self.connected.update(event.clients)
        return self._settle_or_open(event.now)

    def _settle_or_open(self, now: float) -> list[Instruction]:
        """Open, but first let connected clients announce which classes of a new task they hold."""
        enough = len(self.connected) >= self.rules.min_clients and self.holders >= self._least
        all_said = self.holders == len(self.connected)
        if not self.first or not self.rules.settle_s or self.held or all_said or not enough:
            return self._open_if_enough(now)
        self.hearing, self.unheld_since = True, None
        return self._settle_until(now + self.rules.settle_s)

    def _settle_until(self, at: float) -> list[Instruction]:
        self.opens_at = at
        return [SetTimer(at)]

    def _on_available(self, event: Available) -> list[Instruction]:
        if event.client not in self.connected:
            self.hearing = False  # others may follow it
        self.connected[event.client] = event.holds
        if self.opens_at is not None or not self.rules.settle_s:
            return self._open_if_settled(event.now)
        if self.held or len(self.connected) < self.rules.min_clients:
            return []
        return self._settle_until(event.now + self.rules.settle_s)

    def _open_if_settled(self, now: float) -> list[Instruction]:
        """Open, unless it waits for others to come, or for some to announce what they hold."""
        if self.opens_at is not None:
            if not self.hearing or self.holders < len(self.connected):
                return []
            self.opens_at, self.hearing = None, False
        return self._open_if_enough(now)

    def _on_tick(self, event: Tick) -> list[Instruction]:
        if self.opens_at is None:
            return self._open_if_enough(event.now) if self.unheld_since is not None else []
        if event.now < self.opens_at:
            return []
        self.opens_at, self.hearing = None, False
        return self._open_if_enough(event.now)

    @property
    def holders(self) -> int:
        """Number of connected clients with data for the round."""
        return sum(self.connected.values())

    def _open_if_enough(self, now: float) -> list[Instruction]:
        enough = len(self.connected) >= self.rules.min_clients
        holders = sorted(c for c, holds in self.connected.items() if holds)
        held = len(holders) >= self._least
        if held or not enough:
            self.unheld_since = None
        if self.held or not enough:
            return []
        if not held:
            return self._wait_for_holders(now)
        asked = self._sample_of(holders)
        self.phase = Phase.OPEN
        self.answers = Answers(dict.fromkeys(asked, Answer.NONE))
        self.deadline = now + self.rules.deadline_s
        return [Opened(tuple(asked)), *(Ask(c) for c in asked), SetTimer(self.deadline)]

    def _wait_for_holders(self, now: float) -> list[Instruction]:
        began, limit = self.unheld_since is None, self.rules.no_holder_s
        since = now if self.unheld_since is None else self.unheld_since
        self.unheld_since = since
        if limit is None:
            return [Unheld(None)] if began else []
        until = since + limit
        if now >= until:
            return self._close(Outcome.SKIPPED, Why.NO_HOLDER)
        timer = [] if self.timed and not began else [SetTimer(until)]
        self.timed = True
        return [*([Unheld(until)] if began else []), *timer]

    def _sample_of(self, holders: list[ClientId]) -> list[ClientId]:
        return sample(holders, self.rules.clients_per_round, self.seed)

    def _on_left(self, event: Left) -> list[Instruction]:
        self.connected.pop(event.client, None)
        if len(self.connected) < self.rules.min_clients:
            self.unheld_since = None
        return self._open_if_settled(event.now) if self.hearing else []

    def _on_hold(self, _: Hold) -> list[Instruction]:
        self.held, self.opens_at, self.unheld_since, self.hearing = True, None, None, False
        return []

    def _on_resume(self, event: Resume) -> list[Instruction]:
        self.held = False
        return self._settle_or_open(event.now)

    # --- open -------------------------------------------------------------------------------

    def _on_present_while_open(self, event: Present) -> list[Instruction]:
        return [
            instruction
            for client, holds in event.clients
            for instruction in self._on_available_while_open(Available(client, holds, event.now))
        ]

    def _on_available_while_open(self, event: Available) -> list[Instruction]:
        self.connected[event.client] = event.holds
        self.away_since.pop(event.client, None)
        if self.stuck_until is not None and event.client not in self.answers:
            return self._ask_others(event.now)
        joins = self.rules.asynchronous or self.rules.joinable
        if joins and event.holds and event.client not in self.answers:
            self.answers[event.client] = Answer.NONE
            return [Widened(tuple(self.answers), declined=False), Ask(event.client)]
        again = [Answer.NONE, Answer.LOST]
        # Its folder may have changed, or it may work again.
        renewed = self.stuck_until is not None or event.client in self.resting
        self.resting.discard(event.client)
        if renewed and event.holds and event.client not in self.excluded:
            again.append(Answer.DECLINED)
        if self.answers.get(event.client) not in again:
            # It may be the last one that rested, and have no data any more.
            return [SetTimer(event.now)] if self.stuck_until == math.inf else []
        waited = self.stuck_until == math.inf  # perhaps for longer than a round may take
        self.answers[event.client], self.stuck_until = Answer.NONE, None
        if not waited:
            return [Ask(event.client)]
        self.deadline = event.now + self.rules.deadline_s
        return [Ask(event.client), SetTimer(self.deadline)]

    def _on_left_while_open(self, event: Left) -> list[Instruction]:
        self.connected.pop(event.client, None)
        if self.answers.get(event.client) is not Answer.NONE:
            return []
        self.away_since[event.client] = event.now
        return [SetTimer(event.now + self.rules.grace_s)]

    def _on_updated(self, event: Updated) -> list[Instruction]:
        if event.client in self.answers:
            self.answers[event.client] = Answer.UPDATED
        return self._close_if_complete(event.now)

    def _on_declined(self, event: Declined) -> list[Instruction]:
        if self.answers.get(event.client) is Answer.NONE:
            self.answers[event.client] = Answer.DECLINED
            self.reasons[event.client] = event.reason
        if event.final or self.rules.optional:
            self._exclude(event.client)
        elif event.resting:
            if event.client in self.answers and event.client not in self.excluded:
                self.resting.add(event.client)
            self.connected.pop(event.client, None)
        return self._close_if_complete(event.now)

    def _on_withdrawn(self, event: Withdrawn) -> list[Instruction]:
        if event.client in self.answers:
            self.answers[event.client] = Answer.DECLINED
            self.reasons[event.client] = event.reason
            self._exclude(event.client)
            self.away_since.pop(event.client, None)
        return self._close_if_complete(event.now)

    def _exclude(self, client: ClientId) -> None:
        self.excluded.add(client)
        self.resting.discard(client)  # no longer waited for

    def _on_tick_while_open(self, event: Tick) -> list[Instruction]:
        for client, since in list(self.away_since.items()):
            if event.now >= since + self.rules.grace_s:
                del self.away_since[client]
                # Its update may have reached the disk after the connection ended.
                if self.answers[client] is Answer.NONE:
                    self.answers[client] = Answer.LOST
        return self._close_if_complete(event.now)

    def _on_stop(self, event: Stop) -> list[Instruction]:
        return self._close(Outcome.SHORT, event.why)

    def _on_hold_while_open(self, _event: Hold | Resume) -> list[Instruction]:
        return []  # clients have been asked, so their updates are taken

    def _close_if_complete(self, now: float) -> list[Instruction]:
        if self.rules.suffices is not None:
            return self._close_if_it_suffices(now)
        updated = self.answers.number_of(Answer.UPDATED)
        few = updated < self._least
        if self.rules.take and updated >= self.rules.take and not few:
            return self._close(Outcome.DONE, Why.TAKEN)
        lost = self.answers.number_of(Answer.LOST)
        if not self._outstanding and (self._quorum() or not lost):
            if (self.rules.retry_s or self.resting) and few:
                return self._ask_again_or_close(now)
            return self._close(Outcome.DONE if self._quorum() else Outcome.SHORT, Why.ANSWERED)
        if now < self.deadline:
            return []
        if self._quorum():
            return self._close(Outcome.DONE, Why.DEADLINE)
        if self.rules.on_short == "reopen" and self.reopens < self.rules.max_reopens:
            self.reopens += 1
            self.deadline = now + self.rules.deadline_s
            waiting = (Answer.NONE, Answer.LOST)
            missing = tuple(sorted(c for c, a in self.answers.items() if a in waiting))
            return [Reopened(missing, self.deadline), SetTimer(self.deadline)]
        if self.resting and few:
            silent = [c for c, a in self.answers.items() if a is Answer.NONE]
            self.answers.update(dict.fromkeys(silent, Answer.LOST))
            return self._wait_for_rested()
        return self._close(Outcome.SHORT, Why.DEADLINE)

    def _ask_others(self, now: float) -> list[Instruction]:
        holders = sorted(c for c, holds in self.connected.items() if holds)
        others = self._sample_of([c for c in holders if c not in self.answers])
        if not others:
            return []
        self.answers.update(dict.fromkeys(others, Answer.NONE))
        self.stuck_until, self.deadline = None, now + self.rules.deadline_s
        asks = [Ask(c) for c in others]
        return [Widened(tuple(self.answers)), *asks, SetTimer(self.deadline)]

    def _ask_again_or_close(self, now: float) -> list[Instruction]:
        others = self._ask_others(now)
        if others:
            return others
        able = self.able
        if not able and not (self.rules.patient and self.rules.retry_s):
            return self._close(Outcome.SHORT, Why.ANSWERED)
        if able and able <= self.resting:
            return self._wait_for_rested()
        # Not closed at once: the next round would fare the same, and the run be over in a moment.
        waited = self.stuck_until == math.inf and not self.resting  # for one that is gone
        if self.stuck_until is None or waited:
            self.stuck_until = now + self.rules.retry_s * 4 ** min(self.reopens, _MOST_BACKOFF)
            return [Unable(self.stuck_until), SetTimer(self.stuck_until)]
        if now < self.stuck_until:
            return []
        may_reopen = self.rules.on_short == "reopen" and self.reopens < self.rules.max_reopens
        if not (able and may_reopen):
            if self.resting:
                return self._wait_for_rested()
            return self._close(Outcome.SHORT, Why.ANSWERED)
        self.stuck_until = None
        self.reopens += 1
        self.deadline = now + self.rules.deadline_s
        again = sorted(able - self.resting)
        here = [c for c in again if c in self.connected]
        self.answers.update({c: Answer.NONE if c in here else Answer.LOST for c in again})
        reopened = Reopened(tuple(again), self.deadline, declined=True)
        return [reopened, *(Ask(c) for c in here), SetTimer(self.deadline)]

    @property
    def able(self) -> set[ClientId]:
        """The clients that declined and may be asked again."""
        declined = {c for c, a in self.answers.items() if a is Answer.DECLINED}
        return declined - self.excluded

    @property
    def is_idle(self) -> bool:
        """True while no client is at work: none is asked yet, or all have declined or rest."""
        waits = self.stuck_until is not None and not self._outstanding
        return self.phase is Phase.GATHERING or waits

    def _wait_for_rested(self) -> list[Instruction]:
        """Wait without limit: resting clients ask in again on their own."""
        begins, self.stuck_until = self.stuck_until != math.inf, math.inf
        return [Unable(None)] if begins else []

    @property
    def _outstanding(self) -> int:
        return self.answers.number_of(Answer.NONE)

    @property
    def _least(self) -> int:
        return max(self.rules.min_updates, 1)

    @property
    def needed(self) -> int:
        """Updates that make the round complete at its deadline; never fewer than `min_updates`."""
        # A client that declines leaves the denominator: it has no data and cannot help.
        able = len(self.answers) - self.answers.number_of(Answer.DECLINED)
        return max(min(self.rules.quorum or self.rules.min_clients, able), self._least)

    def _quorum(self) -> bool:
        return self.answers.number_of(Answer.UPDATED) >= self.needed

    def _has_enough(self) -> bool:
        """Return True if the updates make a state."""
        if self.rules.suffices is None:
            return self.answers.number_of(Answer.UPDATED) >= self._least
        return self.rules.suffices({c for c, a in self.answers.items() if a is Answer.UPDATED})

    def _is_hopeless(self) -> bool:
        """Return True if those that can still answer, and those that have, would not suffice."""
        rules = self.rules
        if rules.suffices is None or rules.members is None:
            return False
        if len(self.excluded) != self._excluded_then:  # it only grows
            self._excluded_then = len(self.excluded)
            self._hopeless = not rules.suffices(rules.members - self.excluded)
        return self._hopeless

    def _close_if_it_suffices(self, now: float) -> list[Instruction]:
        """Close a round by the clients that have answered; others may connect meanwhile."""
        outstanding = self._outstanding > 0
        waits = not self.rules.eager and outstanding and now < self.deadline
        if waits and not self._is_hopeless():
            return []  # without a look at all that have answered, as after each of a thousand
        if self._has_enough():
            if self.rules.eager:
                return self._close(Outcome.DONE, Why.TAKEN)
            if not outstanding or now >= self.deadline:
                why = Why.DEADLINE if outstanding else Why.ANSWERED
                return self._close(Outcome.DONE, why)
            return []
        if self._is_hopeless():
            return self._close(Outcome.SKIPPED, Why.ANSWERED)
        if now < self.deadline:
            return []
        reopens = self.rules.on_short == "reopen" and self.reopens < self.rules.max_reopens
        if not (reopens or self.rules.endless):
            return self._close(Outcome.SKIPPED, Why.DEADLINE)
        self.reopens += 1
        self.deadline = now + self.rules.deadline_s
        waiting = (Answer.NONE, Answer.LOST, Answer.DECLINED)
        missing = tuple(sorted(c for c, a in self.answers.items() if a in waiting))
        again = [c for c in missing if c in self.connected and c not in self.excluded]
        declined = [c for c in again if self.answers[c] is Answer.DECLINED]
        self.answers.update(dict.fromkeys(declined, Answer.NONE))
        timer = SetTimer(self.deadline)
        return [Reopened(missing, self.deadline), *(Ask(c) for c in declined), timer]

    def _close(self, outcome: Outcome, why: Why) -> list[Instruction]:
        self.phase = Phase.CLOSED
        # In an asynchronous round no client is too late: the update may count in the next one.
        unneeded = why is Why.TAKEN or self.rules.asynchronous
        silent = Answer.SURPLUS if unneeded else Answer.STRAGGLER
        for client, answer in self.answers.items():
            if answer is Answer.NONE:
                self.answers[client] = silent
        if not self._has_enough():
            outcome = Outcome.SKIPPED
        return [Close(outcome, dict(self.answers), why)]

    # Phase and event -> what handles it, and the phases that may follow.
    TABLE: ClassVar[dict[tuple[Phase, type], tuple[Handler, tuple[Phase, ...]]]] = {
        (Phase.GATHERING, Present): (_on_present, _MAY_OPEN),
        (Phase.GATHERING, Available): (_on_available, _MAY_OPEN),
        (Phase.GATHERING, Left): (_on_left, _MAY_OPEN),
        (Phase.GATHERING, Tick): (_on_tick, _MAY_OPEN),
        (Phase.GATHERING, Stop): (_on_stop, (Phase.CLOSED,)),
        (Phase.GATHERING, Hold): (_on_hold, (Phase.GATHERING,)),
        (Phase.GATHERING, Resume): (_on_resume, _MAY_OPEN),
        (Phase.OPEN, Present): (_on_present_while_open, (Phase.OPEN,)),
        (Phase.OPEN, Available): (_on_available_while_open, (Phase.OPEN,)),
        (Phase.OPEN, Left): (_on_left_while_open, (Phase.OPEN,)),
        (Phase.OPEN, Updated): (_on_updated, _MAY_CLOSE),
        (Phase.OPEN, Declined): (_on_declined, _MAY_CLOSE),
        (Phase.OPEN, Withdrawn): (_on_withdrawn, _MAY_CLOSE),
        (Phase.OPEN, Tick): (_on_tick_while_open, _MAY_CLOSE),
        (Phase.OPEN, Stop): (_on_stop, (Phase.CLOSED,)),
        (Phase.OPEN, Hold): (_on_hold_while_open, (Phase.OPEN,)),
        (Phase.OPEN, Resume): (_on_hold_while_open, (Phase.OPEN,)),
        # A closed round answers nothing: the daemon opens the next one.
    }


def sample(holders: list[ClientId], limit: int, seed: tuple[int, ...]) -> list[ClientId]:
    """Return at most ``limit`` of the holders (0: all), sorted.

    A ranking by hash depends on the set of clients, not on the order in which they came.
    """
    if not limit or len(holders) <= limit:
        return holders

    def rank(client: ClientId) -> bytes:
        return hashlib.sha256(repr((seed, client)).encode()).digest()

    return sorted(sorted(holders, key=rank)[:limit])
