"""What a round hears (events), says is to be done (instructions), and the words for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer, Outcome


class Phase(StrEnum):
    """Where a round stands."""

    GATHERING = "gathering"
    OPEN = "open"
    CLOSED = "closed"


class Why(StrEnum):
    """What closed a round."""

    ANSWERED = "answered"  # nobody is waited for any more
    TAKEN = "taken"  # as many updates as are taken have come
    DEADLINE = "deadline"
    OPERATOR = "operator"
    REST = "rest_of_task"  # the operator, who wants no more rounds of the task either
    NO_HOLDER = "no_holder"  # too few here, or nobody, have data for it
    VOID = "void"  # no state could be made of its updates; whatever closed it before
    TOO_FEW = "too_few"  # fewer updates than a state is made of; whatever closed it before


@dataclass(frozen=True)
class Rules:
    """The ``[round]`` section as far as one round needs it.

    Attributes:
        clients_per_round: how many holders to ask; 0 asks all. If they all decline, others are.
        take: how many updates close the round, the first to be on disk; 0 waits for all asked.
        min_clients: how many clients must be connected before a round opens.
        quorum: how many updates make a round complete; 0 means ``min_clients``. Never more
            than the asked clients that did not decline; as many as are taken are enough, too.
        min_updates: fewer updates change nothing, whoever declines; so many must have data, too,
            before a round opens.
        deadline_s: server uptime after which the round closes or is reopened.
        grace_s: how long an asked client may be away before the round goes on without it.
        on_short: ``reopen`` or ``close`` when the deadline passes without a quorum.
        max_reopens: after so many reopenings the round closes short.
        settle_s: once enough clients have come one by one, how long to wait for the others.
        retry_s: when so many that were asked declined that too few updates can come, how long
            before they are asked again, and four times as long each further time; counts as a
            reopening. 0 skips the round at once.
        no_holder_s: how long enough clients may be here of which too few have data before the
            round is skipped; None waits for ever.
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
    """A client says that it cannot take part.

    Attributes:
        final: nor can it later, in this round.
        resting: it asks in again by itself; until then it counts as one that is not here.
    """

    client: ClientId
    reason: str
    now: float
    final: bool = False
    resting: bool = False


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
    """The operator closes the round short, and with ``rest`` those after it in its task."""

    now: float
    rest: bool = False


@dataclass(frozen=True)
class Hold:
    """Nobody is to be asked for now; a round that has asked goes on."""

    now: float


@dataclass(frozen=True)
class Resume:
    """What `Hold` stopped may go on."""

    now: float


Event = Present | Available | Left | Updated | Declined | Withdrawn | Tick | Stop | Hold | Resume

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
class Widened:
    """Store that the open round asks these: whom it asked before, and others in their place."""

    asked: tuple[ClientId, ...]


@dataclass(frozen=True)
class SetTimer:
    """Wake the machine with a `Tick` at this time."""

    at: float


@dataclass(frozen=True)
class Reopened:
    """The deadline passed without a quorum; collecting goes on until a new deadline.

    Attributes:
        declined: it is because all had declined; those missing are asked again.
    """

    missing: tuple[ClientId, ...]
    at: float
    declined: bool = False


@dataclass(frozen=True)
class Unheld:
    """Say that enough clients are here and too few of them, or none, have data for the round.

    Attributes:
        until: when the round is skipped; None: it waits.
    """

    until: float | None


@dataclass(frozen=True)
class Unable:
    """Say that too few updates have come, or none, and that none is on its way.

    Attributes:
        until: when they are asked again, or the round is skipped; None: it waits for those that
            rest.
    """

    until: float | None


@dataclass(frozen=True)
class Close:
    """The round is over."""

    outcome: Outcome
    answers: Mapping[ClientId, Answer]
    why: Why = Why.ANSWERED


Instruction = Ask | Opened | Widened | SetTimer | Reopened | Unheld | Unable | Close
