"""One round as a pure machine: events in, instructions out, no clock, no sockets, no disk.

Phases: ``gathering`` (too few clients), ``open`` (asked, collecting), ``closed``.

    gathering --Available (enough)--> open --Answered/Left/Tick--> closed
                                       ^                |
                                       +--- reopened ---+  (deadline without quorum)

``Round.TABLE`` at the end of the file is the whole transition table. Time is a number of
seconds of server uptime that the daemon passes in, so deadlines do not run while it is down.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from fcil_protocol.ids import ClientId


class Phase(StrEnum):
    """Where a round stands."""

    GATHERING = "gathering"
    OPEN = "open"
    CLOSED = "closed"


class Answer(StrEnum):
    """What an asked client has done so far."""

    NONE = "none"
    UPDATED = "updated"
    DECLINED = "declined"
    LOST = "lost"  # gone for longer than the grace period
    LATE = "late"  # silent at the deadline


class Outcome(StrEnum):
    """How a round ended."""

    DONE = "done"
    SHORT = "short"  # fewer updates than the quorum, by configuration
    SKIPPED = "skipped"  # no update at all: the state stays, the round counts (METHODS.md G2)


@dataclass(frozen=True)
class Rules:
    """The ``[round]`` section as far as one round needs it.

    Attributes:
        clients_per_round: how many holders to ask; 0 asks all.
        min_clients: how many clients must be connected before a round opens.
        quorum: how many updates make a round complete; 0 means ``min_clients``. Never more
            than the asked clients that did not decline.
        deadline_s: server uptime after which the round closes or is reopened.
        grace_s: how long an asked client may be away before the round goes on without it.
        on_short: ``reopen`` or ``close`` when the deadline passes without a quorum.
        max_reopens: after so many reopenings the round closes short.
        settle_s: once enough clients have come one by one, how long to wait for the others.
        skip_without_holders: close at once if enough clients are here and none has data.
    """

    clients_per_round: int = 0
    min_clients: int = 2
    quorum: int = 0
    deadline_s: float = 600.0
    grace_s: float = 20.0
    on_short: str = "reopen"
    max_reopens: int = 3
    settle_s: float = 0.0
    skip_without_holders: bool = False


# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Available:
    """A client is connected, ready, and (``holds``) has data for this round."""

    client: ClientId
    holds: bool
    now: float


@dataclass(frozen=True)
class Present:
    """Everybody who is here when the round begins: (client, holds) pairs, judged as one."""

    clients: tuple[tuple[ClientId, bool], ...]
    now: float


@dataclass(frozen=True)
class Left:
    """A client's connection ended."""

    client: ClientId
    now: float


@dataclass(frozen=True)
class Updated:
    """An update of this round is on disk."""

    client: ClientId
    now: float


@dataclass(frozen=True)
class Declined:
    """A client says that it cannot take part."""

    client: ClientId
    reason: str
    now: float


@dataclass(frozen=True)
class Withdrawn:
    """A client was revoked; whatever it answered counts no more."""

    client: ClientId
    reason: str
    now: float


@dataclass(frozen=True)
class Tick:
    """The time that `SetTimer` asked for has come."""

    now: float


@dataclass(frozen=True)
class Stop:
    """The operator closes the round short."""

    now: float


Event = Present | Available | Left | Updated | Declined | Withdrawn | Tick | Stop

# --- instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """Send RoundOpen to this client."""

    client: ClientId


@dataclass(frozen=True)
class Opened:
    """Store that the round is open and whom it asked."""

    asked: tuple[ClientId, ...]


@dataclass(frozen=True)
class SetTimer:
    """Wake the machine with a `Tick` at this time."""

    at: float


@dataclass(frozen=True)
class Reopened:
    """The deadline passed without a quorum; collecting goes on until a new deadline."""

    missing: tuple[ClientId, ...]
    at: float


@dataclass(frozen=True)
class Close:
    """The round is over."""

    outcome: Outcome
    answers: Mapping[ClientId, Answer]


Instruction = Ask | Opened | SetTimer | Reopened | Close


@dataclass
class Round:
    """State of one round; only `handle` changes it."""

    rules: Rules
    seed: tuple[int, ...]  # words that the sample of clients depends on
    phase: Phase = Phase.GATHERING
    connected: dict[ClientId, bool] = field(default_factory=dict)  # client -> holds data
    answers: dict[ClientId, Answer] = field(default_factory=dict)  # keys: the asked clients
    reasons: dict[ClientId, str] = field(default_factory=dict)
    away_since: dict[ClientId, float] = field(default_factory=dict)
    deadline: float = 0.0
    reopens: int = 0
    opens_at: float | None = None  # set while enough clients are here and others may follow

    @classmethod
    def restore(
        cls,
        rules: Rules,
        seed: tuple[int, ...],
        *,
        asked: Mapping[ClientId, Answer],
        remaining_s: float,
        now: float,
        reopens: int = 0,
    ) -> Round:
        """Go on with a round that was open when the server stopped.

        Nobody is connected yet: clients that have not answered get the grace period, at
        least, to come back.
        """
        waiting = [c for c, a in asked.items() if a is Answer.NONE]
        return cls(
            rules=rules,
            seed=seed,
            phase=Phase.OPEN,
            answers=dict(asked),
            away_since=dict.fromkeys(waiting, now),
            deadline=now + max(remaining_s, rules.grace_s),
            reopens=reopens,
        )

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event and return what is to be done, in order."""
        handler = self.TABLE.get((self.phase, type(event)))
        return handler(self, event) if handler is not None else []

    # --- gathering --------------------------------------------------------------------------

    def _present(self, event: Present) -> list[Instruction]:
        self.connected.update(event.clients)
        return self._open_if_enough(event.now)

    def _gather(self, event: Available) -> list[Instruction]:
        self.connected[event.client] = event.holds
        if self.opens_at is not None or not self.rules.settle_s:
            return [] if self.opens_at is not None else self._open_if_enough(event.now)
        if len(self.connected) < self.rules.min_clients:
            return []
        self.opens_at = event.now + self.rules.settle_s
        return [SetTimer(self.opens_at)]

    def _settled(self, event: Tick) -> list[Instruction]:
        if self.opens_at is None or event.now < self.opens_at:
            return []
        self.opens_at = None
        return self._open_if_enough(event.now)

    def _open_if_enough(self, now: float) -> list[Instruction]:
        holders = sorted(c for c, holds in self.connected.items() if holds)
        if len(self.connected) < self.rules.min_clients:
            return []
        if not holders:
            return self._close(Outcome.SKIPPED) if self.rules.skip_without_holders else []
        asked = self._sample(holders)
        self.phase = Phase.OPEN
        self.answers = dict.fromkeys(asked, Answer.NONE)
        self.deadline = now + self.rules.deadline_s
        return [Opened(tuple(asked)), *(Ask(c) for c in asked), SetTimer(self.deadline)]

    def _sample(self, holders: list[ClientId]) -> list[ClientId]:
        limit = self.rules.clients_per_round
        if not limit or len(holders) <= limit:
            return holders

        # A ranking by hash depends on who is there, not on the order in which they came.
        def rank(client: ClientId) -> bytes:
            return hashlib.sha256(repr((self.seed, client)).encode()).digest()

        return sorted(sorted(holders, key=rank)[:limit])

    def _forget(self, event: Left) -> list[Instruction]:
        self.connected.pop(event.client, None)
        return []

    # --- open -------------------------------------------------------------------------------

    def _all_back(self, event: Present) -> list[Instruction]:
        return [
            instruction
            for client, holds in event.clients
            for instruction in self._back(Available(client, holds, event.now))
        ]

    def _back(self, event: Available) -> list[Instruction]:
        self.connected[event.client] = event.holds
        self.away_since.pop(event.client, None)
        if self.answers.get(event.client) in (Answer.NONE, Answer.LOST):
            self.answers[event.client] = Answer.NONE
            return [Ask(event.client)]
        return []

    def _away(self, event: Left) -> list[Instruction]:
        self.connected.pop(event.client, None)
        if self.answers.get(event.client) is not Answer.NONE:
            return []
        self.away_since[event.client] = event.now
        return [SetTimer(event.now + self.rules.grace_s)]

    def _updated(self, event: Updated) -> list[Instruction]:
        if event.client in self.answers:
            self.answers[event.client] = Answer.UPDATED
        return self._settle(event.now)

    def _declined(self, event: Declined) -> list[Instruction]:
        if self.answers.get(event.client) is Answer.NONE:
            self.answers[event.client] = Answer.DECLINED
            self.reasons[event.client] = event.reason
        return self._settle(event.now)

    def _withdrawn(self, event: Withdrawn) -> list[Instruction]:
        if event.client in self.answers:
            self.answers[event.client] = Answer.DECLINED
            self.reasons[event.client] = event.reason
            self.away_since.pop(event.client, None)
        return self._settle(event.now)

    def _tick(self, event: Tick) -> list[Instruction]:
        for client, since in list(self.away_since.items()):
            if event.now >= since + self.rules.grace_s:
                del self.away_since[client]
                # Its update may have reached the disk after the connection ended.
                if self.answers[client] is Answer.NONE:
                    self.answers[client] = Answer.LOST
        return self._settle(event.now)

    def _stop(self, _event: Stop) -> list[Instruction]:
        return self._close(Outcome.SHORT)

    def _settle(self, now: float) -> list[Instruction]:
        counts = self._counts()
        if counts[Answer.NONE] == 0 and (self._quorum() or not counts[Answer.LOST]):
            return self._close(Outcome.DONE if self._quorum() else Outcome.SHORT)
        if now < self.deadline:
            return []
        if self._quorum():
            return self._close(Outcome.DONE)
        if self.rules.on_short == "reopen" and self.reopens < self.rules.max_reopens:
            self.reopens += 1
            self.deadline = now + self.rules.deadline_s
            waiting = (Answer.NONE, Answer.LOST)
            missing = tuple(sorted(c for c, a in self.answers.items() if a in waiting))
            return [Reopened(missing, self.deadline), SetTimer(self.deadline)]
        return self._close(Outcome.SHORT)

    def _counts(self) -> Counter[Answer]:
        return Counter(self.answers.values())

    def _quorum(self) -> bool:
        # Who declines leaves the denominator: it has no data and cannot help.
        counts = self._counts()
        wanted = self.rules.quorum or self.rules.min_clients
        needed = min(wanted, len(self.answers) - counts[Answer.DECLINED])
        return counts[Answer.UPDATED] >= max(needed, 1)

    def _close(self, outcome: Outcome) -> list[Instruction]:
        self.phase = Phase.CLOSED
        for client, answer in self.answers.items():
            if answer is Answer.NONE:
                self.answers[client] = Answer.LATE
        if Answer.UPDATED not in self.answers.values():
            outcome = Outcome.SKIPPED
        return [Close(outcome, dict(self.answers))]

    TABLE: ClassVar[dict[tuple[Phase, type], Callable[..., list[Instruction]]]] = {
        (Phase.GATHERING, Present): _present,
        (Phase.GATHERING, Available): _gather,
        (Phase.GATHERING, Left): _forget,
        (Phase.GATHERING, Tick): _settled,
        (Phase.GATHERING, Stop): _stop,
        (Phase.OPEN, Present): _all_back,
        (Phase.OPEN, Available): _back,
        (Phase.OPEN, Left): _away,
        (Phase.OPEN, Updated): _updated,
        (Phase.OPEN, Declined): _declined,
        (Phase.OPEN, Withdrawn): _withdrawn,
        (Phase.OPEN, Tick): _tick,
        (Phase.OPEN, Stop): _stop,
        # A closed round answers nothing: the daemon opens the next one.
    }
