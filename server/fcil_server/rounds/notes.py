"""Notes about a round for the operator, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from fcil_protocol.ids import ClientId
from fcil_server.ledger.enums import Answer
from fcil_server.rounds import events as machine
from fcil_server.rounds.asking import hidden_classes, wanted_images
from fcil_server.rounds.position import RunContext, RunProgress

NAMED = 12  # clients that a note lists


def opened(at: RunProgress, asked: tuple[ClientId, ...]) -> str:
    """Return the note that a round asks this many clients."""
    return f"{_name(at)} asks {len(asked)} client{'s' if len(asked) > 1 else ''}"


def widened(at: RunProgress, asked: tuple[ClientId, ...]) -> str:
    """Return the note that others are asked because all have declined so far."""
    return f"{_name(at)}: all have declined; it asks others too, {len(asked)} by now"


def reopened(kit: RunContext, at: RunProgress, what: machine.Reopened) -> str:
    """Return the note that a round continues past its deadline, with the missing clients."""
    names = _names(kit, what.missing)
    if what.declined:
        return f"{_name(at)} asks again: {names}"
    return f"{_name(at)}: the deadline passed without a quorum; still missing: {names}"


def unable(kit: RunContext, at: RunProgress, until_s: float | None) -> str:
    """Return the note that too many asked clients declined, with reasons and what follows when."""
    assert at.round is not None
    rules, reasons = at.round.rules, at.round.reasons
    without = sorted(c for c, a in at.round.answers.items() if a is not Answer.UPDATED)
    came = len(at.round.answers) - len(without)
    few = f", {came} of {rules.min_updates} updates" if came else ""
    why = ", ".join(sorted({r for r in reasons.values() if r})) or "no reason given"
    again = rules.on_short == "reopen" and at.round.reopens < rules.max_reopens
    end = "they are asked again" if again else "the round is skipped"
    names = _names(kit, without)
    if until_s is None:
        end = "it waits until one may work again; fcil-server close-round goes on without them"
        return f"{_name(at)}{few}: no update from {names} ({why}); {end}"
    who = "the others" if came else "all"
    return f"{_name(at)}{few}: {who} have declined ({why}): {names}; in {until_s:.0f} s {end}"


def void(at: RunProgress, why: str) -> str:
    """Return the note that a round changes nothing, because its updates cannot be combined."""
    return (
        f"{_name(at)} is void: its updates cannot be combined, and none in particular is to "
        f"blame; the model stays as it is. {why}"
    )


def too_few(at: RunProgress, usable: int, least: int) -> str:
    """Return the note that a round changes nothing, because it has too few updates."""
    updates = f"{usable} update{'' if usable == 1 else 's'}"
    return (
        f"{_name(at)} is skipped: {updates} that can be used, and {least} are needed "
        "(round.min_updates); the model stays as it is"
    )


def unheld(kit: RunContext, at: RunProgress, until_s: float | None) -> str:
    """Return the note that too few connected clients, or none, have images, and what follows."""
    assert at.task is not None
    assert at.step is not None
    assert at.round is not None
    end = "it waits; fcil-server close-round --rest-of-task goes on without them"
    if until_s is not None:
        end = f"in {until_s:.0f} s its rounds are skipped"
    hidden = hidden_classes(kit, at.task, at.step)
    if hidden:
        show = f"fcil-server classes show {hidden}"
        return f"task {at.task.index}: all its classes are hidden, undone by {show}; {end}"
    wanted = wanted_images(kit, at.task, at.step)
    holders = at.round.holders
    if holders:
        who = f"of those here {holders} hold{'s' if holders == 1 else ''} {wanted}, and a round"
        least = at.round.rules.min_updates
        return f"task {at.task.index}: {who} needs {least} updates (round.min_updates); {end}"
    return f"task {at.task.index}: nobody here holds {wanted}; {end}"


def _name(at: RunProgress) -> str:
    assert at.task is not None
    assert at.step is not None
    return f"task {at.task.index} {at.step.kind} round {at.step.round}"


def _names(kit: RunContext, clients: Iterable[ClientId]) -> str:
    listed = [kit.name_of(c) for c in clients]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
