"""Schedule of a run: pure functions from closed rounds to the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcil_adapters.contract import Exchange
from fcil_protocol.payloads.builtin import EVALUATE, LATE


@dataclass(frozen=True)
class Step:
    """One round of the plan: its kind, its index within (task, kind), and their number."""

    kind: str
    round: int
    rounds: int

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
    here = [e for e in exchanges if e.in_task(task) and not e.late]
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


def next_step(steps: Sequence[Step], closed: int) -> Step | None:
    """Return the step after ``closed`` finished rounds of a task, or None at its end."""
    return steps[closed] if closed < len(steps) else None
