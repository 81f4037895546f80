"""Schedule of a run: pure functions from closed rounds to the next step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fcil_adapters.contract import Exchange
from fcil_adapters.masks.exchanges import KEYS, MASKING, SHARES, UNMASK, VOTE
from fcil_protocol.payloads.builtin import EVALUATE, LATE
from fcil_server.ledger.rows import RoundRow
from fcil_server.rounds.events import Why


@dataclass(frozen=True)
class Step:
    """One round of the plan.

    Attributes:
        kind: of the round.
        round: its index within (task, kind).
        rounds: their number.
        prepares: for a round of mask keys: the kind of the round that these mask.
    """

    kind: str
    round: int
    rounds: int
    prepares: str = ""

    @property
    def is_last(self) -> bool:
        """True if the task has no later round of this kind."""
        return self.round + 1 >= self.rounds


def task_steps(
    exchanges: Sequence[Exchange], rounds_per_task: int, *, task: int, evaluate: bool
) -> tuple[Step, ...]:
    """List the rounds of a task in order: the method's exchanges, then the evaluation.

    Exchanges of unlabelled images depend on the evaluation, so they follow it, and it is made again
    after them; without it there are none. Late images have no place in the list (`late_step`).
    """
    steps: list[Step] = []
    here = [e for e in exchanges if e.in_task(task) and not e.late and e.kind not in MASKING]
    for unlabelled in (False, True) if evaluate else (False,):
        some = [e for e in here if (e.unlabelled > 0) is unlabelled]
        for exchange in some:
            rounds = rounds_per_task if exchange.rounds is None else exchange.rounds
            steps.extend(Step(exchange.kind, i, rounds) for i in range(rounds))
        if evaluate and (some or not unlabelled):
            steps.append(Step(EVALUATE, int(unlabelled), 1 + any(e.unlabelled for e in here)))
    return tuple(steps)


def late_step(number: int) -> Step:
    """Return the round of late images that is a task's ``number``-th one, from 0."""
    return Step(LATE, number, number + 1)


@dataclass(frozen=True)
class Past:
    """A closed round of a task: its kind, if it made a state, and if no attempt is to follow."""

    kind: str
    worked: bool
    last: bool = False

    @classmethod
    def of(cls, row: RoundRow) -> Past:
        """Return a closed round of the ledger.

        No attempt follows if an operator closed the rest, or if too few clients could give keys. If
        clients left after their keys, another attempt follows.
        """
        too_few = row.kind == KEYS and row.why == Why.NO_HOLDER
        return cls(row.kind, row.new_state is not None, row.why == Why.REST or too_few)


def next_masked_step(
    steps: Sequence[Step],
    past: Sequence[Past],
    masked: Collection[str],
    attempts: int,
    once: Collection[str] = (),
    gives_up: Mapping[str, int] = MappingProxyType({}),
) -> Step | None:
    """Return the step after some closed rounds of a task whose rounds are masked.

    Each round of a masked kind is five: keys, shares, the round itself, votes, unmasking. If one of
    the first four fails, they begin again, with new keys; not after an unmasking that failed, since
    some clients may have given shares, and take part in no second sum of the same updates.

    Args:
        steps: the task's, as without masks.
        past: its closed rounds, the oldest first.
        masked: the kinds of the rounds that are masked.
        attempts: most attempts at one round.
        once: the kinds of which clients send sums once: no attempt follows one that asked for them.
        gives_up: kind -> number of its first rounds in a task after which, if all failed, the
            others are left out (`Exchange.gives_up`); 0: none are.
    """
    rounds = deque(past)
    numbers: Counter[str] = Counter()  # closed rounds of each kind
    failed: Counter[str] = Counter()
    vain: Counter[str] = Counter()  # first rounds of each kind that failed

    def attempt(step: Step) -> Step | Past:
        """Return the first round of an attempt that is missing, or the last one that closed."""
        here = Past(KEYS, worked=False)
        for kind in (KEYS, SHARES, step.kind, VOTE, UNMASK):
            if not rounds:
                more = numbers[kind] + 1 if kind in MASKING else step.rounds + failed[kind]
                prepares = step.kind if kind == KEYS else ""
                return Step(kind, numbers[kind], more, prepares)
            if rounds[0].kind != kind:  # it was given up: of a fork, for example
                return replace(here, worked=False)
            here = rounds.popleft()
            numbers[kind] += 1
            failed[kind] += not here.worked
            if not here.worked:
                break
        return here

    for step in steps:
        if step.kind not in masked:
            if not rounds:
                return step
            rounds.popleft()
            continue
        if 0 < gives_up.get(step.kind, 0) <= vain[step.kind]:
            continue
        worked = False
        for _ in range(attempts):
            found = attempt(step)
            if isinstance(found, Step):
                return found
            worked = worked or found.worked
            sent = step.kind in once and found.kind in (step.kind, VOTE)
            if found.worked or found.last or found.kind == UNMASK or sent:
                break
            if rounds and rounds[0].kind != KEYS:
                break  # nothing more was tried
        if not worked and vain[step.kind] == step.round:  # from the first one on, without a gap
            vain[step.kind] += 1
    return None


def next_step(steps: Sequence[Step], closed: int) -> Step | None:
    """Return the step after ``closed`` finished rounds of a task, or None at its end."""
    return steps[closed] if closed < len(steps) else None
