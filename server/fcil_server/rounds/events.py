"""Events and instructions of a round, and the names of its phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer, Outcome


class Phase(StrEnum):
    """Phase of a round."""

    GATHERING = "gathering"
    OPEN = "open"
    CLOSED = "closed"


class Why(StrEnum):
    """Reason for which a round closed."""

    ANSWERED = "answered"  # no answer is outstanding
    TAKEN = "taken"  # as many updates as the round takes have come
    DEADLINE = "deadline"
    OPERATOR = "operator"
    REST = "rest_of_task"  # the operator, who also wants no more rounds of the task
    GIVEN_UP = "given_up"  # the first rounds of its kind changed nothing (`Exchange.gives_up`)
    UNSURE = "unsure"  # the evaluation found too few images right (`Exchange.least_accuracy`)
    UNCHANGED = "unchanged"  # an evaluation of the same model came before
    NO_HOLDER = "no_holder"  # too few connected clients, or none, have data for it
    VOID = "void"  # no state could be made of its updates; replaces the first reason
    TOO_FEW = "too_few"  # fewer updates than a state needs; replaces the first reason


class Answers(MutableMapping[ClientId, Answer]):
    """The answers of a round's asked clients, counted as they come.

    A round looks at the counts after every update; to count thousands each time would take longer
    than the updates.
    """

    def __init__(self, answers: Mapping[ClientId, Answer] | None = None) -> None:
        self._of: dict[ClientId, Answer] = dict(answers or {})
        self._counts = Counter(self._of.values())

    def __getitem__(self, client: ClientId) -> Answer:
        return self._of[client]

    def __setitem__(self, client: ClientId, answer: Answer) -> None:
        before = self._of.get(client)
        if before is not None:
            self._counts[before] -= 1
        self._counts[answer] += 1
        self._of[client] = answer

    def __delitem__(self, client: ClientId) -> None:
        self._counts[self._of.pop(client)] -= 1

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def number_of(self, answer: Answer) -> int:
        """Return the number of clients with this answer."""
        return self._counts[answer]


@dataclass(frozen=True)
class RoundRules:
    """The ``[round]`` section as far as one round needs it.

    Attributes:
        clients_per_round: number of holders to ask; 0 asks all. If they all decline, others are
            asked.
        take: number of updates, first on disk, that close the round; 0 waits for all asked clients.
        min_clients: connected clients needed to open a round.
        quorum: updates that make a round complete; 0 means ``min_clients``. Never more than the
            asked clients that did not decline; ``take`` updates are enough, too.
        min_updates: fewer updates change nothing, whichever clients decline; also the number of
            clients with data needed to open a round.
        deadline_s: server uptime after which the round closes or is reopened.
        grace_s: how long an asked client may be away before the round continues without it.
        on_short: ``reopen`` or ``close`` when the deadline passes without a quorum.
        max_reopens: after this many reopenings the round closes short.
        settle_s: once enough clients have come one by one, how long to wait for the others.
        retry_s: when too few updates can come because asked clients declined, how long before they
            are asked again, and four times as long each further time; counts as a reopening. 0
            skips the round at once.
        no_holder_s: how long enough clients may be connected of which too few have data before the
            round is skipped; None waits for ever.
        optional: True if a client that declines for any reason is not asked again: most have
            nothing to give.
        patient: True if a round that no asked client can ever do waits ``retry_s`` for others
            before it closes: several such rounds give something up (`Exchange.gives_up`).
        joinable: True if clients with data that connect while it is open are asked too.
        suffices: tells if the updates of some clients make a state, where their number does not.
        members: with ``suffices``: the only clients that can take part. If those that can still
            answer would not suffice, the round is over. None: any client can.
        eager: True if it closes as soon as they do.
        endless: True if it waits for them without limit.
        asynchronous: True if clients with data that connect while it is open are asked too, and
            those at work when it closes continue (``[round] mode``).
    """

    clients_per_round: int = 0
    take: int = 0
    min_clients: int = 2
    quorum: int = 0
    min_updates: int = 1
    deadline_s: float = 600.0
    grace_s: float = 20.0
    on_short: str = "reopen"
    max_reopens: int = 3
    settle_s: float = 0.0
    retry_s: float = 30.0
    no_holder_s: float | None = None
    optional: bool = False
    joinable: bool = False
    suffices: Callable[[Collection[ClientId]], bool] | None = None
    members: frozenset[ClientId] | None = None
    eager: bool = False
    endless: bool = False
    patient: bool = False
    asynchronous: bool = False


# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Available:
    """Connected, ready client, which has data for this round (``holds``) or not."""

    client: ClientId
    holds: bool
    now: float


@dataclass(frozen=True)
class Present:
    """All clients connected when the round begins: (client, holds) pairs, handled as one event."""

    clients: tuple[tuple[ClientId, bool], ...]
    now: float


@dataclass(frozen=True)
class Left:
    """End of a client's connection."""

    client: ClientId
    now: float


@dataclass(frozen=True)
class Updated:
    """Update of this round, now on disk."""

    client: ClientId
    now: float


@dataclass(frozen=True)
class Declined:
    """Message of a client that cannot take part.

    Attributes:
        final: it cannot take part later in this round either.
        resting: it asks in again on its own; until then it counts as not connected.
    """

    client: ClientId
    reason: str
    now: float
    final: bool = False
    resting: bool = False


@dataclass(frozen=True)
class Withdrawn:
    """Revocation of a client, which cancels its answer."""

    client: ClientId
    reason: str
    now: float


@dataclass(frozen=True)
class Tick:
    """Arrival of the time that `SetTimer` set."""

    now: float


@dataclass(frozen=True)
class Stop:
    """Order to close the round short: the operator's, and with ``REST`` its task's later ones."""

    now: float
    why: Why = Why.OPERATOR


@dataclass(frozen=True)
class Hold:
    """Order to ask no client for now; a round that has asked continues."""

    now: float


@dataclass(frozen=True)
class Resume:
    """End of a `Hold`."""

    now: float


Event = Present | Available | Left | Updated | Declined | Withdrawn | Tick | Stop | Hold | Resume

# --- instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """Send RoundOpen to this client."""

    client: ClientId


@dataclass(frozen=True)
class Opened:
    """Store that the round is open and which clients it asked."""

    asked: tuple[ClientId, ...]


@dataclass(frozen=True)
class Widened:
    """Store the clients asked by the open round: the earlier ones and further ones.

    Attributes:
        declined: all earlier ones have declined, and the round begins its wait again.
    """

    asked: tuple[ClientId, ...]
    declined: bool = True


@dataclass(frozen=True)
class SetTimer:
    """Wake the machine with a `Tick` at this time."""

    at: float


@dataclass(frozen=True)
class Reopened:
    """Extension of a round that missed its quorum until a new deadline.

    Attributes:
        declined: all asked clients had declined; those missing are asked again.
    """

    missing: tuple[ClientId, ...]
    at: float
    declined: bool = False


@dataclass(frozen=True)
class Unheld:
    """Notice that enough clients are connected and too few of them, or none, have data.

    Attributes:
        until: when the round is skipped; None: it waits.
    """

    until: float | None


@dataclass(frozen=True)
class Unable:
    """Notice that too few updates have come, or none, and that none is on its way.

    Attributes:
        until: when the clients are asked again, or the round is skipped; None: it waits for those
            that rest.
    """

    until: float | None


@dataclass(frozen=True)
class Close:
    """End of the round."""

    outcome: Outcome
    answers: Mapping[ClientId, Answer]
    why: Why = Why.ANSWERED


Instruction = Ask | Opened | Widened | SetTimer | Reopened | Unheld | Unable | Close
